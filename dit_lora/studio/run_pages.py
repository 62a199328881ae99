"""The page of a run: its report, which follows the run, and its samples."""

import re
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from dit_lora.files import open_file_inside_folder
from dit_lora.report.run.live_page import LiveReportPage
from dit_lora.report.run.samples import CONTENT_TYPES
from dit_lora.studio.access import json_response
from dit_lora.studio.job_pages import RESULT_PATTERN
from dit_lora.studio.library import RunLibrary
from dit_lora.studio.pages import OpenedFileResponse

REPORT_HEADERS = {"Content-Security-Policy": "frame-ancestors 'none'"}
"""For pages that contain their own policy, with the hashes of their scripts."""
# Samples of prompts, and the small copies of references. Nothing else in the folder is served.
_SAMPLE_PATTERN = re.compile(
    r"samples/(step_[0-9]+/prompt_[0-9]+\.(mp4|png)|references/prompt_[0-9]+_[0-9]+\.(mp4|jpg))"
)


class RunPages:
    """The routes of the runs' pages."""

    def __init__(self, library: RunLibrary) -> None:
        self._library = library
        self._pages: dict[str, LiveReportPage] = {}

    def list_routes(self) -> list[BaseRoute]:
        return [
            Route("/runs/{run_id}/", self.show_report),
            Route("/runs/{run_id}/state", self.show_state),
            Route("/runs/{run_id}/{path:path}", self.send_sample),
        ]

    def get_live_page(self, run_id: str) -> LiveReportPage:
        """The live report of a run. Raises `HTTPException` if there is none of this id."""
        folder = self._library.get_run_folder(run_id)
        # One reader for each run, which reads only new lines.
        return self._pages.setdefault(run_id, LiveReportPage(folder))

    def show_report(self, request: Request) -> Response:
        page = self.get_live_page(request.path_params["run_id"]).get_page()
        return HTMLResponse(page.encode(errors="backslashreplace"), headers=REPORT_HEADERS)

    def show_state(self, request: Request) -> Response:
        page = self.get_live_page(request.path_params["run_id"])
        return json_response({"fingerprint": page.compute_fingerprint()})

    def send_sample(self, request: Request) -> Response:
        # Neither pattern allows dots between slashes.
        folder, path = self._library.get_run_folder(request.path_params["run_id"]), request.path_params["path"]
        if not (_SAMPLE_PATTERN.fullmatch(path) or RESULT_PATTERN.fullmatch(path)):
            raise HTTPException(404)
        try:
            file = open_file_inside_folder(folder, folder / path)
        except OSError as error:
            raise HTTPException(404, "this file does not exist") from error
        return OpenedFileResponse(file, CONTENT_TYPES[Path(path).suffix])
