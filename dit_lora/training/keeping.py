"""What a run keeps to be continued: its checkpoints, written beside the loop, and the state that it goes on from."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_lora.numerics.shards import gathered
from dit_lora.training.best import best_checkpoints
from dit_lora.training.checkpoint import (
    SavedState,
    checkpoint_steps,
    load_checkpoint,
    restore,
    save_checkpoint,
)
from dit_lora.training.guarding import guard_record
from dit_lora.training.place import has_dropout, moved, place_of
from dit_lora.training.runtime import agree

if TYPE_CHECKING:
    from dit_lora.training.run import Run


def resume(run: "Run", path: Path) -> dict[str, Any]:
    """Continue from a checkpoint, wherever it was written; what recovery had changed of the run."""
    runtime = run.runtime
    place = place_of(runtime)
    loaded = load_checkpoint(path, run.identity, place)
    restore(loaded, run.engine, run.ema)
    run.start_step = loaded.step
    runtime.say(f"resumed at step {loaded.step} from {path}")
    differs = moved(loaded.place, place, dropout=has_dropout(run.transformer))
    if differs:
        runtime.say(f"continued elsewhere: {differs}")
    if run.recipe.train.resume == "auto":  # which takes the newest whole one
        for step, newer in checkpoint_steps(runtime.dir).items():
            if step > loaded.step:
                runtime.say(f"warning: passed over {newer}: it is torn or altered")
    return loaded.guard


def save(run: "Run", step: int, *, wait: bool = False) -> None:
    """Write a checkpoint beside the loop; an error of it stops all ranks at the next step, or here with `wait`.

    Collective. One process writes, one checkpoint at a time: all wait here for an earlier one.
    """
    settle(run)
    averages = run.ema.tensors() if run.ema else {}
    state = SavedState(
        run.engine.weights(),
        run.engine.moments(),
        gathered(averages, keep=run.runtime.is_main),
    )
    if run.runtime.is_main:
        about = {
            "guard": {**guard_record(run.guard), "parity": {"passed": run.parity.passed}},
            "place": place_of(run.runtime),
        }
        folder, identity = run.runtime.dir, run.identity
        keep, count = run.recipe.train.keep, run.recipe.train.keep_best

        def write(copy: SavedState) -> None:
            best = [one["step"] for one in best_checkpoints(folder, count)]
            save_checkpoint(folder, step, copy, identity, keep=keep, best=best, **about)

        run.saver.start(step, state, write)
    if wait:
        settle(run)


def settle(run: "Run") -> None:
    """Wait until what was saved is on the disk; all ranks learn whether it is."""
    error = run.saver.wait()
    if error is not None:
        error.shown = True  # by what is raised here
    agree(run.runtime.accelerator, error)


@contextmanager
def saved_to_the_end(run: "Run") -> Iterator[None]:
    """Whatever ends the training within, a checkpoint under way is written to its end first."""
    try:
        yield
    finally:
        error = run.saver.wait()
        if error is not None and not error.shown:
            run.runtime.say(f"warning: {error}")
