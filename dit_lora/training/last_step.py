"""Saves the step that a run has reached when its disk, its data or a process fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from dit_lora.errors import DitLoraError, InterruptedRunError, unwritable
from dit_lora.guard.gate import NonFiniteError, PoisonedStateError
from dit_lora.training.checkpoints.files import checkpoint_path, newest_checkpoint
from dit_lora.training.run import Run
from dit_lora.training.session.session import agree


@contextmanager
def kept_at(run: Run, step: int) -> Iterator[None]:
    """Save `step` if a disk, a file or a process fails within, and say in the error how that went. Collective.

    On several ranks only errors that all agreed on are handled: after any other, the launcher ends the rest.
    """
    alone = run.setup.session.accelerator.num_processes == 1
    try:
        yield
    except (NonFiniteError, PoisonedStateError, InterruptedRunError):
        raise  # whoever raised these has saved what can be saved
    except DitLoraError as error:
        if not (error.collective or alone):
            raise
        # To save gathers over all ranks, so that an error of one rank alone cannot lead there.
        raise _ended(run, step, error) from error
    except OSError as error:
        if not alone:
            raise
        raise _ended(run, step, unwritable(error)) from error


def end_unread(run: Run, step: int, why: str) -> NoReturn:
    """End the run, whose state is that of `step`, because some rank cannot read its data: `why`. Collective."""
    accelerator = run.setup.session.accelerator
    with kept_at(run, step):
        agree(accelerator, DitLoraError(f"step {step + 1}: {why}") if why else None)
    raise AssertionError("no rank says why")


def _ended(run: Run, step: int, error: DitLoraError) -> DitLoraError:
    ended = DitLoraError(f"{error}{_last_effort(run, step)}")
    ended.exit_code, ended.collective = error.exit_code, True
    return ended


def _last_effort(run: Run, step: int) -> str:
    """Save a step though something failed, and say how that went. Collective."""
    session = run.setup.session
    # This process has taken no step: what it started from is on the disk already.
    if step <= run.start_step:
        return ""
    if session.lock.lost() is None:  # else the saver, on the main process, refuses
        run.checkpoints.saver.forget()
    try:
        run.checkpoints.save(step, run.recovery.record(), wait=True)
    except DitLoraError:
        checkpoint = newest_checkpoint(session.dir) if session.is_main else None
        resort = (
            f"train.resume=auto goes on from {checkpoint}"
            if checkpoint
            else "there is no checkpoint"
        )
        return f"\nstep {step} cannot be saved either; {resort}"
    # Lines that the disk did not take before: a resume does not take their steps again.
    if run.journal is not None:
        run.journal.flush()
    place = checkpoint_path(session.dir, step)
    return f"\nstep {step} is saved in {place}: continue with train.resume=auto"
