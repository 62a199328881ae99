"""Serves a page to a browser on this machine only: on the loopback, under its own name, files by ranges."""

import os
import re
import secrets
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from dit_lora.errors import DitLoraError
from dit_lora.parsing import parse_json

HOST = "127.0.0.1"
_CHUNK = 2**18
_MOST_DROPPED = 2**22  # bytes read of what is refused
_MAX_DIGITS = 18  # of a length in bytes
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


class LocalServer(ThreadingHTTPServer):
    """Serves on the loopback only; a port of 0 is one that is free.

    Every user of this machine can connect to it. With a `token`, requests must have it: in the printed address, or in
    the cookie that the answer to this address sets.
    """

    daemon_threads = True

    def __init__(
        self, handler: Callable[..., BaseHTTPRequestHandler], port: int = 0, token: str = ""
    ) -> None:
        self.token = token
        try:
            super().__init__((HOST, port), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DitLoraError(
                f"port {port} cannot be used: {reason}; choose another by --port, or leave it out for a free one"
            ) from error

    @property
    def url(self) -> str:
        return f"{self.origin}/?token={self.token}" if self.token else f"{self.origin}/"

    @property
    def origin(self) -> str:
        return f"http://{HOST}:{self.server_port}"

    def is_token(self, value: str) -> bool:
        """Compare in a time that tells nothing about the token."""
        return secrets.compare_digest(_bytes(value), _bytes(self.token))


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def serve_until_interrupted(server: LocalServer, what: object, tell: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; `tell` gets the address, and the last word."""
    with server:
        tell(f"{what}: {server.url} (Ctrl-C ends)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            tell("ended")


class PageHandler(BaseHTTPRequestHandler, ABC):
    """Answers with texts and files; what is asked for, and what may be had, its subclasses say."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dit-lora", ""
    timeout = 60
    server: LocalServer

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            # A browser that seeks drops what it had asked for; others hang up on a refusal.
            self.close_connection = True

    def do_GET(self) -> None:
        self._new_cookie = ""
        if not self._is_asked_here():
            return
        if not self._has_token():
            words = "open the address that the command printed, which ends in ?token=..."
            self.refuse(HTTPStatus.FORBIDDEN, words)
            return
        self.show()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self._new_cookie = ""
        # A page of another site may send to this address, though it cannot read the answer.
        if not self._is_asked_here():
            return
        if self.headers.get("Origin", "") not in self._own_origins():
            self.refuse(HTTPStatus.FORBIDDEN, "this takes what its own page sends")
            return
        self.take()

    @abstractmethod
    def show(self) -> None:
        """Answer a request for a page or a file."""

    def take(self) -> None:
        """Answer what the page has sent."""
        self.refuse(HTTPStatus.METHOD_NOT_ALLOWED, "nothing is written here")

    def sent(self, path: str, most: int) -> dict[str, Any] | None:
        """Return the object that a page with the token sent to a path; answers any other request, and returns None."""
        if self.path != path:
            self.refuse(HTTPStatus.NOT_FOUND, "nothing is written there")
            return None
        data = self._body(most)
        if data is None:
            return None
        try:
            values = parse_json(data)
        except ValueError as error:
            self.say(HTTPStatus.BAD_REQUEST, f"this takes JSON: {error}")
            return None
        theirs = values.get("token") if isinstance(values, dict) else None
        if not isinstance(theirs, str):
            self.say(HTTPStatus.BAD_REQUEST, "this takes an object with the page's token")
            return None
        if not self.server.is_token(theirs):
            self.say(
                HTTPStatus.FORBIDDEN,
                "this page is of an earlier start; open the address that the command printed in another tab",
            )
            return None
        return dict(values)

    def _body(self, most: int) -> bytes | None:
        """Return the bytes that were sent; answers a request without a length that can be read, and returns None."""
        length = self._content_length()
        if length is None:
            self.refuse(HTTPStatus.LENGTH_REQUIRED, "send one Content-Length, a number of bytes")
            return None
        if length > most:
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {most:,} bytes are taken")
            return None
        try:
            data = self.rfile.read(length)
        except TimeoutError:
            self.refuse(HTTPStatus.REQUEST_TIMEOUT, "fewer bytes came than Content-Length says")
            return None
        if len(data) < length:
            self.refuse(HTTPStatus.BAD_REQUEST, "fewer bytes came than Content-Length says")
            return None
        return data

    def _content_length(self) -> int | None:
        """Return the length of what is sent; None if the request does not give exactly one."""
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) != 1 or self.headers.get("Transfer-Encoding") is not None:
            return None
        length = lengths[0].strip()
        if not (length.isascii() and length.isdigit()):
            return None
        # Python refuses to read thousands of digits; so many bytes are too many anyway.
        return int(length) if len(length) <= _MAX_DIGITS else sys.maxsize

    def _has_token(self) -> bool:
        """Return true if the request has the server's token, or the server needs none."""
        if not self.server.token:
            return True
        cookies = self.headers.get("Cookie", "").split(";")
        theirs = [
            value
            for name, _, value in (cookie.strip().partition("=") for cookie in cookies)
            if name == self._cookie
        ]
        if any(map(self.server.is_token, theirs)):
            return True
        with suppress(ValueError):  # an address that is none
            for value in parse_qs(urlsplit(self.path).query).get("token", []):
                if self.server.is_token(value):
                    self._new_cookie = f"{self._cookie}={value}; Path=/; HttpOnly; SameSite=Strict"
                    return True
        return False

    @property
    def _cookie(self) -> str:
        # Cookies are shared by all ports of a host.
        return f"dit_lora_{self.server.server_port}"

    def _is_asked_here(self) -> bool:
        """Return true if the request names this server; answers any other."""
        # Another site's name that points here (DNS rebinding) comes with that name.
        if self.headers.get("Host", "") in self._names():
            return True
        self.refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to its own address only")
        return False

    def _own_origins(self) -> tuple[str, ...]:
        """Return the origins of this server's own pages."""
        return tuple(f"http://{name}" for name in self._names())

    def _names(self) -> tuple[str, ...]:
        _, port = self.connection.getsockname()
        return f"{HOST}:{port}", f"localhost:{port}"

    def file(self, opened: Callable[[], BinaryIO], kind: str) -> None:
        """Send a file that `opened` opens, or the part of it that was asked for; 404 if it raises `OSError`."""
        file = None
        with suppress(OSError):  # removed since, or not ours to read
            file = opened()
        if file is None:
            self.say(HTTPStatus.NOT_FOUND, "no such file here")
            return
        with file:
            self._part(file, kind)

    def _part(self, file: BinaryIO, kind: str) -> None:
        """Send what was asked for of a file."""
        size = os.fstat(file.fileno()).st_size
        asked = self._range(size)
        if asked is None:
            range = {"Content-Range": f"bytes */{size}"}
            self.say(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "", range)
            return
        first, last, partly = asked
        more = {"Accept-Ranges": "bytes"}
        if partly:
            more["Content-Range"] = f"bytes {first}-{last}/{size}"
        status = HTTPStatus.PARTIAL_CONTENT if partly else HTTPStatus.OK
        self._head(status, kind, last - first + 1, more)
        if self.command != "HEAD":
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

    def refuse(self, status: HTTPStatus, words: str) -> None:
        """Answer with a line of text, and end the connection: what was sent with the request is no next request."""
        self.close_connection = True
        self.say(status, words, {"Connection": "close"})
        # A connection closed on unread bytes is reset, and its answer may be lost. A client that pauses while it
        # sends, as on a busy machine, gets as long as in any other read.
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            dropped = 0
            while dropped < _MOST_DROPPED and (part := self.rfile.read1(_CHUNK)):
                dropped += len(part)

    def say(self, status: HTTPStatus, words: str, more: Mapping[str, str] = {}) -> None:
        """Answer with a line of text."""
        self.send(f"{words}\n", "text/plain; charset=utf-8", status, more)

    def send(
        self, text: str, kind: str, status: HTTPStatus = HTTPStatus.OK, more: Mapping[str, str] = {}
    ) -> None:
        """Answer with a text of that kind."""
        body = text.encode(errors="backslashreplace")
        self._head(status, kind, len(body), more)
        if self.command != "HEAD":
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
        if self._new_cookie:
            headers["Set-Cookie"] = self._new_cookie
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: requests are no news, and errors come as pages."""
