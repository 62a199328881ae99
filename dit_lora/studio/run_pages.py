"""The page of a run: its report, which follows the run, and its samples."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from dit_lora.errors import DitLoraError
from dit_lora.files import open_inside
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import choose_export_format, render_run
from dit_lora.report.run.samples import CONTENT_TYPES, find_adapter_file
from dit_lora.studio.access import get_page_token, json_response, write_route
from dit_lora.studio.job_pages import RESULT_PATTERN
from dit_lora.studio.library import RunLibrary
from dit_lora.studio.opened_file import OpenedFileResponse

REPORT_HEADERS = {"Content-Security-Policy": "frame-ancestors 'none'"}
"""For pages that contain their own policy, with the hashes of their scripts."""
# Samples of prompts, and the small copies of references. Nothing else in the folder is served.
_SAMPLE_PATTERN = re.compile(
    r"samples/(step_[0-9]+/prompt_[0-9]+\.(mp4|png)|references/prompt_[0-9]+_[0-9]+\.(mp4|jpg))"
)

ExportFunction = Callable[[Path, str, Path], object]
"""Called with a checkpoint file, an export format and a new folder; an exception gives the reason for a failure."""


def export_adapter(file: Path, form: str, output_folder: Path) -> None:
    """Export the adapter of a run's checkpoint to a new folder."""
    # Loads torch, which the pages do not need.
    from dit_lora.export.export import ExportRequest, export

    export(ExportRequest((file,), "peft" if form == "peft" else "diffusers", output_folder))


class LiveReportPage:
    """Live report of a run's folder, rendered once per state of the folder."""

    def __init__(self, folder: Path, export: ExportFunction = export_adapter) -> None:
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


class RunPages:
    """The routes of the runs' pages."""

    def __init__(self, library: RunLibrary, export: ExportFunction = export_adapter) -> None:
        self._library, self._export = library, export
        self._pages: dict[str, LiveReportPage] = {}

    def list_routes(self) -> list[BaseRoute]:
        return [
            Route("/runs/{run_id}/", self.show_report),
            Route("/runs/{run_id}/state", self.show_state),
            Route("/runs/{run_id}/{path:path}", self.send_sample),
            write_route("/runs/{run_id}/export", self.export_step),
        ]

    def get_live_page(self, run_id: str) -> LiveReportPage:
        """The live report of a run. Raises `HTTPException` if there is none of this id."""
        folder = self._library.get_folder(run_id)
        # One reader for each run, which reads only new lines.
        return self._pages.setdefault(run_id, LiveReportPage(folder, self._export))

    def show_report(self, request: Request) -> Response:
        page = self.get_live_page(request.path_params["run_id"]).get_page(get_page_token(request))
        return HTMLResponse(page.encode(errors="backslashreplace"), headers=REPORT_HEADERS)

    def show_state(self, request: Request) -> Response:
        page = self.get_live_page(request.path_params["run_id"])
        return json_response({"fingerprint": page.compute_fingerprint()})

    def send_sample(self, request: Request) -> Response:
        # Neither pattern allows dots between slashes.
        folder, path = self._library.get_folder(request.path_params["run_id"]), request.path_params["path"]
        if not (_SAMPLE_PATTERN.fullmatch(path) or RESULT_PATTERN.fullmatch(path)):
            raise HTTPException(404)
        try:
            file = open_inside(folder, folder / path)
        except OSError as error:
            raise HTTPException(404, "this file does not exist") from error
        return OpenedFileResponse(file, CONTENT_TYPES[Path(path).suffix])

    def export_step(self, request: Request, values: Mapping[str, Any]) -> Response:
        step = values.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise HTTPException(400, "the step must be a number, 0 or greater")
        written = self.get_live_page(request.path_params["run_id"]).export_step(step)
        return json_response({"written": written})
