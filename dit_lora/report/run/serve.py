"""A run's report served to a browser on this machine, which it follows; samples by ranges, so that videos seek."""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from dit_lora.errors import DitLoraError
from dit_lora.report.run.files import RunReader
from dit_lora.report.run.page import render_run
from dit_lora.report.run.samples import TYPES

HOST = "127.0.0.1"
_CHUNK = 2**18
_SAMPLE = re.compile(
    r"samples/(step_[0-9]+/prompt_[0-9]+\.(mp4|png)|references/prompt_[0-9]+_[0-9]+\.(mp4|jpg))"
)
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


class Pages:
    """The page as the folder is now, rendered once for equal files."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._reader = RunReader(self.folder)
        self._lock = Lock()
        self._page, self._of = "", ""

    def fingerprint(self) -> str:
        return self._reader.fingerprint()

    def page(self) -> str:
        """Return the page; raises `DitLoraError` where the folder is no run any more."""
        with self._lock:
            now = self.fingerprint()
            if now != self._of:
                self._page = render_run(self._reader.read(), embed=False, live=now)
                self._of = now
            return self._page


class ReportServer(ThreadingHTTPServer):
    """Serves on the loopback alone; a port of 0 is one that is free."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        pages = Pages(folder)
        pages.page()  # refuses a folder that is no run before a port is taken
        try:
            super().__init__((HOST, port), partial(_Handler, pages))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DitLoraError(
                f"port {port} cannot be used: {reason}; choose another by --port, or leave it out for a free one"
            ) from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


def serve(folder: Path, port: int, tell: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; `tell` gets the address, and the last word."""
    with ReportServer(folder, port) as server:
        tell(f"{folder}: {server.url} (Ctrl-C ends)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            tell("ended")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dit-lora", ""
    timeout = 60

    def __init__(self, pages: Pages, *args: object) -> None:
        self.pages = pages
        super().__init__(*args)  # type: ignore[arg-type]

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            # A browser that seeks drops what it had asked for; others hang up on a refusal.
            self.close_connection = True

    def do_GET(self) -> None:
        # Another site's name that points here (DNS rebinding) comes with that name.
        _, port = self.connection.getsockname()
        if self.headers.get("Host", "") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._say(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to its own address only")
            return
        try:
            path = unquote(urlsplit(self.path).path).lstrip("/")
        except ValueError:  # a bracket that begins no IPv6 address
            self._say(HTTPStatus.BAD_REQUEST, "this is no path")
            return
        if path not in ("", "state"):
            self._file(path)
            return
        try:
            if path == "state":
                state = {"fingerprint": self.pages.fingerprint()}
                text, kind = json.dumps(state), "application/json"
            else:
                text, kind = self.pages.page(), "text/html; charset=utf-8"
        except (DitLoraError, OSError) as error:
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            return
        self._send(text, kind)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _file(self, path: str) -> None:
        """Send a sample below the folder, and nothing else of it."""
        root = os.path.realpath(self.pages.folder)
        sample = path if _SAMPLE.fullmatch(path) else ""
        target = Path(os.path.realpath(os.path.join(root, sample)))
        file = None
        if os.path.isfile(target) and target.is_relative_to(root):  # a link may lead elsewhere
            with suppress(OSError):  # removed since, or not ours to read
                file = target.open("rb")
        if file is None:
            self._say(HTTPStatus.NOT_FOUND, "no such file in this report")
            return
        with file:
            self._part(file, TYPES[target.suffix])

    def _part(self, file: BinaryIO, kind: str) -> None:
        """Send what was asked for of a file."""
        size = os.fstat(file.fileno()).st_size
        asked = self._range(size)
        if asked is None:
            range = {"Content-Range": f"bytes */{size}"}
            self._say(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "", range)
            return
        first, last, partly = asked
        more = {"Accept-Ranges": "bytes"}
        if partly:
            more["Content-Range"] = f"bytes {first}-{last}/{size}"
        status = HTTPStatus.PARTIAL_CONTENT if partly else HTTPStatus.OK
        self._head(status, kind, last - first + 1, more)
        if self.command == "GET":
            self._copy(file, first, last - first + 1)

    def _range(self, size: int) -> tuple[int, int, bool] | None:
        """Return first and last byte asked for, and whether that is a part; None for bytes beyond the file."""
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None or not any(match.groups()):
            return 0, size - 1, False  # several ranges may be answered by the whole
        start, end = match.groups()
        if start == "":
            first, last = max(0, size - int(end)), size - 1
        else:
            first, last = int(start), min(int(end) if end else size - 1, size - 1)
        return (first, last, True) if first <= last else None

    def _copy(self, file: BinaryIO, first: int, count: int) -> None:
        file.seek(first)
        while count > 0 and (part := file.read(min(_CHUNK, count))):
            self.wfile.write(part)
            count -= len(part)
        # Cut since: what is missing must not be the next answer's.
        self.close_connection |= count > 0

    def _say(self, status: HTTPStatus, words: str, more: Mapping[str, str] = {}) -> None:
        self._send(f"{words}\n", "text/plain; charset=utf-8", status, more)

    def _send(
        self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK, more: Mapping[str, str] = {}
    ) -> None:
        body = text.encode(errors="backslashreplace")
        self._head(status, kind, len(body), more)
        if self.command == "GET":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, length: int, more: Mapping[str, str]) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(length),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **more,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: requests are no news, and errors come as pages."""
