"""What a run keeps to be continued: its checkpoints, written beside the loop, and the state that it goes on from."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dit_lora.errors import DitLoraError, InterruptedRunError, unwritable
from dit_lora.numerics.gate import NonFiniteError, PoisonedStateError
from dit_lora.numerics.shards import gathered
from dit_lora.training.best import best_checkpoints
from dit_lora.training.checkpoint import (
    SavedState,
    checkpoint_path,
    checkpoint_steps,
    load_checkpoint,
    newest_checkpoint,
    require_same_recipe,
    restore,
    save_checkpoint,
)
from dit_lora.training.guarding import guard_record
from dit_lora.training.place import has_dropout, moved, place_of
from dit_lora.training.runtime import agree

if TYPE_CHECKING:
    from dit_lora.training.run import Run


def require_own(run: "Run", path: Path) -> None:
    """Raise `DitLoraError` if a checkpoint is another recipe's, before anything is compared or changed."""
    require_same_recipe(path, run.identity, place_of(run.runtime))


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


def trouble(run: "Run") -> int:
    """The exit code of what has gone wrong with this process's files, or 0; waits for nothing."""
    lost = run.runtime.lock.lost()
    if lost is not None:
        run.saver.fail(lost)
    return run.saver.stop_code()


@contextmanager
def kept_at(run: "Run", step: int) -> Iterator[None]:
    """What ends the run within for want of a disk, a file or a process leaves `step` saved, and says so. Collective.

    Of several ranks only errors that all agreed on: of others, the launcher ends the rest.
    """
    alone = run.runtime.accelerator.num_processes == 1
    try:
        yield
    except (NonFiniteError, PoisonedStateError, InterruptedRunError):
        raise  # they have seen to it
    except DitLoraError as error:
        if not (error.collective or alone):
            raise
        raise _ended(run, step, error) from error
    except OSError as error:
        if not alone:
            raise
        raise _ended(run, step, unwritable(error)) from error


def end_unread(run: "Run", step: int, why: str) -> NoReturn:
    """End the run, whose state is that of `step`, because some rank cannot read its data: `why`. Collective."""
    with kept_at(run, step):
        agree(run.runtime.accelerator, DitLoraError(f"step {step + 1}: {why}") if why else None)
    raise AssertionError("no rank says why")


def _ended(run: "Run", step: int, error: DitLoraError) -> DitLoraError:
    ended = DitLoraError(f"{error}{_last_effort(run, step)}")
    ended.exit_code, ended.collective = error.exit_code, True
    return ended


def _last_effort(run: "Run", step: int) -> str:
    """Save a step though something failed, and say how that went. Collective."""
    if step <= run.start_step:
        return ""
    if run.runtime.lock.lost() is None:  # else the saver, on the main process, refuses
        run.saver.forget()
    try:
        save(run, step, wait=True)
    except DitLoraError:
        kept = newest_checkpoint(run.runtime.dir) if run.runtime.is_main else None
        resort = f"train.resume=auto goes on from {kept}" if kept else "there is no checkpoint"
        return f"\nstep {step} cannot be saved either; {resort}"
    if run.journal is not None:
        run.journal.flush()
    place = checkpoint_path(run.runtime.dir, step)
    return f"\nstep {step} is saved in {place}: continue with train.resume=auto"


@contextmanager
def saved_to_the_end(run: "Run") -> Iterator[None]:
    """Whatever ends the training within, a checkpoint under way is written to its end first."""
    try:
        yield
    finally:
        error = run.saver.wait()
        if error is not None and not error.shown:
            run.runtime.say(f"warning: {error}")
