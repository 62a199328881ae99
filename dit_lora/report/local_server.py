"""Serve a page to a browser on this machine only: on the loopback interface, with a host check and byte ranges."""

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
_CHUNK_BYTES = 2**18
_MAX_DROPPED_BYTES = 2**22  # maximum bytes read from a refused request
_MAX_DIGITS = 18  # maximum digits of a length in bytes
# One byte range; each end may be missing.
_RANGE_PATTERN = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


class LocalServer(ThreadingHTTPServer):
    """HTTP server on the loopback interface only; port 0 chooses a free port.

    Every user of this machine can connect to it. With a `token`, requests must contain it: in the printed URL, or in
    the cookie that the response to this URL sets.
    """

    daemon_threads = True

    def __init__(self, handler: Callable[..., BaseHTTPRequestHandler], port: int = 0, token: str = "") -> None:
        self.token = token
        try:
            super().__init__((HOST, port), handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DitLoraError(
                f"port {port} cannot be used: {reason}; choose another with --port, or remove --port to use a free one"
            ) from error

    @property
    def url(self) -> str:
        return f"{self.origin}/?token={self.token}" if self.token else f"{self.origin}/"

    @property
    def origin(self) -> str:
        return f"http://{HOST}:{self.server_port}"

    def matches_token(self, value: str) -> bool:
        """True if a value equals the server's token, compared in constant time."""
        # An ordinary comparison would reveal by its duration how many characters match.
        return secrets.compare_digest(_encode(value), _encode(self.token))


def _encode(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def serve_until_interrupted(server: LocalServer, description: object, say: Callable[[str], None]) -> None:
    """Run a local HTTP server until Ctrl-C; `say` receives the address and the closing message."""
    with server:
        say(f"{description}: {server.url} (Ctrl-C to stop)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            say("stopped")


class PageHandler(BaseHTTPRequestHandler, ABC):
    """Base class of HTTP request handlers that answer with text and files. Subclasses define the available paths."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dit-lora", ""
    timeout = 60
    server: LocalServer

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            # A browser drops a request when it seeks, and other clients disconnect when refused.
            self.close_connection = True

    def do_GET(self) -> None:
        self._new_cookie = ""
        if not self._check_host():
            return
        if not self._has_token():
            # The link that the command printed has the token.
            message = "open the address that the command printed, which ends in ?token=..."
            self.refuse(HTTPStatus.FORBIDDEN, message)
            return
        self.send_page()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self._new_cookie = ""
        # A page of another site can send requests here, although it cannot read the answer.
        # The check has already answered the request if it fails.
        if not self._check_host():
            return
        if self.headers.get("Origin", "") not in [f"http://{name}" for name in self._get_host_names()]:
            self.refuse(HTTPStatus.FORBIDDEN, "only a page of this server can send this request")
            return
        self.handle_post()

    @abstractmethod
    def send_page(self) -> None:
        """Answer an HTTP request for a page or a file. Subclasses implement this."""

    def handle_post(self) -> None:
        """Answer a POST request that the page sends. By default none is accepted."""
        self.refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this server accepts no POST requests")

    def read_json_body(self, path: str, max_bytes: int) -> dict[str, Any] | None:
        """Read the JSON object that an authorized page posted to a path.

        Any other request is answered with an error, and None is returned.
        """
        if self.path != path:
            self.refuse(HTTPStatus.NOT_FOUND, "this path accepts no POST requests")
            return None
        data = self._read_body(max_bytes)
        if data is None:
            return None
        try:
            values = parse_json(data)
        except ValueError as error:
            self.send_message(HTTPStatus.BAD_REQUEST, f"the request body must be JSON: {error}")
            return None
        # The token is in the body, not in a cookie: browsers can attach cookies to other sites' requests.
        request_token = values.get("token") if isinstance(values, dict) else None
        if not isinstance(request_token, str):
            self.send_message(HTTPStatus.BAD_REQUEST, "the request body must be an object with the page's token")
            return None
        if not self.server.matches_token(request_token):
            self.send_message(
                HTTPStatus.FORBIDDEN,
                "this page belongs to an earlier start of the server; open the address that the command printed",
            )
            return None
        return dict(values)

    def _read_body(self, max_bytes: int) -> bytes | None:
        """Read the bytes of the request body.

        A request without a valid length is answered with an error, and None is returned.
        """
        length = self._content_length()
        if length is None:
            self.refuse(HTTPStatus.LENGTH_REQUIRED, "the request needs exactly one Content-Length, in bytes")
            return None
        if length > max_bytes:
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the request body can have at most {max_bytes:,} bytes")
            return None
        try:
            data = self.rfile.read(length)
        except TimeoutError:
            self.refuse(HTTPStatus.REQUEST_TIMEOUT, "the request body is shorter than its Content-Length")
            return None
        if len(data) < length:
            self.refuse(HTTPStatus.BAD_REQUEST, "the request body is shorter than its Content-Length")
            return None
        return data

    def _content_length(self) -> int | None:
        """The length of the request body; None if the request does not have exactly one valid length."""
        # Two lengths, or a chunked body, could be read in two ways.
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) != 1 or self.headers.get("Transfer-Encoding") is not None:
            return None
        length = lengths[0].strip()
        if not (length.isascii() and length.isdigit()):
            return None
        # Python refuses to parse thousands of digits, and such a length is too large anyway.
        return int(length) if len(length) <= _MAX_DIGITS else sys.maxsize

    def _has_token(self) -> bool:
        """True if the request has the server's token, or the server needs none."""
        if not self.server.token:
            return True
        # A browser may send several cookies of this name; any valid one is accepted.
        for cookie in self.headers.get("Cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self._cookie_name and self.server.matches_token(value):
                return True
        with suppress(ValueError):  # an invalid URL
            # The cookie itself is set with the response's headers.
            for value in parse_qs(urlsplit(self.path).query).get("token", []):
                # The first visit has the token in the URL; later requests, such as for media files, use the cookie.
                if self.server.matches_token(value):
                    self._new_cookie = f"{self._cookie_name}={value}; Path=/; HttpOnly; SameSite=Strict"
                    return True
        return False

    @property
    def _cookie_name(self) -> str:
        # Cookies are shared by all ports of a host.
        return f"dit_lora_{self.server.server_port}"

    def _check_host(self) -> bool:
        """True if the request's Host header names this server. Any other request is answered with an error."""
        # With DNS rebinding, a request to another site's name arrives here with that name as its Host.
        if self.headers.get("Host", "") in self._get_host_names():
            return True
        self.refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server answers only to its own address")
        return False

    def _get_host_names(self) -> tuple[str, ...]:
        _, port = self.connection.getsockname()
        return f"{HOST}:{port}", f"localhost:{port}"

    def send_file(self, open_file: Callable[[], BinaryIO], content_type: str) -> None:
        """Send a file, or the requested range of it. The answer is 404 if `open_file` raises `OSError`."""
        file = None
        with suppress(OSError):  # removed since, or not readable
            file = open_file()
        if file is None:
            self.send_message(HTTPStatus.NOT_FOUND, "this file does not exist")
            return
        with file:
            self._send_range(file, content_type)

    def _send_range(self, file: BinaryIO, content_type: str) -> None:
        # Size of the open file: its path may be replaced at any time.
        size = os.fstat(file.fileno()).st_size
        byte_range = self._parse_range(size)
        if byte_range is None:
            self.send_message(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "", {"Content-Range": f"bytes */{size}"})
            return
        start, end, partly = byte_range
        more = {"Accept-Ranges": "bytes"}
        if partly:
            more["Content-Range"] = f"bytes {start}-{end}/{size}"
        status = HTTPStatus.PARTIAL_CONTENT if partly else HTTPStatus.OK
        num_bytes = end - start + 1
        self._send_headers(status, content_type, num_bytes, more)
        # HEAD has the same headers as GET, without a body.
        if self.command == "HEAD":
            return
        # In chunks: a video need not fit into memory.
        file.seek(start)
        while num_bytes > 0 and (part := file.read(min(_CHUNK_BYTES, num_bytes))):
            self.wfile.write(part)
            num_bytes -= len(part)
        # The file was truncated meanwhile: close, so that the next response is not read as the missing bytes.
        self.close_connection |= num_bytes > 0

    def _parse_range(self, num_bytes: int) -> tuple[int, int, bool] | None:
        """First and last requested byte of a file, and whether that is only a part.

        None if the range is beyond the file.
        """
        match = _RANGE_PATTERN.fullmatch(self.headers.get("Range", ""))
        if match is None or not any(match.groups()):
            return (0, num_bytes - 1, False)  # HTTP allows answering several ranges with the whole file
        start, end = match.groups()
        # `bytes=-N` asks for the last N bytes.
        if start == "":
            first_byte, last_byte = max(0, num_bytes - int(end)), num_bytes - 1
        else:
            first_byte, last_byte = int(start), min(int(end) if end else num_bytes - 1, num_bytes - 1)
        return (first_byte, last_byte, True) if first_byte <= last_byte else None

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Refuse a request with a line of text and close the connection.

        Otherwise the request's body would be read as the next request.
        """
        self.close_connection = True
        self.send_message(status, message, {"Connection": "close"})
        # Closing a connection with unread bytes resets it, and the answer may be lost. A client that pauses while
        # sending, as on a busy machine, gets the same timeout as in any other read.
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            dropped = 0
            while dropped < _MAX_DROPPED_BYTES and (part := self.rfile.read1(_CHUNK_BYTES)):
                dropped += len(part)

    def send_message(self, status: HTTPStatus, message: str, extra_headers: Mapping[str, str] = {}) -> None:
        """Answer the HTTP request with a status and a line of text."""
        self.send_text(f"{message}\n", "text/plain; charset=utf-8", status, extra_headers)

    def send_text(
        self, text: str, content_type: str, status: HTTPStatus = HTTPStatus.OK, extra_headers: Mapping[str, str] = {}
    ) -> None:
        """Answer the HTTP request with a text of this content type."""
        # File names may contain surrogate escapes, which UTF-8 cannot encode.
        body = text.encode(errors="backslashreplace")
        self._send_headers(status, content_type, len(body), extra_headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_headers(
        self, status: HTTPStatus, content_type: str, length: int, extra_headers: Mapping[str, str]
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(length),
            # The page changes during a run, and its content is private to this machine.
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            # No other site may embed the page or read its files.
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **extra_headers,
        }
        if self._new_cookie:
            headers["Set-Cookie"] = self._new_cookie
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing about HTTP requests: they are not worth a log line, and errors are sent as pages."""
