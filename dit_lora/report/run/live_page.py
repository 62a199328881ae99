"""The report of a run that may be going on, rendered again when its files have changed."""

from pathlib import Path
from threading import Lock

from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import render_run


class LiveReportPage:
    """Live report of a run's folder, rendered once per state of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._reader = RunReader(self.folder)
        self._lock = Lock()
        self._page, self._page_fingerprint = "", ""

    def compute_fingerprint(self) -> str:
        return self._reader.compute_fingerprint()

    def get_page(self) -> str:
        """The report of the run's current state, as HTML.

        Raises:
            DitLoraError: If the folder is not a run any more.
        """
        with self._lock:
            # Before reading: a change while the page is rendered shows up in the next fingerprint.
            current_fingerprint = self.compute_fingerprint()
            if current_fingerprint != self._page_fingerprint:
                run = self._reader.read()
                self._page = render_run(run, embed=False, fingerprint=current_fingerprint)
                self._page_fingerprint = current_fingerprint
            return self._page
