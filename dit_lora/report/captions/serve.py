"""The captions of a folder served to a browser on this machine, where they are edited."""

import json
import secrets
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit

from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.data.sources.caption_text import caption_fault
from dit_lora.errors import DitLoraError
from dit_lora.report.captions.page import TextRules, judged_captions, served_page
from dit_lora.report.local_server import LocalServer, PageHandler, serve_until_interrupted

_MOST = 2**20  # bytes of an edit
_TYPES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".mov": "video/mp4",  # a browser looks into the file, and refuses QuickTime by its own name
    ".webm": "video/webm",
    ".mkv": "video/webm",
}


class CaptionEdits:
    """A folder's table, read anew for every page and every edit: other programs may write it too."""

    def __init__(self, root: Path, rules: TextRules) -> None:
        self.root, self.rules = root, rules
        self.token = secrets.token_urlsafe()
        self._lock = Lock()

    def page(self, number: int, only: bool) -> str:
        return served_page(CaptionTable.read(self.root), self.rules, self.token, number, only)

    def media(self, name: str) -> Path | None:
        """Return the file of that name, if it is one of the folder's clips and pictures."""
        return self.root / name if name in CaptionTable.read(self.root).media else None

    def put(self, name: str, caption: str) -> list[dict[str, str]]:
        """Write one caption; return what the audit says of it. Raises `DitLoraError` for one that cannot be trained on."""
        fault = caption_fault(caption)
        if fault is not None:
            raise DitLoraError(fault[1])
        with self._lock:
            table = CaptionTable.read(self.root)
            if name not in table.media:
                raise DitLoraError("no such file in this folder any more")
            table.put({name: " ".join(caption.split())})
        found = judged_captions(table, self.rules).get(name, [])
        return [{"verdict": f.verdict, "code": f.code, "words": f.words} for f in found]


def serve(root: Path, rules: TextRules, port: int, tell: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; `tell` gets the address, and the last word."""
    edits = CaptionEdits(root, rules)
    edits.page(1, False)  # refuses a folder without captions before a port is taken
    serve_until_interrupted(LocalServer(partial(CaptionHandler, edits), port), root, tell)


class CaptionHandler(PageHandler):
    def __init__(self, edits: CaptionEdits, *args: object) -> None:
        self.edits = edits
        super().__init__(*args)  # type: ignore[arg-type]

    def show(self) -> None:
        try:
            asked = urlsplit(self.path)
            path, query = unquote(asked.path), parse_qs(asked.query)
        except ValueError:  # a bracket that begins no IPv6 address
            self.say(HTTPStatus.BAD_REQUEST, "this is no path")
            return
        try:
            if path == "/":
                number = query.get("page", ["1"])[0]
                only = query.get("only") == ["flagged"]
                page = self.edits.page(
                    int(number) if number.isascii() and number.isdigit() else 1, only
                )
                self.send(page, "text/html; charset=utf-8")
                return
            file = self.edits.media(path.removeprefix("/media/"))
        except (DitLoraError, OSError) as error:
            self.say(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            return
        kind = _TYPES.get(file.suffix.lower()) if file and path.startswith("/media/") else None
        if file is None or kind is None:
            self.say(HTTPStatus.NOT_FOUND, "no such file in this folder")
            return
        self.file(file, kind)

    def take(self) -> None:
        edit = self.sent("/caption", self.edits.token, _MOST)
        if edit is None:
            return
        name, caption = edit.get("file"), edit.get("caption")
        if not (isinstance(name, str) and isinstance(caption, str)):
            self.say(HTTPStatus.BAD_REQUEST, "an edit has a file and a caption")
            return
        try:
            findings = self.edits.put(name, caption)
        except (DitLoraError, OSError) as error:
            self.say(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            return
        self.send(json.dumps({"findings": findings}), "application/json")
