"""Write a run's report in a background thread, so that training neither waits for it nor fails because of it."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import write_run_page


class Reporting:
    """Writes a folder's report.html in one thread, one report at a time; errors are only logged.

    During the run, samples are linked and not embedded, so that a report takes a second however many there are.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], *, writes: bool = True) -> None:
        self.path = Path(folder) / "report.html"
        self._say, self._writes = say, writes
        self._reader = RunReader(folder)
        # A single worker: two reports must not write the same file at once.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="report")
        self._job: Future[Path] | None = None
        self._told = False

    def update(self) -> None:
        """Start writing the report again, unless a previous write is still running."""
        if self._writes and (self._job is None or self._job.done()):
            self._settle()
            self._begin(state="running", embed=False)

    def finish(self) -> Path | None:
        """Write the final report after the run; None if it could not be written."""
        self._settle()
        if self._writes:
            # The final report may fail for another reason than those during the run: report it again.
            self._told = False
            self._begin()
        written = self._settle()
        self._thread.shutdown()
        return written

    def _settle(self) -> Path | None:
        """Wait for a running write; an error of any kind is logged once."""
        # Forget the job first, so that its error is logged once.
        job, self._job = self._job, None
        if job is None:
            return None
        # Blocks until the thread has finished this report.
        error = job.exception()
        if error is None:
            return job.result()
        self._tell(error)
        return None

    def _begin(self, **how: Any) -> None:
        try:
            self._job = self._thread.submit(write_run_page, self._reader, **how)
        except RuntimeError as error:  # not enough memory to start a thread
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        if not self._told:
            self._told = True
            self._say(f"warning: no report: {type(error).__name__}: {error}")
