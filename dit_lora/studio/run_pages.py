"""The page of a run: its report, which follows the run, and its samples."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from dit_lora.files import open_inside
from dit_lora.report.run.live_page import LiveReportPage
from dit_lora.report.run.samples import CONTENT_TYPES
from dit_lora.studio.access import get_page_token, json_response, write_route
from dit_lora.studio.job_pages import RESULT_PATTERN
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.library import RunLibrary
from dit_lora.studio.opened_file import OpenedFileResponse
from dit_lora.studio.pages import format_path

REPORT_HEADERS = {"Content-Security-Policy": "frame-ancestors 'none'"}
"""For pages that contain their own policy, with the hashes of their scripts."""
# Samples of prompts, and the small copies of references. Nothing else in the folder is served.
_SAMPLE_PATTERN = re.compile(
    r"samples/(step_[0-9]+/prompt_[0-9]+\.(mp4|png)|references/prompt_[0-9]+_[0-9]+\.(mp4|jpg))"
)


class RunPages:
    """The routes of the runs' pages."""

    def __init__(self, library: RunLibrary, queue: JobQueue) -> None:
        self._library, self._queue = library, queue
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
        return self._pages.setdefault(run_id, LiveReportPage(folder))

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
        run_id, step = request.path_params["run_id"], values.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise HTTPException(400, "the step must be a number, 0 or greater")
        file, form, output = self.get_live_page(run_id).find_export(step)
        # A command: it loads torch, which takes longer than a page may.
        arguments = ["export", format_path(file), "--to", form, "--out", format_path(output)]
        self._queue.add(arguments, f"/runs/{run_id}/", needs_gpu=False)
        return json_response({"written": f"exports/{output.name}"})
