"""The report of a run that may be going on, rendered again when its files have changed."""

from pathlib import Path
from threading import Lock

from dit_lora.errors import DitLoraError
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import choose_export_format, render_run
from dit_lora.report.run.samples import find_adapter_file


class LiveReportPage:
    """Live report of a run's folder, rendered once per state of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
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

    def find_export(self, step: int) -> tuple[Path, str, Path]:
        """The checkpoint file of a step, the format for its export, and the new folder for the result.

        Raises:
            DitLoraError: If the step has no checkpoint and no adapter, or was exported before.
        """
        file, form = (find_adapter_file(self.folder, step), choose_export_format(self._reader.read().config))
        if form is None or file is None:
            raise DitLoraError(f"the checkpoint of step {step} no longer exists")
        output = self.folder / "exports" / f"step_{step:06d}"
        # A link could redirect the export to a folder outside the run.
        for path in (output.parent, output):
            if path.is_symlink():
                raise DitLoraError(f"{path} is a link; remove it")
        if output.exists():
            raise DitLoraError(f"{output} exists already; remove it to export again")
        return file, form, output
