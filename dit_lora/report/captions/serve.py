"""Serve a folder's captions to a browser on this machine for editing."""

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from dit_lora.data.sources.caption_table import CaptionTable, lock_table
from dit_lora.data.sources.caption_text import find_caption_fault
from dit_lora.errors import DitLoraError
from dit_lora.files import open_regular
from dit_lora.report.captions.page import (
    CaptionFindings,
    TextRules,
    compute_caption_version,
    decode_address,
    render_served_page,
)
from dit_lora.report.local_server import LocalServer, PageHandler, serve_until_interrupted

_MAX_EDIT_BYTES = 2**20  # maximum bytes of an edit
_MAX_DIGITS = 9  # maximum digits of a page number
# By the extension; files of other types are not served.
_CONTENT_TYPES = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
    ".jpe": "image/jpeg",
    ".jfif": "image/jpeg",
    ".apng": "image/apng",
    ".avif": "image/avif",
    ".avifs": "image/avif",
    ".mp4": "video/mp4",
    ".m4v": "video/mp4",
    ".mov": "video/mp4",  # browsers play the file as MP4, but refuse the QuickTime type
    ".webm": "video/webm",
    ".mkv": "video/webm",
}


@dataclass(frozen=True)
class CaptionState:
    """A caption as stored in its file, with its version and findings."""

    caption: str
    version: str
    findings: list[dict[str, str]]


class StaleCaptionError(DitLoraError):
    """Raised for an edit of a caption that has changed since the page was rendered."""

    def __init__(self, state: CaptionState) -> None:
        super().__init__("this caption was changed elsewhere")
        self.state = state


class CaptionEdits:
    """A folder's captions, read again when their files have changed, since other programs may write them."""

    def __init__(self, root: Path, rules: TextRules) -> None:
        self.root = root
        self.token = secrets.token_urlsafe()
        self._table: CaptionTable | None = None
        self._findings = CaptionFindings(rules)
        self._lock = Lock()

    def render_page(self, page_number: int, only_flagged: bool) -> str:
        with self._lock:
            table = self._read_table()
            return render_served_page(table, self._findings.update(table), self.token, page_number, only_flagged)

    def find_media(self, name: str) -> Path | None:
        """Path of a media file of the captioned folder; None if there is none of that name."""
        with self._lock:
            # The file may have been added since the table was read.
            if self._table is None or name not in self._table.media_names:
                self._read_table()
            return self.root / name if self._table and name in self._table.media_names else None

    def save_caption(self, name: str, caption: str, version: str) -> CaptionState:
        """Write one caption exactly as given, unless it differs from the current one only in line ends.

        Raises:
            DitLoraError: If the caption cannot be trained on.
            StaleCaptionError: If the caption in the file is not that of `version`.
        """
        # (code, message), or None for a caption that training accepts.
        fault = find_caption_fault(caption)
        if fault is not None:
            raise DitLoraError(fault[1])
        # The file lock keeps other processes out between reading the table and writing it.
        with self._lock, lock_table(self.root, self._table) as table:
            self._table = table
            if name not in table.media_names:
                raise DitLoraError("this file is no longer in the folder")
            current = table.captions.get(name, "")
            # A text area changes CRLF to LF: without this, opening and saving would rewrite the file.
            if _normalize_line_ends(caption) != _normalize_line_ends(current):
                if version != compute_caption_version(current):
                    raise StaleCaptionError(self._build_state(table, name))
                num_crlf = current.count("\r\n")
                # Use CRLF if the current caption uses only CRLF.
                if num_crlf > 0 and current.count("\n") == current.count("\r") == num_crlf:
                    caption = _normalize_line_ends(caption).replace("\n", "\r\n")
                table.write_captions({name: caption})
            return self._build_state(table, name)

    def _read_table(self) -> CaptionTable:
        self._table = CaptionTable.read(self.root, self._table)
        return self._table

    def _build_state(self, table: CaptionTable, name: str) -> CaptionState:
        caption = table.captions.get(name, "")
        findings = [
            {"verdict": finding.verdict, "code": finding.code, "words": finding.words}
            for finding in self._findings.update(table).get(name, [])
        ]
        return CaptionState(caption, compute_caption_version(caption), findings)


def _normalize_line_ends(caption: str) -> str:
    """A caption with line ends as in a browser's text area."""
    return caption.replace("\r\n", "\n").replace("\r", "\n")


class CaptionServer(LocalServer):
    """HTTP server for viewing and editing the captions of one folder."""

    def __init__(self, root: Path, rules: TextRules, port: int = 0) -> None:
        edits = CaptionEdits(root, rules)
        edits.render_page(1, False)  # raises for a folder without captions, before a port is opened
        super().__init__(partial(CaptionHandler, edits), port, edits.token)


def serve_captions(root: Path, rules: TextRules, port: int, say: Callable[[str], None]) -> None:
    """Serve the captions page until Ctrl-C; `say` receives the address and the closing message."""
    serve_until_interrupted(CaptionServer(root, rules, port), root, say)


class CaptionHandler(PageHandler):
    def __init__(self, edits: CaptionEdits, *args: object) -> None:
        self.edits = edits
        super().__init__(*args)  # type: ignore[arg-type]

    def send_page(self) -> None:
        try:
            request = urlsplit(self.path)
            path, query = decode_address(request.path), parse_qs(request.query)
        except ValueError:  # a bracket that does not start an IPv6 address
            self.send_message(HTTPStatus.BAD_REQUEST, "the address is not a valid path")
            return
        # Digits only, and few: `int` accepts signs, spaces and other scripts' digits.
        number = query.get("page", ["1"])[0]
        if not (number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS):
            self.send_message(HTTPStatus.BAD_REQUEST, f"page must be a number of at most {_MAX_DIGITS} digits")
            return
        try:
            if path == "/":
                page = self.edits.render_page(int(number), query.get("only") == ["flagged"])
                self.send_text(page, "text/html; charset=utf-8")
                return
            file = self.edits.find_media(path.removeprefix("/media/"))
        except (DitLoraError, OSError) as error:
            self.send_message(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            return
        kind = _CONTENT_TYPES.get(file.suffix.lower()) if file and path.startswith("/media/") else None
        if file is None or kind is None:
            self.send_message(HTTPStatus.NOT_FOUND, "this file is not in the folder")
            return
        # `open_regular` refuses pipes and devices.
        self.send_file(partial(open_regular, file), kind)

    def handle_post(self) -> None:
        edit = self.read_json_body("/caption", _MAX_EDIT_BYTES)
        if edit is None:
            return
        # The body comes from the network, so every type is checked.
        name, caption, version = (edit.get(key) for key in ("file", "caption", "version"))
        if not (isinstance(name, str) and isinstance(caption, str) and isinstance(version, str)):
            self.send_message(
                HTTPStatus.BAD_REQUEST,
                "an edit needs a file, a caption, and the version of the caption that was edited",
            )
            return
        try:
            state, status = (self.edits.save_caption(decode_address(name), caption, version), HTTPStatus.OK)
        except StaleCaptionError as error:
            # The page then shows the current caption; the rejected text stays in its text area.
            state, status = error.state, HTTPStatus.CONFLICT
        except (DitLoraError, OSError) as error:
            self.send_message(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
            return
        self.send_text(json.dumps(asdict(state)), "application/json", status)
