"""Writes checkpoints in a background thread; the training loop waits only for the copy to host memory."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields

import torch

from dit_lora.errors import DitLoraError, make_write_error
from dit_lora.guard.snapshots import Snapshots
from dit_lora.training.checkpoints.files import SavedState

_STATE_FIELDS = [part.name for part in fields(SavedState)]


class CheckpointWriter:
    """One thread that writes one checkpoint at a time, from its own copy in host memory.

    An error of a write, or one reported with `record_error`, is kept: `poll_exit_code` gives its exit code without
    waiting, `wait` the error. After it no copy is started until `clear_error`. The copy needs host memory for a state.
    """

    def __init__(self) -> None:
        # Not a daemon thread: an interpreter that exits waits for the pending write.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[object]] = []
        self._live_tensors: Mapping[str, torch.Tensor] = {}
        # Host buffers are allocated once and reused by every checkpoint.
        self._host_copies = Snapshots(lambda: self._live_tensors, interval_steps=1, max_snapshots=1)
        self._error: DitLoraError | None = None

    def save_async(self, step: int, state: SavedState, write: Callable[[SavedState], object]) -> None:
        """Copy a checkpoint's state to host memory and write the copy in the background.

        Waits for the previous write first.
        """
        # There is one set of buffers: a pending write still reads it.
        if self.wait() is None:
            copy = self._copy_state(step, state)
            self.submit(lambda: write(copy))

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` in the checkpoint writer's thread, after the pending jobs."""
        self._jobs.append(self._thread.submit(job))

    def record_error(self, error: DitLoraError) -> None:
        """Record an error that another part of the program met.

        It ends the run like an error of a checkpoint write.
        """
        self._error = self._error or error

    @contextmanager
    def record_os_errors(self) -> Iterator[None]:
        """Record an `OSError` raised inside the context: it ends the run at the next step, on all ranks."""
        try:
            yield
        except OSError as error:
            self.record_error(make_write_error(error))

    def clear_error(self) -> None:
        """Discard the recorded write error, so that the next checkpoint is written again."""
        self.wait()
        self._error = None

    def poll_exit_code(self) -> int:
        """Exit code of a checkpoint write error so far, or 0. Does not wait for pending writes."""
        # Jobs finish in the order in which they were submitted.
        while self._jobs and self._jobs[0].done():
            self._collect_job()
        return self._error.exit_code if self._error else 0

    def wait(self) -> DitLoraError | None:
        """Wait for all pending checkpoint writes; returns the first error so far, or None."""
        while self._jobs:
            self._collect_job()
        return self._error

    def _collect_job(self) -> None:
        error = self._jobs[0].exception()
        self._jobs.pop(0)
        if error is None:
            return
        # A bug, or no memory: the run still has its state and continues until it can end in order.
        if not isinstance(error, DitLoraError):
            message = f"cannot save a checkpoint: {type(error).__name__}: {error}"
            raised, error = error, DitLoraError(message)
            error.__cause__ = raised
        self.record_error(error)

    def _copy_state(self, step: int, state: SavedState) -> SavedState:
        self._live_tensors = {
            f"{part}/{name}": tensor for part in _STATE_FIELDS for name, tensor in getattr(state, part).items()
        }
        self._host_copies.take_snapshot(step)
        # Drop `_live_tensors`: it would keep gathered tensors alive until the next save.
        copies, self._live_tensors = self._host_copies.read_snapshot(step), {}
        parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in _STATE_FIELDS}
        # Back to the names within each field.
        for key, tensor in copies.items():
            part, _, name = key.partition("/")
            parts[part][name] = tensor
        return SavedState(**parts)
