"""The report of a run that may be going on, rendered again when its files have changed."""

from collections.abc import Callable
from pathlib import Path
from threading import Lock

from dit_lora.errors import DitLoraError
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import choose_export_format, render_run
from dit_lora.report.run.samples import find_adapter_file

ExportFunction = Callable[[Path, str, Path], object]
"""Called with a checkpoint file, an export format and a new folder; an exception gives the reason for a failure."""


class LiveReportPage:
    """Live report of a run's folder, rendered once per state of the folder."""

    def __init__(self, folder: Path, export: ExportFunction) -> None:
        self.folder = Path(folder)
        self._export, self._export_lock = export, Lock()
        self._reader = RunReader(self.folder)
        self._lock = Lock()
        self._page, self._page_fingerprint = "", ""

    def compute_fingerprint(self) -> str:
        return self._reader.compute_fingerprint()

    def get_page(self, token: str) -> str:
        """The report of the run's current state, as HTML that sends `token` with its writes.

        Raises:
            DitLoraError: If the folder is not a run any more.
        """
        with self._lock:
            # Before reading: a change while the page is rendered shows up in the next fingerprint.
            current_fingerprint = self.compute_fingerprint()
            if current_fingerprint != self._page_fingerprint:
                run = self._reader.read()
                self._page = render_run(run, embed=False, fingerprint=current_fingerprint, token=token)
                self._page_fingerprint = current_fingerprint
            return self._page

    def export_step(self, step: int) -> str:
        """Export the checkpoint of a step into the run's folder; returns the relative path.

        Raises:
            DitLoraError: If the step has no checkpoint and no adapter, or was exported before.
        """
        file, form = (find_adapter_file(self.folder, step), choose_export_format(self._reader.read().config))
        if form is None or file is None:
            raise DitLoraError(f"the checkpoint of step {step} no longer exists")
        export_path = f"exports/step_{step:06d}"
        # A link could redirect the export to a folder outside the run.
        for path in (self.folder / "exports", self.folder / export_path):
            if path.is_symlink():
                raise DitLoraError(f"{path} is a link; remove it")
        # One export at a time: each loads the adapter.
        with self._export_lock:
            self._export(file, form, self.folder / export_path)
        return export_path
