"""Write a run's report in a background thread, so that training neither waits for it nor fails because of it."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import write_run_page


class BackgroundReporter:
    """Background writer of a run's report.html, one report at a time; errors are only logged.

    During the run, samples are linked and not embedded, so that a report takes a second however many there are.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], *, writes: bool = True) -> None:
        self.path = Path(folder) / "report.html"
        self._say, self._is_enabled = say, writes
        self._reader = RunReader(folder)
        # A single worker: two reports must not write the same file at once.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="report")
        self._job: Future[Path] | None = None
        self._has_warned = False

    def update(self) -> None:
        """Start writing the report in the background, unless a previous write is still running."""
        if self._is_enabled and (self._job is None or self._job.done()):
            self._wait_for_job()
            self._start_job(state="running", embed=False)

    def finish(self) -> Path | None:
        """Write the final report after the run. Returns its path; None if it could not be written."""
        self._wait_for_job()
        if self._is_enabled:
            # The final report may fail for another reason than those during the run: report it again.
            self._has_warned = False
            self._start_job()
        written = self._wait_for_job()
        self._executor.shutdown()
        return written

    def _wait_for_job(self) -> Path | None:
        """Wait until a running report write ends; an error of any kind is logged once."""
        # Forget the job first, so that its error is logged once.
        job, self._job = self._job, None
        if job is None:
            return None
        # Blocks until the thread has finished this report.
        error = job.exception()
        if error is None:
            return job.result()
        self._warn(error)
        return None

    def _start_job(self, **page_options: Any) -> None:
        try:
            self._job = self._executor.submit(write_run_page, self._reader, **page_options)
        except RuntimeError as error:  # not enough memory to start a thread
            self._warn(error)

    def _warn(self, error: BaseException) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(f"warning: cannot write the report: {type(error).__name__}: {error}")
