"""The served report answers only this machine, with the page and its samples and no other file of the disk."""

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import metrics_line
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.errors import DitLoraError
from dit_lora.report.local_server import HOST
from dit_lora.report.run.serve import ReportServer, serve_report

VIDEO = "/samples/step_000010/prompt_00.mp4"


@pytest.fixture
def server(run_dir: Path) -> Iterator[ReportServer]:
    with ReportServer(run_dir) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: ReportServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=100)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def test_the_page_follows_the_run(server: ReportServer, run_dir: Path) -> None:
    status, page, headers = ask(server, "/")
    assert status == 200
    assert b'Steps</dt>\n<dd class="value">20<' in page
    assert headers["Cache-Control"] == "no-store"
    assert b"connect-src 'self'" in page
    assert b"data:video" not in page  # samples come by themselves, and can be seeked
    before = json.loads(ask(server, "/state")[1])["fingerprint"]
    assert f'data-live="{before}"'.encode() in page.replace(b"&#39;", b"'")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(21)) + "\n")
    assert json.loads(ask(server, "/state")[1])["fingerprint"] != before
    assert b'Steps</dt>\n<dd class="value">21<' in ask(server, "/")[1]


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-99", 0, 99),
        ("bytes=100-", 100, None),
        ("bytes=-7", -7, None),
        ("bytes=5-99999999", 5, None),
    ],
)
def test_a_range_of_a_video_is_that_part_of_it(
    server: ReportServer, run_dir: Path, asked: str, first: int, last: int | None
) -> None:
    video_bytes = (run_dir / VIDEO[1:]).read_bytes()
    status, body, headers = ask(server, VIDEO, Range=asked)
    expected = video_bytes[first:] if last is None else video_bytes[first : last + 1]
    assert (status, body) == (206, expected)
    start = video_bytes.index(expected)
    assert headers["Content-Range"] == f"bytes {start}-{start + len(expected) - 1}/{len(video_bytes)}"


def test_a_whole_video_its_head_and_ranges_that_it_does_not_have(server: ReportServer, run_dir: Path) -> None:
    video_bytes = (run_dir / VIDEO[1:]).read_bytes()
    status, body, headers = ask(server, VIDEO)
    assert (status, body) == (200, video_bytes)
    assert (headers["Accept-Ranges"], headers["Content-Type"]) == ("bytes", "video/mp4")
    status, body, headers = ask(server, VIDEO, "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(video_bytes)))
    assert ask(server, VIDEO, Range=f"bytes={len(video_bytes)}-")[0] == 416
    assert ask(server, VIDEO, Range="bytes=9-5")[0] == 416
    assert ask(server, VIDEO, Range="bytes=0-1,5-6")[1] == video_bytes


def test_what_samples_are_made_from_is_given_too(server: ReportServer, run_dir: Path) -> None:
    folder = run_dir / "samples" / "references"
    folder.mkdir()
    (folder / "prompt_00_1.jpg").write_bytes(b"a picture")
    status, body, headers = ask(server, "/samples/references/prompt_00_1.jpg")
    assert (status, body, headers["Content-Type"]) == (200, b"a picture", "image/jpeg")


@pytest.mark.parametrize(
    "path",
    [
        "/config.yaml",
        "/../config.yaml",
        "/samples/../config.yaml",
        "/samples/step_000010/../../config.yaml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/samples/step_000010/..%2f..%2fconfig.yaml",
        "//etc/passwd",
        "/samples/step_000010/prompt_00.mp4%00.png",
        "/samples/step_000010/",
        "/samples/step_000099/prompt_00.mp4",
        "/checkpoints/step_000010/adapter.safetensors",
        "/samples/step_000010/prompt_77.mp4",
        "/samples/references/prompt_00_1.png",
        "/samples/references/../../config.yaml",
    ],
)
def test_nothing_but_samples_is_given(server: ReportServer, run_dir: Path, path: str) -> None:
    outside = run_dir.parent / "secret.mp4"
    outside.write_text("secret")
    (run_dir / "samples" / "step_000010" / "prompt_77.mp4").symlink_to(outside)
    status, body, _ = ask(server, path)
    assert status == 404
    assert b"secret" not in body
    assert b"family" not in body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "", "127.0.0.1:1"])
def test_another_sites_name_for_this_machine_is_refused(server: ReportServer, host: str) -> None:
    host = host.format(port=server.server_port)
    for path in ("/", "/state", VIDEO):
        assert ask(server, path, Host=host)[0] == 421
    assert ask(server, "/state", Host=f"localhost:{server.server_port}")[0] == 200
    assert ask(server, "/", "POST")[0] == 403
    assert server.server_address[0] == "127.0.0.1"


def test_what_cannot_be_served_is_one_clear_line(run_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(DitLoraError, match=rf"port {port} cannot be used: .*--port"):
            ReportServer(run_dir, port)
    with pytest.raises(DitLoraError, match="is not a run"):
        ReportServer(tmp_path)
    result = CliRunner().invoke(app, ["report", str(run_dir), "--port", "80"])
    assert isinstance(result.exception, DitLoraError)
    assert "--serve --port 80" in str(result.exception)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Heed Ctrl-C as in a terminal: what a script starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_with_a_line(run_dir: Path) -> None:
    messages: list[str] = []

    def tell(line: str) -> None:
        messages.append(line)
        if len(messages) == 1:
            main = threading.main_thread().ident
            threading.Timer(0.3, lambda: signal.pthread_kill(main or 0, signal.SIGINT)).start()

    serve_report(run_dir, 0, tell)
    assert "http://127.0.0.1:" in messages[0]
    assert messages[1:] == ["stopped"]
    assert HOST == "127.0.0.1"


@pytest.mark.parametrize(
    "path",
    [
        f"/samples/step_{'1' * 300}/prompt_00.mp4",
        f"/samples/step_{'1' * 5000}/prompt_00.mp4",
        "/samples/step_000010/prompt_99.mp4",
        "/samples/step_000077/prompt_00.mp4",
        "/samples/step_000078/prompt_00.mp4",
        "/%00",
    ],
)
def test_what_no_file_system_takes_is_not_there(
    server: ReportServer, run_dir: Path, capfd: pytest.CaptureFixture[str], path: str
) -> None:
    """Names that are too long, and links to themselves and to nothing."""
    for number, target in ((77, "prompt_00.mp4"), (78, "gone.mp4")):
        (run_dir / "samples" / f"step_{number:06d}").mkdir()
        (run_dir / "samples" / f"step_{number:06d}" / "prompt_00.mp4").symlink_to(target)
    assert ask(server, path)[0] == 404
    assert ask(server, "/state")[0] == 200
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET / HTTP/1.1\r\nHost: evil.example",
        b"GET /" + b"x" * 70_000,
        b"NONSENSE",
        b"PUT / HTTP/1.1",
    ],
)
def test_a_client_that_hangs_up_leaves_no_traceback(
    server: ReportServer,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request_line: bytes,
) -> None:
    """For every refusal: writing the reply fails."""
    failed = threading.Event()

    def broken(self: object, data: bytes) -> int:
        failed.set()
        raise BrokenPipeError

    with (
        monkeypatch.context() as patch,
        socket.create_connection((HOST, server.server_port)) as connection,
    ):
        patch.setattr("socketserver._SocketWriter.write", broken)
        connection.sendall(request_line + b"\r\n\r\n")
        assert failed.wait(100)
        assert connection.recv(1) == b""  # closed, its thread done
    assert ask(server, "/state")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_run_that_cannot_be_read_any_more_is_an_error_in_words(
    server: ReportServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("dit_lora.report.run.serve.LiveReportPage.compute_fingerprint", fail)
    assert ask(server, "/state")[:2] == (500, b"[Errno 5] Input/output error\n")


def test_an_address_that_is_none_is_refused(server: ReportServer) -> None:
    with socket.create_connection((HOST, server.server_port), timeout=100) as connection:
        host = f"Host: {HOST}:{server.server_port}"
        connection.sendall(f"GET http://[ HTTP/1.1\r\n{host}\r\n\r\n".encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 400 ")
