"""Commands that the studio starts: ordinary `dit-lora` processes, which go on when the studio stops."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Literal

from dit_lora.errors import DitLoraError

JobState = Literal["waiting", "running", "done", "failed", "stopped"]
JOB_COLORS: dict[JobState, str] = {"waiting": "", "running": "ok", "done": "ok", "failed": "reject", "stopped": "warn"}
"""Color class of each state."""
_TAIL_BYTES = 4000  # bytes at the end of a command's output that are shown
_MAX_JOBS = 100  # the latest ones, which are shown


@dataclass
class CommandJob:
    """One command: waiting, running, or ended."""

    job_id: str
    arguments: Sequence[str]
    """The arguments after `dit-lora`."""
    log: Path
    run_id: str
    """Id of the run that the command works on."""
    results: Path | None = None
    """Folder in which the command writes samples."""
    state: JobState = "waiting"
    exit_code: int | None = None
    process: "subprocess.Popen[bytes] | None" = None
    created: float = field(default_factory=time.time)

    @property
    def command(self) -> str:
        """The command as it is typed in a shell."""
        return shlex.join(["dit-lora", *self.arguments])

    @property
    def color(self) -> str:
        return JOB_COLORS[self.state]

    @property
    def output(self) -> str:
        """The end of the command's output."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""


class JobQueue:
    """Runs commands: those for the GPU one after another, others at once."""

    def __init__(self) -> None:
        self._jobs: dict[str, CommandJob] = {}
        self._lock = Lock()
        self._waiting: SimpleQueue[CommandJob] = SimpleQueue()
        self._folder: Path | None = None
        self._counter = 0
        Thread(target=self._run_waiting, daemon=True).start()

    def list_jobs(self) -> list[CommandJob]:
        """The latest jobs, the newest first."""
        with self._lock:
            return list(reversed(self._jobs.values()))[:_MAX_JOBS]

    def add(self, arguments: Sequence[str], run_id: str, *, needs_gpu: bool, results: Path | None = None) -> None:
        """Start a command, or put it behind the others that need the GPU."""
        with self._lock:
            # Readable by this user only. It stays, because commands go on when the studio stops.
            self._folder = self._folder or Path(tempfile.mkdtemp(prefix="dit-lora-studio-"))
            self._counter += 1
            job_id = str(self._counter)
            job = CommandJob(job_id, list(arguments), self._folder / f"{job_id}.log", run_id, results)
            self._jobs[job_id] = job
        # Two trainings would share the GPU's memory; an export uses the CPU.
        if needs_gpu:
            self._waiting.put(job)
        else:
            Thread(target=self._run, args=(job,), daemon=True).start()

    def stop(self, job_id: str) -> None:
        """Take a waiting job out of the queue, or press Ctrl-C for a running one: a training saves and ends.

        Raises:
            DitLoraError: If the job has ended.
        """
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None or job.state not in ("waiting", "running"):
                raise DitLoraError("this command has ended already")
            if job.process is not None:
                # Its whole group, as a terminal does.
                os.killpg(job.process.pid, signal.SIGINT)
            job.state = "stopped"

    def _run_waiting(self) -> None:
        while True:
            self._run(self._waiting.get())

    def _run(self, job: CommandJob) -> None:
        with self._lock:
            if job.state == "stopped":
                return
            try:
                # In a session of its own, so that neither Ctrl-C here nor a closed terminal ends a training.
                with job.log.open("wb") as log:
                    job.process = subprocess.Popen(
                        [sys.executable, "-m", "dit_lora", *job.arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
            except (OSError, ValueError):  # without memory or disk space, or a NUL in an argument
                job.state = "failed"
                return
            job.state = "running"
        # Without the lock: a training takes hours.
        code = job.process.wait()
        with self._lock:
            job.exit_code = code
            if job.state == "running":
                job.state = "failed" if code else "done"
