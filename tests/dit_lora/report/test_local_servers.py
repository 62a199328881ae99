"""Every local server answers all requests, and requires the token of the printed address."""

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from bare_media import write_without_captions

from dit_lora.report.captions.page import TextRules
from dit_lora.report.captions.serve import CaptionServer
from dit_lora.report.local_server import LocalServer, PageHandler
from dit_lora.report.run.serve import ReportServer

LONG = "9" * 5000
POST_PATHS = {"captions": "/caption", "run": "/export"}


def do_not_export(*_: object) -> None:
    raise AssertionError("nothing here asks for an export that exists")


@pytest.fixture(params=["captions", "run"])
def served(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LocalServer, str]]:
    """A server, and the path to which its page sends."""
    monkeypatch.setattr(PageHandler, "timeout", 0.3)
    server: LocalServer
    if request.param == "captions":
        write_without_captions(tmp_path / "clips", clips=1, stills=1)
        server = CaptionServer(tmp_path / "clips", TextRules())
    else:
        run_dir = request.getfixturevalue("run_dir")
        server = ReportServer(run_dir, export=do_not_export)
    with server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server, POST_PATHS[request.param]
        server.shutdown()
        thread.join()


def send(server: LocalServer, request: str | bytes) -> bytes:
    """Send bytes, and return all that is answered until the server closes the connection."""
    data = request.encode() if isinstance(request, str) else request
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=100) as connection:
        connection.sendall(data)
        return connection.makefile("rb").read()


def get(server: LocalServer, path: str, **headers: str) -> tuple[int, bytes, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=100)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body, cookie = answer.read(), answer.headers.get("Set-Cookie", "")
    connection.close()
    return answer.status, body, cookie


@pytest.mark.parametrize(
    ("lengths", "status"),
    [
        ([LONG], 413),
        (["99999999"], 413),
        (["-1"], 411),
        (["1e3"], 411),
        (["\u00b2"], 411),
        ([""], 411),
        ([], 411),
        (["2", "2"], 411),
        (["100"], 408),
    ],
)
def test_a_length_that_is_none_is_answered(served: tuple[LocalServer, str], lengths: list[str], status: int) -> None:
    server, path = served
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nOrigin: {server.origin}\r\n"
    headers = "".join(f"Content-Length: {length}\r\n" for length in lengths)
    answer = send(server, (head + headers + "\r\n{}").encode("latin-1"))
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "body",
    [
        LONG,
        f'{{"token": {LONG}}}',
        f'{{"token": "TOKEN", "step": {LONG}, "file": {LONG}, "caption": "x", "version": "x"}}',
        '{"token": "TOKEN", "step": 1e999, "file": "a.mp4", "caption": NaN, "version": "x"}',
        '{"token": "TOKEN", "step": -1, "file": "a.mp4", "caption": "x", "version": 1}',
        '{"token": "TOKEN", "step": 9999999999, "file": "\\u0000", "caption": "x", "version": "x"}',
        '{"token": "TOKEN", "step": 99, "file": "\\ud800", "caption": "\\ud800", "version": "\\ud800"}',
        '{"token": "\\ud800"}',
        '{"token": null}',
        '{"token": ["TOKEN"]}',
        "[" * 100_000,
        '{"token": "TOKEN"',
        "\x00",
        "",
        "null",
    ],
)
def test_odd_json_is_answered(served: tuple[LocalServer, str], body: str) -> None:
    server, path = served
    data = body.replace("TOKEN", server.token)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=100)
    connection.request("POST", path, data, {"Origin": server.origin})
    answer = connection.getresponse()
    assert 400 <= answer.status < 500
    assert len(answer.read().splitlines()) == 1
    connection.close()


@pytest.mark.parametrize("query", [f"page={LONG}", "page=-1", "page=%C2%B2", "page=", "page=1.5"])
def test_odd_addresses_are_answered(served: tuple[LocalServer, str], query: str) -> None:
    server, _ = served
    status, _, _ = get(server, f"/?token={server.token}&{query}")
    assert status in (200, 400)


def test_only_who_has_the_printed_address_gets_a_page(served: tuple[LocalServer, str]) -> None:
    server, _ = served
    assert server.url == f"{server.origin}/?token={server.token}"
    port = server.server_port
    for path, headers in (
        ("/", {}),
        ("/state", {}),
        ("/media/x.mp4", {}),
        ("/?token=", {}),
        ("/?token=x", {}),
        ("/?token=%ff%00", {}),
        ("/", {"Cookie": f"dit_lora_{port}=x"}),
        ("/", {"Cookie": f"dit_lora_{port}"}),
        ("/", {"Cookie": f"other={server.token}"}),
    ):
        status, body, cookie = get(server, path, **headers)
        assert (status, cookie) == (403, ""), (path, headers)
        assert server.token.encode() not in body
        assert b"address that the command printed" in body
    status, _, cookie = get(server, f"/?token={server.token}")
    assert status == 200
    name, _, attributes = cookie.partition("; ")
    assert name == f"dit_lora_{port}={server.token}"
    assert {"HttpOnly", "SameSite=Strict"} < {*attributes.split("; ")}
    assert get(server, "/", Cookie=name)[0] == 200
