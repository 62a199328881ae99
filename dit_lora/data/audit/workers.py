"""Probes in processes of their own: a decoder that crashes or hangs costs the file that it was given, no more."""

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
"""Seconds without a decoded packet after which a file is given up; a slow disk and an 8K frame take a few."""

_ALIVE = None
"""Sign of life, sent in place of a result."""
_HEARTBEAT = 1.0  # seconds


def probe_all(
    media: Iterator[tuple[int, Media | LossMask]], workers: int, *, patience: float = PATIENCE
) -> Generator[tuple[int, ProbedFile]]:
    """Yield the probe of each medium with its number, as they are done; `media` is drawn from as workers are free.

    Closing the iterator ends the processes.
    """
    pool: list[_Worker] = []
    left = True
    try:
        while True:
            while left and (idle := _idle(pool, workers)):
                job = next(media, None)
                left = job is not None
                if job is not None:
                    idle.give(*job, patience)
            busy = [worker for worker in pool if worker.number is not None]
            if not busy:
                return
            # Wait for a result, but no longer than the first deadline.
            soonest = min(worker.deadline for worker in busy)
            timeout = max(0.0, soonest - time.monotonic())
            ready = set(wait([worker.pipe for worker in busy], timeout))
            for worker in busy:
                if worker.pipe in ready:
                    done = worker.receive(patience)
                elif worker.deadline <= time.monotonic():
                    done = worker.fail("corrupt", f"the decoder did not get on for {patience:g} s")
                else:
                    continue
                if done is not None:
                    yield done
            pool = [worker for worker in pool if worker.usable]
    finally:
        for worker in pool:
            worker.end()


def _idle(pool: "list[_Worker]", workers: int) -> "_Worker | None":
    for worker in pool:
        if worker.number is None:
            return worker
    if len(pool) == workers:
        return None
    pool.append(_Worker())
    return pool[-1]


class _Worker:
    """One process, and the medium that it is given."""

    def __init__(self) -> None:
        # Spawned, not forked: torch's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(other,), daemon=True)
        # Ctrl-C at the terminal is sent to every process; the main one ends the others. The
        # resource tracker is started first, because its start would unblock the signal again.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # While this side holds the worker's end open, the worker's death would not end the pipe.
        other.close()
        self.number: int | None = None
        self.deadline = 0.0
        self.usable = True
        self._started = False

    def give(self, number: int, media: Media | LossMask, patience: float) -> None:
        # A busy machine takes long to start a process, which is not the file's fault.
        limit = patience if self._started else max(patience, PATIENCE)
        self.number, self.deadline = number, time.monotonic() + limit
        # If the process died while it was idle, `receive` says so.
        with suppress(BrokenPipeError):
            self.pipe.send(media)

    def receive(self, patience: float) -> tuple[int, ProbedFile] | None:
        """Return the number and the probe that came, or None for a sign of life; a crash becomes the file's fault."""
        try:
            result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            # A process that ends before its first sign of life would do so for every file.
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
        done, self.number = (self.number, result), None
        return done

    def fail(self, code: str, message: str) -> tuple[int, ProbedFile]:
        self.end()
        assert self.number is not None
        return self.number, ProbedFile((Finding(code, message, "reject", ANEW),), broke=True)

    def end(self) -> None:
        self.usable = False
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _serve(pipe: Connection) -> None:
    """Probe, in the worker's process, what comes until the other end is closed."""
    # The first sign of life says that the process has started.
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
    """Keep stderr closed: libraries that write to it by themselves, as libtiff does, would tear the progress bar."""
    sys.stderr.flush()
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
    """Sends signs of life while a file takes long, at most one a second."""

    pipe: Connection
    last: float = -_HEARTBEAT

    def beat(self) -> None:
        now = time.monotonic()
        if now - self.last > _HEARTBEAT:
            self.last = now
            self.pipe.send(_ALIVE)
