"""Checks of a recipe's paths. They import nothing heavy, so that `dit-lora train` answers a mistyped path at once."""

import os
from collections.abc import Iterator
from pathlib import Path

from dit_lora.config.recipe import Recipe
from dit_lora.config.remedies import (
    describe_missing_clips,
    describe_missing_conversations,
    describe_missing_model,
    get_hub_name,
)
from dit_lora.data.sources.listing import is_tar
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families import CHAT_FAMILIES
from dit_lora.training.session.run_lock import LOCK_FILE

_RUN_FILES = ("config.yaml", "metrics.jsonl", "eval_loss.jsonl", "held_out.jsonl", LOCK_FILE)


def require_recipe_paths(recipe: Recipe) -> None:
    """Raise one `DitLoraError` for all local paths of a recipe that are missing, and for an unusable folder.

    Names on the Hub are not looked up. The run checks all paths again, with their contents.
    """
    problems = [*_iterate_missing_sources(recipe)]
    if get_hub_name(recipe.model.path) is None and not Path(recipe.model.path).expanduser().is_dir():
        problems.insert(0, describe_missing_model(recipe.model.path))
    # `auto` finds its checkpoint in run.dir, or starts a new run.
    folder = Path(recipe.run.dir)
    resume, quarantine = recipe.train.resume, recipe.guard.quarantine
    if resume not in ("none", "auto") and not Path(resume).exists():
        problems.append(f"train.resume: {resume} does not exist; give auto, or a folder in {folder / 'checkpoints'}")
    if quarantine is not None and not Path(quarantine).exists():
        problems.append(f"guard.quarantine: {quarantine} does not exist; give the quarantine.jsonl of a run")
    if recipe.cache_dir.exists() and not recipe.cache_dir.is_dir():
        problems.append(f"data.cache: {recipe.cache_dir} is a file; give a folder, which is created")
    try:
        require_run_folder(folder)
        # Both experts have folders of their own, which are checked together when the run starts.
        if recipe.model.part != "both":
            require_no_saved_steps(recipe, folder)
    except DitLoraError as error:
        problems.append(str(error))
    if problems:
        raise DitLoraError(problems[0] if len(problems) == 1 else format_list("correct these paths", problems))


def require_run_folder(folder: Path) -> None:
    """Raise `DitLoraError` if a run cannot write into its folder, or if the folder holds something else."""
    # The folder itself, or its nearest parent that exists.
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise DitLoraError(f"cannot write run.dir {folder}: {existing} is not a writable directory")
    # A folder of an earlier run may be reused; other folders with files may not.
    is_run = any((folder / name).exists() for name in _RUN_FILES)
    if existing == folder and any(folder.iterdir()) and not is_run:
        raise DitLoraError(f"run.dir {folder} is not empty and is not a run; choose another folder")


def require_no_saved_steps(recipe: Recipe, folder: Path) -> None:
    """Raise `DitLoraError` if a folder holds steps of a run that the recipe does not resume."""
    if recipe.train.resume != "none" or not (folder / "metrics.jsonl").exists():
        return
    message = f"run.dir {folder} already has a run; continue it with train.resume=auto, or choose another run.dir"
    # Only these results can be the start of another run.
    if recipe.train.mode == "lora" and recipe.model.family not in CHAT_FAMILIES:
        message += f" (to train on from its result, add lora.init={folder})"
    raise DitLoraError(message)


def _iterate_missing_sources(recipe: Recipe) -> Iterator[str]:
    for number, source in enumerate(recipe.data.all_sources):
        name = f"data.sources[{number}]" if recipe.data.sources else "data.path"
        path = Path(source.path).expanduser()
        # The model itself fills the folder of a source that is generated.
        if source.generate is not None:
            continue
        if recipe.model.family in CHAT_FAMILIES:
            if not path.is_file():
                yield f"{name}: {describe_missing_conversations(source.path)}"
        elif is_tar(path):
            if not path.is_file():
                yield f"{name}: no file {source.path}"
        elif not path.is_dir() and get_hub_name(source.path) is None:
            yield f"{name}: {describe_missing_clips(source.path)}"
