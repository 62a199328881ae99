"""Writes checkpoints beside the loop, which waits for the copy to host memory alone."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields

import torch

from dit_lora.errors import DitLoraError, unwritable
from dit_lora.guard.snapshots import Snapshots
from dit_lora.training.checkpoints.files import SavedState

_PARTS = [part.name for part in fields(SavedState)]


class Saver:
    """One thread that writes one checkpoint at a time, from a copy in host memory that is its own.

    An error there, or with another file of the run (`fail`), is remembered: `stop_code` gives its code without
    waiting, `wait` the error itself. No copy is started after one, until it is forgotten. The copy costs as much host
    memory as the state has, once.
    """

    def __init__(self) -> None:
        # Its thread is no daemon: an interpreter that ends waits for the write under way.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[object]] = []
        self._live: Mapping[str, torch.Tensor] = {}
        # Its host buffers are allocated once, and used again by every checkpoint.
        self._copies = Snapshots(lambda: self._live, every=1, keep=1)
        self._error: DitLoraError | None = None

    def start(self, step: int, state: SavedState, write: Callable[[SavedState], object]) -> None:
        """Copy the state, then have the copy written beside the loop, after waiting for a write under way."""
        # There is one set of buffers: a write under way still reads it.
        if self.wait() is None:
            copy = self._copy(step, state)
            self.then(lambda: write(copy))

    def then(self, job: Callable[[], object]) -> None:
        """Run `job` in the same thread, after the jobs under way."""
        self._jobs.append(self._thread.submit(job))

    def fail(self, error: DitLoraError) -> None:
        """Note an error from elsewhere; it ends the run as an error of the thread does."""
        self._error = self._error or error

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note an `OSError` of this process within: it ends the run at the next step, on all ranks."""
        try:
            yield
        except OSError as error:
            self.fail(unwritable(error))

    def forget(self) -> None:
        """Take the error as dealt with: the next write is tried."""
        self.wait()
        self._error = None

    def stop_code(self) -> int:
        """Return the exit code of an error so far, or 0; waits for nothing."""
        # In order, and without waiting: the loop asks at every step.
        while self._jobs and self._jobs[0].done():
            self._take()
        return self._error.exit_code if self._error else 0

    def wait(self) -> DitLoraError | None:
        """Wait for all jobs under way, and return the first error so far."""
        while self._jobs:
            self._take()
        return self._error

    def _take(self) -> None:
        error = self._jobs[0].exception()
        self._jobs.pop(0)
        if error is None:
            return
        # A defect, or no memory: the run still has its state, and goes on to end in order.
        if not isinstance(error, DitLoraError):
            words = f"cannot save a checkpoint: {type(error).__name__}: {error}"
            raised, error = error, DitLoraError(words)
            error.__cause__ = raised
        self.fail(error)

    def _copy(self, step: int, state: SavedState) -> SavedState:
        self._live = {
            f"{part}/{name}": tensor
            for part in _PARTS
            for name, tensor in getattr(state, part).items()
        }
        self._copies.take(step)
        # `_live` is let go: it would keep gathered tensors alive until the next save.
        held, self._live = self._copies.read(step), {}
        parts = {
            part: {
                name.removeprefix(f"{part}/"): tensor
                for name, tensor in held.items()
                if name.startswith(f"{part}/")
            }
            for part in _PARTS
        }
        return SavedState(**parts)
