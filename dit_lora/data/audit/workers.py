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
from dit_lora.data.audit.probe import REFETCH_REMEDY, ProbedFile, probe_file
from dit_lora.data.media.media import Media
from dit_lora.data.sources.clips import LossMask
from dit_lora.environment.operating_system import block_interrupts
from dit_lora.errors import DitLoraError

STALL_TIMEOUT_S = 60.0
"""Seconds without a decoded packet after which a file is given up; a slow disk or an 8K frame takes a few."""

_HEARTBEAT_MESSAGE = None
"""Message that means "still working", sent instead of a result."""
_HEARTBEAT_INTERVAL_S = 1.0


def probe_all(
    media: Iterator[tuple[int, Media | LossMask]], workers: int, *, stall_timeout_s: float = STALL_TIMEOUT_S
) -> Generator[tuple[int, ProbedFile]]:
    """Measure `media` in worker processes; yields number and measurements of each file as soon as it is done.

    Files are taken from `media` as workers become free. Closing the iterator ends the processes.
    """
    pool: list[_Worker] = []
    has_more = True
    try:
        while True:
            # Give every idle worker a file before waiting, so that all processes stay busy.
            while has_more and (idle := _find_idle_worker(pool, workers)):
                job = next(media, None)
                has_more = job is not None
                if job is not None:
                    idle.submit(*job, stall_timeout_s)
            busy = [worker for worker in pool if worker.job_number is not None]
            if not busy:
                return
            # Wait for a result, but not beyond the earliest deadline.
            timeout = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
            ready = set(wait([worker.pipe for worker in busy], timeout))
            for worker in busy:
                if worker.pipe in ready:
                    result = worker.receive(stall_timeout_s)
                elif worker.deadline <= time.monotonic():
                    result = worker.reject_file("corrupt", f"the decoder made no progress for {stall_timeout_s:g} s")
                else:
                    continue
                if result is not None:
                    yield result
            # A worker that was killed is replaced by a new one in the next round.
            pool = [worker for worker in pool if worker.is_usable]
    finally:
        for worker in pool:
            worker.stop()


def _find_idle_worker(pool: "list[_Worker]", workers: int) -> "_Worker | None":
    """Find an idle worker process, or start one if the pool is not full; None if all are busy."""
    for worker in pool:
        if worker.job_number is None:
            return worker
    if len(pool) == workers:
        return None
    pool.append(_Worker())
    return pool[-1]


class _Worker:
    """A worker process that measures media files, with the number of the file it is working on."""

    def __init__(self) -> None:
        # Spawned, not forked: torch's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        self.pipe, worker_end = context.Pipe()
        self._process: BaseProcess = context.Process(target=_run_worker, args=(worker_end,), daemon=True)
        # Ctrl-C in a terminal is sent to every process, but the main one should end the workers. The
        # resource tracker must be started first, because starting it unblocks the signal again.
        resource_tracker.ensure_running()
        with block_interrupts():
            self._process.start()
        # Close the worker's end on this side: otherwise the pipe would not end when the worker dies.
        worker_end.close()
        self.job_number: int | None = None
        self.deadline = 0.0
        self.is_usable = True
        self._has_started = False

    def submit(self, number: int, media: Media | LossMask, stall_timeout_s: float) -> None:
        # Starting a process may take long on a busy machine, so the first file gets more time.
        limit = stall_timeout_s if self._has_started else max(stall_timeout_s, STALL_TIMEOUT_S)
        self.job_number, self.deadline = number, time.monotonic() + limit
        # If the process died while it was idle, `receive` reports it.
        with suppress(BrokenPipeError):
            self.pipe.send(media)

    def receive(self, stall_timeout_s: float) -> tuple[int, ProbedFile] | None:
        """Receive from a worker the number and measurements of a file, or None for a sign of life.

        A crash of the worker becomes a fault of the file.
        """
        try:
            result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            # A process that ends before its first sign of life would do so for every file, so stop the audit.
            if not self._has_started:
                self.stop()
                raise DitLoraError(
                    f"the audit's processes end when they start ({_describe_exit(self._process.exitcode)}); call it "
                    "inside if __name__ == '__main__'"
                ) from None
            return self.reject_file("corrupt", f"the decoder crashed ({_describe_exit(self._process.exitcode)})")
        self._has_started = True
        if result is _HEARTBEAT_MESSAGE:
            self.deadline = time.monotonic() + stall_timeout_s
            return None
        assert self.job_number is not None
        # Without a number, the worker counts as idle.
        numbered, self.job_number = (self.job_number, result), None
        return numbered

    def reject_file(self, code: str, message: str) -> tuple[int, ProbedFile]:
        """End a worker process, and return the number of its file with a finding that rejects the file."""
        self.stop()
        assert self.job_number is not None
        return self.job_number, ProbedFile((Finding(code, message, "reject", REFETCH_REMEDY),), broke=True)

    def stop(self) -> None:
        """Kill a worker process, which must not be used again."""
        self.is_usable = False
        self._process.kill()
        self._process.join()
        self.pipe.close()


def _describe_exit(code: int | None) -> str:
    # multiprocessing reports a signal as a negative exit code.
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _run_worker(pipe: Connection) -> None:
    """Measure files in the worker process until the other end of the pipe is closed."""
    # The first sign of life tells the main process that this one has started.
    heart = _Heartbeat(pipe)
    heart.send()
    while True:
        try:
            media = pipe.recv()
        except EOFError:
            return
        with _silence_stderr():
            result = probe_file(media, heart.send)
        pipe.send(result)


@contextmanager
def _silence_stderr() -> Iterator[None]:
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
class _Heartbeat:
    """Sends signs of life from a worker to the main process while a file takes long, at most one per second."""

    pipe: Connection
    last_sent_s: float = -_HEARTBEAT_INTERVAL_S

    def send(self) -> None:
        now = time.monotonic()
        # Called after every packet; a message each time would slow the decoding down.
        if now - self.last_sent_s > _HEARTBEAT_INTERVAL_S:
            self.last_sent_s = now
            self.pipe.send(_HEARTBEAT_MESSAGE)
