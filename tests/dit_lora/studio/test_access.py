"""The studio answers its own pages in the browser that opened the printed link, and every other request with 4xx."""

import socket
import time
from collections.abc import Iterator

import pytest
from starlette.types import ASGIApp
from studio_client import ORIGIN, StudioClient, ask, send_raw, serving

from dit_lora.studio.server import HOST, StudioServer

LONG = "9" * 5000
Pages = tuple[ASGIApp, dict[str, str]]


@pytest.fixture(scope="module")
def server(both_pages: Pages) -> Iterator[StudioServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dit_lora.studio.server.REQUEST_SECONDS", 0.2)
        with serving(both_pages[0], "/data") as server:
            yield server


def write_head(server: StudioServer, path: str) -> str:
    keys = server.keys
    host = f"{HOST}:{keys.port}"
    cookie = f"Cookie: {keys.cookie_name}={keys.session}\r\nConnection: close"
    return f"POST {path} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n{cookie}\r\n"


@pytest.mark.parametrize(
    ("lengths", "status"),
    [
        ([LONG], 400),
        (["99999999"], 413),
        (["-1"], 400),
        (["1e3"], 400),
        (["\u00b2"], 400),
        ([""], 400),
        ([], 400),
        (["2", "3"], 400),
        (["100"], 408),
    ],
)
@pytest.mark.parametrize("page", ["run", "captions"])
def test_a_length_that_is_none_is_answered(
    server: StudioServer, both_pages: Pages, page: str, lengths: list[str], status: int
) -> None:
    headers = "".join(f"Content-Length: {length}\r\n" for length in lengths)
    body = "x" * (2**20 + 1) if status == 413 else "{}"
    data = (write_head(server, both_pages[1][page]) + headers + "\r\n" + body).encode("latin-1")
    answer = send_raw(server, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1"],
)
def test_a_request_that_does_not_end_is_answered_and_closed(server: StudioServer, data: bytes) -> None:
    begin = time.monotonic()
    answer = send_raw(server, data)
    assert time.monotonic() - begin < 10
    assert answer.startswith(b"HTTP/1.1 421 " if data.endswith(b"1") else b"HTTP/1.1 408 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_request_that_trickles_is_closed_too(server: StudioServer) -> None:
    with socket.create_connection((HOST, server.keys.port), timeout=100) as connection:
        begin = time.monotonic()
        connection.settimeout(0.1)
        answer = b""
        while not answer and time.monotonic() - begin < 10:
            connection.sendall(b"x")
            try:
                answer = connection.recv(64)
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408 ")


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
@pytest.mark.parametrize("page", ["run", "captions"])
def test_odd_json_is_answered(both_pages: Pages, page: str, body: str) -> None:
    client = StudioClient(both_pages[0])
    data = body.replace("TOKEN", client.keys.page_token)
    answer = client.post(both_pages[1][page], content=data, headers={"Origin": ORIGIN})
    assert 400 <= answer.status_code < 500
    assert len(answer.content.splitlines()) == 1


def test_forms_are_read_and_odd_ones_answered(both_pages: Pages) -> None:
    client = StudioClient(both_pages[0])
    headers = {"Origin": ORIGIN, "Content-Type": "application/x-www-form-urlencoded"}
    path, token = both_pages[1]["captions"], client.keys.page_token
    for status, body in (
        (422, f"token={token}&file=none.mp4&caption=a%0d%0ab&version=x"),
        (400, f"token={token}&file=none.mp4&version=x"),
        (403, "token=x&file=none.mp4&caption=a&version=x"),
        (400, b"token=\xff"),
        (400, "&a=b" * 2000),
        (413, "a" * (2**20 + 1)),
    ):
        assert client.post(path, content=body, headers=headers).status_code == status, body[:80]


@pytest.mark.parametrize("query", [f"page={LONG}", "page=-1", "page=%C2%B2", "page=", "page=1.5", "page=%ff"])
def test_odd_addresses_are_answered(both_pages: Pages, query: str) -> None:
    answer = StudioClient(both_pages[0]).get(f"{both_pages[1]['captions'].removesuffix('caption')}?{query}")
    assert answer.status_code == 400
    assert answer.text.startswith("page must be a whole number")


def test_only_who_opened_the_printed_link_gets_a_page(both_pages: Pages) -> None:
    app, paths = both_pages
    client = StudioClient(app)
    client.cookies.clear()
    keys = client.keys
    for path, cookie in (
        ("/", ""),
        ("/data", ""),
        ("/data/x/media/x.mp4", ""),
        (paths["run"].replace("work/export", "state"), ""),
        ("/data?token=", ""),
        ("/data?token=x", ""),
        ("/data?token=%ff%00", ""),
        (f"/data?token={keys.session}", ""),
        ("/data", f"{keys.cookie_name}=x"),
        ("/data", keys.cookie_name),
        ("/data", f"{keys.cookie_name}={keys.link_token}"),
        ("/data", f"other={keys.session}"),
    ):
        answer = client.get(path, headers={"Cookie": cookie})
        assert (answer.status_code, answer.headers.get("set-cookie")) == (403, None), (path, cookie)
        assert "address that the command printed" in answer.text
    link = keys.get_link("/data").removeprefix(ORIGIN)
    opened = client.get(link)
    assert opened.status_code == 200
    assert 'content="0;url=/data"' in opened.text
    name, _, attributes = opened.headers["set-cookie"].partition("; ")
    assert name == f"{keys.cookie_name}={keys.session}"
    assert {"httponly", "samesite=strict"} < {*attributes.lower().split("; ")}
    assert client.get("/data").status_code == 200
    assert client.get(link).status_code == 200  # by the browser that has the cookie
    client.cookies.clear()
    assert client.get(link).status_code == 403


def test_the_link_leads_to_a_page_of_the_studio_only(server: StudioServer) -> None:
    for path in ("//evil.example/", "///evil.example", "/\\evil.example", "/%22><script>"):
        server.keys.link_token = "once"
        text = ask(server, f"{path}?token=once", Cookie="")[1].decode()
        assert "url=/" in text
        assert "url=//" not in text
        assert "<script>" not in text
        assert "\\" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1", "", "127.0.0.1:1", "[::1]:8000"])
def test_another_sites_name_for_this_machine_is_refused(both_pages: Pages, host: str) -> None:
    client = StudioClient(both_pages[0])
    for path in ("/", "/data", both_pages[1]["run"].replace("work/export", "state")):
        assert client.get(path, headers={"Host": host}).status_code == 421
    assert client.get("/data", headers={"Host": "localhost:8000"}).status_code == 200


def test_a_write_needs_the_origin_and_the_token_of_a_page(both_pages: Pages) -> None:
    app, paths = both_pages
    client = StudioClient(app)
    for path in paths.values():
        good = {"token": client.keys.page_token}
        for status, values, headers in (
            (403, good, {}),
            (403, good, {"Origin": "http://evil.example"}),
            (403, good, {"Origin": "null"}),
            (403, good, {"Origin": "http://127.0.0.1:8001"}),
            (403, {"token": client.keys.session}, {"Origin": ORIGIN}),
            (403, {"token": ""}, {"Origin": ORIGIN}),
            (400, {}, {"Origin": ORIGIN}),
            # Taken, but without what is to be written.
            (422 if path.endswith("export") else 400, good, {"Origin": ORIGIN}),
        ):
            assert client.post(path, json=values, headers=headers).status_code == status, (path, values, headers)
        assert client.put(path, headers={"Origin": ORIGIN}).status_code == 405
        assert client.put(path).status_code == 403


def test_every_answer_is_private_and_cannot_be_embedded(both_pages: Pages) -> None:
    client = StudioClient(both_pages[0])
    for path in ("/data", "/none", "/data/x/media/none.mp4"):
        headers = client.get(path).headers
        assert headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe-inline" not in headers["content-security-policy"]


def test_what_is_sent_with_a_refused_request_is_no_request(server: StudioServer) -> None:
    # A page under another name that points here could else read this one, and its token.
    inner = f"GET /data HTTP/1.1\r\nHost: {HOST}:{server.keys.port}\r\n\r\n"
    outer = f"POST /data/caption HTTP/1.1\r\nHost: evil.example\r\nContent-Length: {len(inner)}\r\n"
    answers = send_raw(server, f"{outer}Connection: close\r\n\r\n{inner}".encode())
    assert answers.count(b"HTTP/1.1 ") == 1
    assert answers.startswith(b"HTTP/1.1 421 ")


def test_a_client_that_pauses_while_it_sends_too_much_reads_the_refusal(
    server: StudioServer, both_pages: Pages
) -> None:
    """On a busy machine time may pass between two writes; a reset connection would lose the answer."""
    head = write_head(server, both_pages[1]["captions"]).replace("Connection: close\r\n", "")
    with socket.create_connection((HOST, server.keys.port), timeout=100) as connection:
        connection.sendall(f"{head}Content-Length: {2**21}\r\n\r\n".encode() + bytes(2**20 + 1))
        time.sleep(0.1)
        connection.sendall(bytes(2**20 - 1))
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("data", [b"GET http://[ HTTP/1.1", b"NONSENSE", b"GET /" + b"x" * 70_000, b"PUT / HTTP/1.1"])
def test_a_request_that_is_none_is_refused_and_leaves_no_traceback(
    server: StudioServer, capfd: pytest.CaptureFixture[str], data: bytes
) -> None:
    for host in ("evil.example", f"{HOST}:{server.keys.port}"):
        with socket.create_connection((HOST, server.keys.port), timeout=100) as connection:
            connection.sendall(data + f"\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            # Half of the clients hang up.
            if host != "evil.example":
                assert connection.recv(64).startswith(b"HTTP/1.1 4")
    assert ask(server, "/data")[0] == 200
    assert capfd.readouterr().err == ""
