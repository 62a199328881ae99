"""The studio's web app: its routes, and what it answers if one fails."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.errors import DitLoraError
from dit_lora.report.captions.rules import CaptionRules
from dit_lora.report.pages import load_templates
from dit_lora.report.run.live_page import LiveReportPage
from dit_lora.studio.data_pages import DataPages
from dit_lora.studio.job_pages import JobPages
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.new_run_pages import NewRunPages
from dit_lora.studio.pages import ASSET_ROUTE, render_studio_page
from dit_lora.studio.run_list import RunListPage
from dit_lora.studio.run_pages import RunPages
from dit_lora.studio.server import serve_until_interrupted
from dit_lora.studio.work_pages import WorkPages


def build_app(routes: Sequence[BaseRoute]) -> Starlette:
    """An app of these routes that answers each failure with a message and a status."""
    # While the user opens the link.
    Thread(target=load_templates, args=("studio_",), daemon=True).start()
    return Starlette(
        routes=[*routes, ASSET_ROUTE],
        exception_handlers={HTTPException: _show_refusal, DitLoraError: _show_error, OSError: _show_error},
    )


def list_pages(library: RunLibrary, rules: CaptionRules | None = None) -> list[BaseRoute]:
    """The routes of all pages; `rules` are those of captions where a page's address names no others."""
    queue = JobQueue()
    lists = (RunListPage(library), JobPages(queue), NewRunPages(library, queue), DataPages(library, queue, rules))
    pages = (*lists, WorkPages(library, queue), RunPages(library))
    return [route for page in pages for route in page.list_routes()]


def serve_studio(folders: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serve the runs below folders until Ctrl-C; `say` receives the link and the closing message."""
    for folder in folders:
        if not folder.is_dir():
            raise DitLoraError(f"{folder} is not a folder; give the folder that your runs are in")
    app = build_app(list_pages(RunLibrary(folders)))
    serve_until_interrupted(app, port, "/", "studio", say)


def serve_report(folder: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the report of a run until Ctrl-C; `say` receives the link and the closing message."""
    # Raises for a folder that is not a run, before a port is opened.
    LiveReportPage(folder).get_page()
    app = build_app(list_pages(RunLibrary([folder])))
    serve_until_interrupted(app, port, f"/runs/{compute_run_id(folder)}/", folder, say)


def serve_captions(folder: Path, rules: CaptionRules, port: int, say: Callable[[str], None]) -> None:
    """Serve the captions of a folder until Ctrl-C; `say` receives the link and the closing message."""
    # Raises for a folder without media, before a port is opened.
    CaptionTable.read(folder, allow_other_lists=True, skip_texts=True)
    app = build_app(list_pages(RunLibrary([folder]), rules))
    serve_until_interrupted(app, port, f"/data/{compute_run_id(folder)}/", folder, say)


def _show_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _show_message(request, error.status_code, error.detail, error.headers)


def _show_error(request: Request, error: Exception) -> Response:
    status = 422
    # An `OSError` while reading means that the folder has changed, or that the disk has a fault.
    if request.method in ("GET", "HEAD"):
        status = 500 if isinstance(error, OSError) else 400
    path, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
    return _show_message(request, status, f"cannot use {path}: {reason}" if path and reason else str(error))


def _show_message(request: Request, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """A page for a browser's window, and a line of text for a script."""
    if "text/html" not in request.headers.get("accept", ""):
        return PlainTextResponse(f"{message}\n".encode(errors="backslashreplace"), status, headers)
    response = render_studio_page(request, "studio_message.html", status, message=message)
    response.headers.update(headers or {})
    return response
