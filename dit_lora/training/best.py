"""Keeps the checkpoints with the lowest held-out loss, which checkpoints/best.json names."""

import json
from pathlib import Path
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.training.checkpoints.files import checkpoint_steps, prune
from dit_lora.training.checkpoints.writer import Saver
from dit_lora.training.journal import held_out_losses
from dit_lora.training.task import AnySetup

BEST = "best.json"


def note_best(setup: AnySetup, saver: Saver, step: int) -> None:
    """Write best.json after a held-out loss or after going back, and drop checkpoints that need not stay."""
    folder, train = setup.session.dir, setup.recipe.train

    def note() -> None:
        best = best_checkpoints(folder, train.keep_best)
        try:
            write_whole(folder / "checkpoints" / BEST, json.dumps(best, indent=2) + "\n")
            prune(folder, step, train.keep, [one["step"] for one in best])
        except OSError as error:
            raise DitLoraError(f"cannot write {folder / 'checkpoints' / BEST}: {error}") from error

    if train.keep_best and setup.session.is_main:
        # In the saver's thread: the checkpoint under way is whole by then, and counted.
        saver.then(note)


def best_checkpoints(run_dir: Path, count: int) -> list[dict[str, Any]]:
    """Return the `count` measured checkpoints with the lowest held-out loss, the lowest first."""
    if not count:
        return []
    losses, checkpoints = held_out_losses(run_dir), checkpoint_steps(run_dir)
    measured = sorted((losses[step], step) for step in checkpoints if step in losses)
    return [
        {"checkpoint": checkpoints[step].name, "step": step, "held_out_loss": loss}
        for loss, step in measured[:count]
    ]
