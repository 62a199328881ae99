"""The page of a folder's captions, for editing them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from dit_lora.files import open_inside
from dit_lora.report.captions.edits import CaptionEdits, StaleCaptionError
from dit_lora.report.captions.page import decode_address
from dit_lora.studio.access import get_page_token, json_response, write_route
from dit_lora.studio.opened_file import OpenedFileResponse
from dit_lora.studio.pages import parse_page_number
from dit_lora.studio.run_pages import REPORT_HEADERS

CAPTIONS_PAGE = "/captions/"
# By the extension; files of other types are not served.
_CONTENT_TYPES = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), "image/jpeg"),
    **{f".{name}": f"image/{name}" for name in ("png", "webp", "gif", "bmp", "apng", "avif")},
    ".avifs": "image/avif",
    # Browsers play QuickTime and Matroska files as these, but refuse their own types.
    **dict.fromkeys((".mp4", ".m4v", ".mov"), "video/mp4"),
    **dict.fromkeys((".webm", ".mkv"), "video/webm"),
}


class _AnyPathConvertor(PathConvertor):
    """Starlette's `path` without its exception: file names may contain line ends."""

    regex = "(?s:.*)"


register_url_convertor("any_path", _AnyPathConvertor())


class CaptionPages:
    """The routes of a folder's captions."""

    def __init__(self, edits: CaptionEdits) -> None:
        self._edits = edits

    def list_routes(self) -> list[BaseRoute]:
        return [
            Route(CAPTIONS_PAGE, self.show_page),
            Route(f"{CAPTIONS_PAGE}media/{{name:any_path}}", self.send_media),
            write_route(f"{CAPTIONS_PAGE}caption", self.save),
        ]

    def show_page(self, request: Request) -> Response:
        number = parse_page_number(request)
        is_flagged_only = request.query_params.get("only") == "flagged"
        page = self._edits.render_page(get_page_token(request), number, is_flagged_only)
        return HTMLResponse(page.encode(errors="backslashreplace"), headers=REPORT_HEADERS)

    def send_media(self, request: Request) -> Response:
        # The raw path also represents names that are not UTF-8.
        address = request.scope["raw_path"].decode("ascii").removeprefix(f"{CAPTIONS_PAGE}media/")
        file = self._edits.find_media(decode_address(address))
        content_type = _CONTENT_TYPES.get(file.suffix.lower()) if file else None
        if file is None or content_type is None:
            raise HTTPException(404, "this file is not in the folder")
        try:
            # A link inside the folder is followed, and one that leads out of it is refused.
            root = self._edits.root.resolve()
            opened = open_inside(root, file.resolve())
        except (OSError, ValueError) as error:
            raise HTTPException(404, "this file does not exist, or is a link to another folder") from error
        return OpenedFileResponse(opened, content_type)

    def save(self, request: Request, values: Mapping[str, Any]) -> Response:
        # The body comes from the network, so every type is checked.
        name, caption, version = (values.get(key) for key in ("file", "caption", "version"))
        if not (isinstance(name, str) and isinstance(caption, str) and isinstance(version, str)):
            message = "an edit needs a file, a caption, and the version of the caption that was edited"
            raise HTTPException(400, message)
        try:
            return json_response(asdict(self._edits.save_caption(decode_address(name), caption, version)))
        except StaleCaptionError as error:
            # The page then shows the current caption; the rejected text stays in its text area.
            return json_response(asdict(error.state), 409)
