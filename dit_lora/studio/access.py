"""Who may use the studio: its own pages, in a browser that has opened the printed link."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dit_lora.parsing import parse_json

MAX_BODY_BYTES = 2**20
"""Maximum bytes of a request body."""
_HEADERS = {
    # The pages change during a run, and their content is private to this machine.
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # No other site may embed a page or read its files.
    "X-Frame-Options": "DENY",
    # Without a referrer at all, browsers send the Origin `null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A page with inline scripts sets a policy of its own, which lists their hashes.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
}

WriteFunction = Callable[[Request, Mapping[str, Any]], Response]
"""Answers a POST request; called in a thread with the values of its body."""


@dataclass
class AccessKeys:
    """The secrets of one start of the studio, and its port."""

    port: int
    link_token: str = field(default_factory=secrets.token_urlsafe)
    """Part of the printed link; it can be used once."""
    session: str = field(default_factory=secrets.token_urlsafe)
    """Value of the cookie that the link sets."""
    page_token: str = field(default_factory=secrets.token_urlsafe)
    """Part of every page, which sends it with each write: browsers attach cookies to other sites' requests too."""

    @property
    def cookie_name(self) -> str:
        # Cookies are shared by all ports of a host.
        return f"dit_lora_{self.port}"

    @property
    def host_names(self) -> tuple[str, ...]:
        return f"127.0.0.1:{self.port}", f"localhost:{self.port}"

    def get_link(self, path: str) -> str:
        return f"http://{self.host_names[0]}{path}?token={self.link_token}"


def get_page_token(request: Request) -> str:
    """The token that a page must send with its writes."""
    keys: AccessKeys = request.scope["access_keys"]
    return keys.page_token


class AccessControl:
    """ASGI middleware that refuses requests of other sites, of other users, and of pages of an earlier start."""

    def __init__(self, app: ASGIApp, keys: AccessKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        scope["access_keys"] = self._keys
        answer = self._check(Request(scope)) or self._app
        await answer(scope, receive, send_with_headers)

    def _check(self, request: Request) -> Response | None:
        """The response to a request that is not for the app; None if the app answers it."""
        keys, headers = self._keys, request.headers
        # With DNS rebinding, a request to another site's name arrives here with that name as its Host.
        if headers.get("host", "") not in keys.host_names:
            return _make_error_response(HTTPStatus.MISDIRECTED_REQUEST, "this server answers only to its own address")
        is_write = request.method not in ("GET", "HEAD")
        # A page of another site can send requests here, although it cannot read the answer.
        if is_write and headers.get("origin", "") not in [f"http://{name}" for name in keys.host_names]:
            return _make_error_response(HTTPStatus.FORBIDDEN, "only a page of this server can send this request")
        if _are_equal(request.cookies.get(keys.cookie_name, ""), keys.session):
            return None
        # Without a token left, the link was used.
        if not (keys.link_token and _are_equal(request.query_params.get("token", ""), keys.link_token)):
            message = "open the address that the command printed, once; for another browser, start the command again"
            return _make_error_response(HTTPStatus.FORBIDDEN, message)
        keys.link_token = ""
        # One leading slash: two would name another host. A page and not a redirect, because browsers send a strict
        # cookie only with requests from a page of the same site.
        path = escape(quote("/" + request.url.path.lstrip("/")))
        head = f'<meta http-equiv="refresh" content="0;url={path}"><link rel="icon" href="data:,">'
        response = HTMLResponse(f"<!doctype html>{head}<title>dit-lora</title>")
        response.set_cookie(keys.cookie_name, keys.session, httponly=True, samesite="strict")
        return response


def write_route(path: str, write: WriteFunction) -> Route:
    """A route for POST requests of the studio's pages, whose body is a form or a JSON object with the page's token."""

    async def answer(request: Request) -> Response:
        body = await _read_body(request)
        values: Any
        if isinstance(body, Response):
            return body
        try:
            if request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
                fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=1000)
                values = {name: texts[-1] for name, texts in fields.items()}
            else:
                values = parse_json(body)
        except ValueError as error:
            return _make_error_response(HTTPStatus.BAD_REQUEST, f"the request body must be JSON or a form: {error}")
        token = values.get("token") if isinstance(values, dict) else None
        if not isinstance(token, str):
            return _make_error_response(
                HTTPStatus.BAD_REQUEST, "the request body must be an object with the page's token"
            )
        if not _are_equal(token, get_page_token(request)):
            message = "this page belongs to an earlier start of the server; open the address that the command printed"
            return _make_error_response(HTTPStatus.FORBIDDEN, message)
        # Writes wait for disks and locks.
        return await run_in_threadpool(write, request, values)

    return Route(path, answer, methods=["POST"])


def json_response(values: Mapping[str, Any], status: int = 200) -> Response:
    # Starlette's class cannot encode the lone surrogates of file names and captions.
    return Response(json.dumps(values), status, media_type="application/json")


async def _read_body(request: Request) -> bytes | Response:
    """The request body, or the response to one that is too long. The server drops the rest."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                message = f"the request body can have at most {MAX_BODY_BYTES:,} bytes"
                return _make_error_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
    except ClientDisconnect:  # nobody reads the answer
        return _make_error_response(HTTPStatus.REQUEST_TIMEOUT, "the request body is incomplete")
    return body


def _make_error_response(status: HTTPStatus, message: str) -> Response:
    return PlainTextResponse(f"{message}\n", status)


def _are_equal(value: str, secret: str) -> bool:
    # An ordinary comparison would reveal by its duration how many characters match.
    return secrets.compare_digest(*(text.encode(errors="backslashreplace") for text in (value, secret)))
