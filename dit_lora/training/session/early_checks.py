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


def require_paths(recipe: Recipe) -> None:
    """Raise one `DitLoraError` for all local paths of a recipe that are missing, and for an unusable run.dir.

    Names on the Hub are not looked up. The run checks all paths again, with their contents.
    """
    problems = [*_iterate_missing_paths(recipe)]
    folder = Path(recipe.run.dir)
    try:
        require_run_folder(folder)
        # Both experts have folders of their own, which are checked together when the run starts.
        if recipe.model.part != "both":
            require_no_steps(recipe, folder)
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


def require_no_steps(recipe: Recipe, folder: Path) -> None:
    """Raise `DitLoraError` if a folder holds steps of a run that the recipe does not resume."""
    if recipe.train.resume != "none" or not (folder / "metrics.jsonl").exists():
        return
    message = f"run.dir {folder} already has a run; continue it with train.resume=auto, or choose another run.dir"
    if recipe.train.mode == "lora" and recipe.model.family not in CHAT_FAMILIES:
        message += f" (to train on from its result, add lora.init={folder})"
    raise DitLoraError(message)


def _iterate_missing_paths(recipe: Recipe) -> Iterator[str]:
    model = recipe.model.path
    if get_hub_name(model) is None and not Path(model).expanduser().is_dir():
        yield describe_missing_model(model)
    for number, source in enumerate(recipe.data.all_sources):
        problem = _describe_data_problem(source.path, is_chat=recipe.model.family in CHAT_FAMILIES)
        # The model itself fills the folder of a source that is generated.
        if problem and source.generate is None:
            yield f"data.sources[{number}]: {problem}" if recipe.data.sources else f"data.path: {problem}"
    if recipe.train.resume not in ("none", "auto") and not Path(recipe.train.resume).exists():
        checkpoints = Path(recipe.run.dir) / "checkpoints"
        yield f"train.resume: {recipe.train.resume} does not exist; give auto, or a folder in {checkpoints}"
    if recipe.guard.quarantine is not None and not Path(recipe.guard.quarantine).exists():
        yield f"guard.quarantine: {recipe.guard.quarantine} does not exist; give the quarantine.jsonl of a run"


def _describe_data_problem(location: str, *, is_chat: bool) -> str | None:
    """What is wrong with the path of a data source; None if nothing is, or if it is a name on the Hub."""
    path = Path(location).expanduser()
    if is_chat:
        return None if path.is_file() else describe_missing_conversations(location)
    if is_tar(path):
        return None if path.is_file() else f"no file {location}"
    return None if path.is_dir() or get_hub_name(location) else describe_missing_clips(location)
