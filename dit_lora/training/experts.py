"""Ends a run of both experts: places their adapters in one folder, as other programs and the Hub expect."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.config.experts import EXPERT_NAMES
from dit_lora.config.load import dump_recipe
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.files import write_atomically
from dit_lora.training.checkpoints.files import checkpoint_path, is_complete_checkpoint
from dit_lora.training.finished import find_finished_step
from dit_lora.training.session.session import Session
from dit_lora.verify.expert_pair import format_expert_filename


def require_new_expert_folders(recipes: Sequence[Recipe]) -> None:
    """Raise `DitLoraError` if a later expert's run folder already holds a run: it would fail when its turn comes."""
    # The first folder is checked when its run starts.
    for recipe in recipes[1:]:
        folder = Path(recipe.run.dir)
        if recipe.train.resume == "none" and (folder / "metrics.jsonl").exists():
            raise DitLoraError(
                f"run.dir {folder.parent} already has a run of {folder.name}; continue it with train.resume=auto, "
                "or choose another run.dir"
            )


def is_run_finished(recipe: Recipe) -> bool:
    """True if a run that may be resumed has finished, after all of its steps or early (`train.stop_after`)."""
    step = find_finished_step(recipe) if recipe.train.resume != "none" else None
    # The files say that the run ended, the digests that its last checkpoint is complete.
    return step is not None and is_complete_checkpoint(checkpoint_path(Path(recipe.run.dir), step))


def combine_expert_adapters(session: Session, recipe: Recipe) -> None:
    """Copy both experts' adapters to run.dir/adapter, write the recipe to run.dir, and log the folder.

    Main process only. Nothing is copied if base weights were trained too: each adapter finds them in its own folder.
    """
    root = Path(recipe.run.dir)
    if session.is_main:
        write_atomically(root / "config.yaml", dump_recipe(recipe))
        folders = {name: root / name / "adapter" for name in EXPERT_NAMES.values()}
        if any((folder / BASE_FILE).is_file() for folder in folders.values()):
            return
        (root / "adapter").mkdir(exist_ok=True)
        for name, folder in folders.items():
            file = root / "adapter" / format_expert_filename(name)
            # Copied under another name and renamed, so that a half-written file never has the final name.
            partial = file.with_suffix(".partial")
            shutil.copyfile(folder / ADAPTER_FILE, partial)
            partial.replace(file)
        session.say(f"adapters of both experts: {root / 'adapter'}")
