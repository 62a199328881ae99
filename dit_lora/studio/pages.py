"""The frame of the studio's own pages: templates without inline scripts and styles."""

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dit_lora.errors import DitLoraError
from dit_lora.report.pages import render_page
from dit_lora.studio.access import get_page_token

_ASSETS = {
    "studio.css": (("style.css", "studio.css"), "text/css"),
    "studio.js": (("studio.js",), "text/javascript"),
    "captions.js": (("captions.js",), "text/javascript"),
}
"""For each asset, the files of the report package that it consists of, and its type."""


def render_studio_page(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """Render one of the studio's pages. Nothing on it is redacted: it is shown to its owner only."""
    page = render_page(template, redact=False, token=get_page_token(request), **values)
    return HTMLResponse(page.encode(errors="backslashreplace"), status)


class OpenedFileResponse(FileResponse):
    """Sends an open file, or the requested range of it, and closes it: nothing can be put in its place meanwhile."""

    def __init__(self, file: BinaryIO, media_type: str) -> None:
        self._file = file
        # The base class opens a path: this one is the open file, whatever has become of its name.
        path = f"/dev/fd/{file.fileno()}"
        super().__init__(path, stat_result=os.fstat(file.fileno()), media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def parse_page_number(request: Request) -> int:
    """The number in `?page=`, 1 without it. Raises `DitLoraError` as `parse_whole_number` does."""
    return parse_whole_number({"page": "1", **request.query_params}, "page", 0, 10**9)


def format_path(path: Path) -> str:
    """A path in a command. One that starts with a dash would be read as an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def parse_whole_number(values: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """A number of a form or an address. Raises `DitLoraError` for another text, and for one that is out of range."""
    text = str(values.get(name, ""))
    # Digits only, and few: `int` accepts signs, spaces and other scripts' digits.
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and low <= int(text) <= high):
        raise DitLoraError(f"{name.replace('_', ' ')} must be a whole number from {low} to {high}; got {text[:40]!r}")
    return int(text)


def _send_asset(request: Request) -> Response:
    asset = _ASSETS.get(request.path_params["name"])
    if asset is None:
        raise HTTPException(404)
    files, media_type = asset
    folder = resources.files("dit_lora.report")
    return Response("\n".join(folder.joinpath(name).read_text("utf-8") for name in files), media_type=media_type)


ASSET_ROUTE = Route("/static/{name}", _send_asset)
"""The route of the style and the scripts."""
