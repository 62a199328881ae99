"""Which checkpoints had the lowest held-out loss: they stay, and checkpoints/best.json names them."""

import json
from pathlib import Path
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.training.checkpoint import checkpoint_steps, prune
from dit_lora.training.journal import held_out_losses
from dit_lora.training.saving import Saver
from dit_lora.training.task import AnySetup

BEST = "best.json"


def note_best(setup: AnySetup, saver: Saver, step: int) -> None:
    """After a held-out loss, or after going back: what is best now, and which checkpoints need not stay."""
    folder, train = setup.runtime.dir, setup.recipe.train

    def note() -> None:
        best = best_checkpoints(folder, train.keep_best)
        try:
            write_whole(folder / "checkpoints" / BEST, json.dumps(best, indent=2) + "\n")
            prune(folder, step, train.keep, [one["step"] for one in best])
        except OSError as error:
            raise DitLoraError(f"cannot write {folder / 'checkpoints' / BEST}: {error}") from error

    if train.keep_best and setup.runtime.is_main:
        saver.then(note)


def best_checkpoints(run_dir: Path, count: int) -> list[dict[str, Any]]:
    """The `count` checkpoints with the lowest held-out loss, the lowest first, of those that are measured."""
    if not count:
        return []
    losses, kept = held_out_losses(run_dir), checkpoint_steps(run_dir)
    measured = sorted((losses[step], step) for step in kept if step in losses)
    return [
        {"checkpoint": kept[step].name, "step": step, "held_out_loss": loss}
        for loss, step in measured[:count]
    ]
