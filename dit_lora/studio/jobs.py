"""Commands that the studio starts: ordinary `dit-lora` processes, which go on when the studio stops."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

from dit_lora.environment.command_job import CommandJob
from dit_lora.environment.operating_system import list_gpus
from dit_lora.errors import DitLoraError

_MAX_JOBS = 100  # the latest ones, which are shown


class JobQueue:
    """Runs commands: GPU commands one at a time on each GPU (without a GPU, one at a time), others immediately."""

    def __init__(self, find_gpus: Callable[[], Sequence[str]] = list_gpus) -> None:
        self._find_gpus = find_gpus
        self._has_workers = False
        self._jobs: dict[str, CommandJob] = {}
        self._lock = Lock()
        self._waiting: SimpleQueue[CommandJob] = SimpleQueue()
        self._folder: Path | None = None
        self._counter = 0

    def list_jobs(self) -> list[CommandJob]:
        """The latest jobs as they are now, the newest first: a job that ends later does not change in this list."""
        with self._lock:
            return [replace(job) for job in reversed(self._jobs.values())][:_MAX_JOBS]

    def add(self, arguments: Sequence[str], page: str, *, needs_gpu: bool, results: Path | None = None) -> CommandJob:
        """Start a command, or put it behind the others that need a GPU."""
        with self._lock:
            # Readable by this user only. It stays, because commands go on when the studio stops.
            self._folder = self._folder or Path(tempfile.mkdtemp(prefix="dit-lora-studio-"))
            self._counter += 1
            job_id = str(self._counter)
            job = CommandJob(job_id, list(arguments), self._folder / f"{job_id}.log", page, results)
            self._jobs[job_id] = job
            is_first, self._has_workers = needs_gpu and not self._has_workers, self._has_workers or needs_gpu
        # Two trainings would share the GPU's memory; an export uses the CPU.
        if needs_gpu:
            self._waiting.put(job)
            if is_first:
                # In a thread, because asking for the GPUs can take seconds.
                Thread(target=self._start_workers, daemon=True).start()
        else:
            Thread(target=self._run, args=(job, ""), daemon=True).start()
        return job

    def stop(self, job_id: str) -> None:
        """Take a waiting job out of the queue, or press Ctrl-C for a running one: a training saves and ends.

        Raises:
            DitLoraError: If the job has ended, or is ending.
        """
        with self._lock:
            job = self._jobs.get(job_id)
            # A second Ctrl-C would end a training without saving it.
            if job is None or job.state not in ("waiting", "running"):
                raise DitLoraError("this command has ended already, or is about to")
            if job.process is not None:
                # Its whole group, as a terminal does.
                os.killpg(job.process.pid, signal.SIGINT)
            job.state = "stopped" if job.process is None else "stopping"

    def _start_workers(self) -> None:
        for gpu in self._find_gpus() or [""]:
            Thread(target=self._run_waiting_jobs, args=(gpu,), daemon=True).start()

    def _run_waiting_jobs(self, gpu: str) -> None:
        while True:
            self._run(self._waiting.get(), gpu)

    def _run(self, job: CommandJob, gpu: str) -> None:
        with self._lock:
            if job.state == "stopped":
                return
            job.gpu = gpu
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu} if gpu else None
            try:
                # In a session of its own, so that neither Ctrl-C here nor a closed terminal ends a training.
                with job.log.open("wb") as log:
                    job.process = subprocess.Popen(
                        [sys.executable, "-m", "dit_lora", *job.arguments],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        env=environment,
                    )
            except (OSError, ValueError):  # without memory or disk space, or a NUL in an argument
                job.state = "failed"
                return
            job.state = "running"
        # Without the lock: a training takes hours.
        code = job.process.wait()
        with self._lock:
            job.exit_code = code
            if job.state == "stopping":
                job.state = "stopped"
            elif job.state == "running":
                # These exit with 1 if they have found something, which their output says.
                is_answer = code == 1 and job.arguments[0] in ("audit", "plan", "doctor")
                job.state = "failed" if code and not is_answer else "done"
