"""Serve a run's report to a browser on this machine, updated as the run proceeds, with byte ranges for videos."""

import json
import re
import secrets
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from urllib.parse import unquote, urlsplit

from dit_lora.errors import DitLoraError
from dit_lora.files import open_inside
from dit_lora.report.local_server import LocalServer, PageHandler, serve_until_interrupted
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import choose_export_format, render_run
from dit_lora.report.run.samples import CONTENT_TYPES, find_adapter_file

_MAX_REQUEST_BYTES = 2**12  # maximum bytes of a request
# Samples of prompts, and the small copies of references. Nothing else in the folder is served.
_SAMPLE_PATTERN = re.compile(
    r"samples/(step_[0-9]+/prompt_[0-9]+\.(mp4|png)|references/prompt_[0-9]+_[0-9]+\.(mp4|jpg))"
)

ExportFunction = Callable[[Path, str, Path], object]
"""Called with a file of an adapter or a checkpoint, an export format and a new folder; an exception gives the reason
for a failure."""


class LiveReportPage:
    """Live report of a run's folder, rendered once per state of the folder.

    With `export`, the page can export steps.
    """

    def __init__(self, folder: Path, export: ExportFunction | None = None) -> None:
        self.folder = Path(folder)
        self.token = secrets.token_urlsafe() if export else ""
        self._export, self._export_lock = export, Lock()
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
                self._page = render_run(run, embed=False, fingerprint=current_fingerprint, token=self.token)
                self._page_fingerprint = current_fingerprint
            return self._page

    def export_step(self, step: int) -> str:
        """Export the adapter of a step into the run's folder; returns the relative path.

        Raises:
            DitLoraError: If the step has no checkpoint and no adapter, or was exported before.
        """
        file, form = (find_adapter_file(self.folder, step), choose_export_format(self._reader.read().config))
        if self._export is None or form is None or file is None:
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


class ReportServer(LocalServer):
    """HTTP server for the live report of one run."""

    def __init__(self, folder: Path, port: int = 0, export: ExportFunction | None = None) -> None:
        pages = LiveReportPage(folder, export)
        pages.get_page()  # raises for a folder that is not a run, before a port is opened
        super().__init__(partial(_ReportHandler, pages), port, pages.token)


def serve_report(folder: Path, port: int, say: Callable[[str], None], export: ExportFunction | None = None) -> None:
    """Serve the report of a run until Ctrl-C; `say` receives the address and the closing message."""
    serve_until_interrupted(ReportServer(folder, port, export), folder, say)


class _ReportHandler(PageHandler):
    def __init__(self, pages: LiveReportPage, *args: object) -> None:
        self.pages = pages
        super().__init__(*args)  # type: ignore[arg-type]

    def send_page(self) -> None:
        try:
            path = unquote(urlsplit(self.path).path).lstrip("/")
        except ValueError:  # a bracket that does not start an IPv6 address
            self.send_message(HTTPStatus.BAD_REQUEST, "the address is not a valid path")
            return
        if path not in ("", "state"):
            root = self.pages.folder
            # No other file of the folder is served: opening the folder itself fails, which gives a 404.
            sample = root / path if _SAMPLE_PATTERN.fullmatch(path) else root
            self.send_file(partial(open_inside, root, sample), CONTENT_TYPES.get(sample.suffix, ""))
            return
        try:
            if path == "state":
                state = {"fingerprint": self.pages.compute_fingerprint()}
                text, kind = json.dumps(state), "application/json"
            else:
                text, kind = self.pages.get_page(), "text/html; charset=utf-8"
        except (DitLoraError, OSError) as error:
            self.send_message(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            return
        self.send_text(text, kind)

    def handle_post(self) -> None:
        if not self.pages.token:
            super().handle_post()
            return
        values = self.read_json_body("/export", _MAX_REQUEST_BYTES)
        if values is None:
            return
        step = values.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            self.send_message(HTTPStatus.BAD_REQUEST, "the step must be a number, 0 or greater")
            return
        try:
            written = self.pages.export_step(step)
        except (DitLoraError, OSError) as error:
            self.send_message(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            return
        self.send_text(json.dumps({"written": written}), "application/json")
