"""Runs probes in separate processes: a decoder that crashes or hangs affects only the file it was reading."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from dit_lora.data.audit.finding import Finding
from dit_lora.data.audit.probe import ANEW, ProbedFile, probe
from dit_lora.data.media.media import Media
from dit_lora.data.sources.clips import LossMask
from dit_lora.errors import DitLoraError

PATIENCE = 60.0
"""Seconds without a decoded packet after which a file is given up; a slow disk or an 8K frame takes a few."""

_ALIVE = None
"""Message that means "still working", sent instead of a result."""
# Minimum interval between two signs of life, in seconds.
_HEARTBEAT = 1.0


def probe_all(
    media: Iterator[tuple[int, Media | LossMask]], workers: int, *, patience: float = PATIENCE
) -> Generator[tuple[int, ProbedFile]]:
    """Yield the number and probe of each medium as soon as it is done; `media` is read as workers become free.

    Closing the iterator ends the processes.
    """
    pool: list[_Worker] = []
    has_more = True
    try:
        while True:
            # Give every idle worker a file before waiting, so that all processes stay busy.
            while has_more and (idle := _idle(pool, workers)):
                job = next(media, None)
                has_more = job is not None
                if job is not None:
                    idle.give(*job, patience)
            busy = [worker for worker in pool if worker.number is not None]
            if not busy:
                return
            # Wait for a result, but not beyond the earliest deadline.
            soonest = min(worker.deadline for worker in busy)
            timeout = max(0.0, soonest - time.monotonic())
            ready = set(wait([worker.pipe for worker in busy], timeout))
            for worker in busy:
                if worker.pipe in ready:
                    result = worker.receive(patience)
                elif worker.deadline <= time.monotonic():
                    result = worker.fail(
                        "corrupt", f"the decoder did not get on for {patience:g} s"
                    )
                else:
                    continue
                if result is not None:
                    yield result
            # A worker that was killed is replaced by a new one in the next round.
            pool = [worker for worker in pool if worker.usable]
    finally:
        for worker in pool:
            worker.end()


def _idle(pool: "list[_Worker]", workers: int) -> "_Worker | None":
    """An idle worker, started if the pool is not full; None if all are busy."""
    for worker in pool:
        if worker.number is None:
            return worker
    if len(pool) == workers:
        return None
    pool.append(_Worker())
    return pool[-1]


class _Worker:
    """One process, and the medium it is probing."""

    def __init__(self) -> None:
        # Spawned, not forked: torch's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.pipe, worker_end = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(worker_end,), daemon=True)
        # Ctrl-C in a terminal is sent to every process, but the main one should end the workers. The
        # resource tracker must be started first, because starting it unblocks the signal again.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Close the worker's end on this side: otherwise the pipe would not end when the worker dies.
        worker_end.close()
        self.number: int | None = None
        self.deadline = 0.0
        self.usable = True
        self._started = False

    def give(self, number: int, media: Media | LossMask, patience: float) -> None:
        """Send a medium to the process and set its deadline."""
        # Starting a process may take long on a busy machine, so the first file gets more time.
        limit = patience if self._started else max(patience, PATIENCE)
        self.number, self.deadline = number, time.monotonic() + limit
        # If the process died while it was idle, `receive` reports it.
        with suppress(BrokenPipeError):
            self.pipe.send(media)

    def receive(self, patience: float) -> tuple[int, ProbedFile] | None:
        """The number and the probe that arrived, or None for a sign of life. A crash becomes a fault of the file."""
        try:
            result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            # A process that ends before its first sign of life would do so for every file, so stop the audit.
            if not self._started:
                self.end()
                raise DitLoraError(
                    f"the audit's processes end as they start ({_cause(self._process.exitcode)}); call it below "
                    "if __name__ == '__main__'"
                ) from None
            return self.fail("corrupt", f"the decoder crashed ({_cause(self._process.exitcode)})")
        self._started = True
        if result is _ALIVE:
            self.deadline = time.monotonic() + patience
            return None
        assert self.number is not None
        # Without a number, the worker counts as idle.
        numbered, self.number = (self.number, result), None
        return numbered

    def fail(self, code: str, message: str) -> tuple[int, ProbedFile]:
        """End the process and return the file's number with a rejection."""
        self.end()
        assert self.number is not None
        return self.number, ProbedFile((Finding(code, message, "reject", ANEW),), broke=True)

    def end(self) -> None:
        """Kill the process, and do not use this worker again."""
        self.usable = False
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _cause(code: int | None) -> str:
    """The signal or exit code with which a process ended."""
    # multiprocessing reports a signal as a negative exit code.
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _serve(pipe: Connection) -> None:
    """Probe files in the worker process until the other end of the pipe is closed."""
    # The first sign of life tells the main process that this one has started.
    heart = _Heart(pipe)
    heart.beat()
    while True:
        try:
            media = pipe.recv()
        except EOFError:
            return
        with _silent():
            result = probe(media, heart.beat)
        pipe.send(result)


@contextmanager
def _silent() -> Iterator[None]:
    """Redirect stderr to nothing: libraries such as libtiff write to it directly, which breaks the progress bar."""
    sys.stderr.flush()
    # Redirect the file descriptor and not `sys.stderr`, because C libraries write to descriptor 2.
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


@dataclass
class _Heart:
    """Sends signs of life while a file takes long, at most one per second."""

    pipe: Connection
    last: float = -_HEARTBEAT

    def beat(self) -> None:
        now = time.monotonic()
        # Called after every packet; a message each time would slow the decoding down.
        if now - self.last > _HEARTBEAT:
            self.last = now
            self.pipe.send(_ALIVE)
