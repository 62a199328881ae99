"""The live report of a run: the page and its samples, and no other file of the disk."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_runs import metrics_line
from starlette.types import ASGIApp
from studio_client import StudioClient, ask, serving
from typer.testing import CliRunner

from dit_lora.cli.app import app as command
from dit_lora.errors import DitLoraError
from dit_lora.studio.app import build_app, serve_report
from dit_lora.studio.library import RunLibrary
from dit_lora.studio.run_pages import RunPages
from dit_lora.studio.server import HOST

VIDEO = "samples/step_000010/prompt_00.mp4"


@pytest.fixture
def app(run_dir: Path) -> ASGIApp:
    return build_app(RunPages(RunLibrary([run_dir])).list_routes())


@pytest.fixture
def client(app: ASGIApp) -> StudioClient:
    return StudioClient(app)


def test_the_page_follows_the_run(client: StudioClient, run_dir: Path, run_path: str) -> None:
    answer = client.get(run_path)
    assert answer.status_code == 200
    assert 'Steps</dt>\n<dd class="value">20<' in answer.text
    assert "connect-src 'self'" in answer.text
    assert "data:video" not in answer.text  # samples come by themselves, and can be seeked
    before = client.get(f"{run_path}state").json()["fingerprint"]
    assert f'data-live="{before}"' in answer.text.replace("&#39;", "'")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(21)) + "\n")
    assert client.get(f"{run_path}state").json()["fingerprint"] != before
    assert 'Steps</dt>\n<dd class="value">21<' in client.get(run_path).text


@pytest.mark.parametrize(
    ("requested_range", "begin", "end"),
    [
        ("bytes=0-99", 0, 99),
        ("bytes=100-", 100, None),
        ("bytes=-7", -7, None),
        ("bytes=5-99999999", 5, None),
    ],
)
def test_a_range_of_a_video_is_that_part_of_it(
    client: StudioClient, run_dir: Path, run_path: str, requested_range: str, begin: int, end: int | None
) -> None:
    video_bytes = (run_dir / VIDEO).read_bytes()
    answer = client.get(run_path + VIDEO, headers={"Range": requested_range})
    expected = video_bytes[begin:] if end is None else video_bytes[begin : end + 1]
    assert (answer.status_code, answer.content) == (206, expected)
    start = video_bytes.index(expected)
    assert answer.headers["Content-Range"] == f"bytes {start}-{start + len(expected) - 1}/{len(video_bytes)}"


def test_a_whole_video_its_head_and_ranges_that_it_does_not_have(
    client: StudioClient, run_dir: Path, run_path: str
) -> None:
    video_bytes = (run_dir / VIDEO).read_bytes()
    path = run_path + VIDEO
    answer = client.get(path)
    assert (answer.status_code, answer.content) == (200, video_bytes)
    assert (answer.headers["Accept-Ranges"], answer.headers["Content-Type"]) == ("bytes", "video/mp4")
    answer = client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["Content-Length"] == str(len(video_bytes))
    for status, requested_range in (
        (416, f"bytes={len(video_bytes)}-"),
        (400, "bytes=9-5"),
        (400, f"bytes={'9' * 5000}-"),
        (206, "bytes=0-1,5-6"),
        (400, "bytes=x"),
    ):
        assert client.get(path, headers={"Range": requested_range}).status_code == status, requested_range


def test_what_samples_are_made_from_is_given_too(client: StudioClient, run_dir: Path, run_path: str) -> None:
    folder = run_dir / "samples" / "references"
    folder.mkdir()
    (folder / "prompt_00_1.jpg").write_bytes(b"a picture")
    answer = client.get(f"{run_path}samples/references/prompt_00_1.jpg")
    assert (answer.status_code, answer.content, answer.headers["Content-Type"]) == (200, b"a picture", "image/jpeg")


UNSERVED = [
    "config.yaml",
    "../config.yaml",
    "samples/../config.yaml",
    "samples/step_000010/../../config.yaml",
    "%2e%2e/%2e%2e/etc/passwd",
    "samples/step_000010/..%2f..%2fconfig.yaml",
    "/etc/passwd",
    "samples/step_000010/prompt_00.mp4%00.png",
    "samples/step_000010/",
    "samples/step_000099/prompt_00.mp4",
    "checkpoints/step_000010/adapter.safetensors",
    "samples/references/prompt_00_1.png",
    "samples/references/../../config.yaml",
    f"samples/step_{'1' * 300}/prompt_00.mp4",
    f"samples/step_{'1' * 5000}/prompt_00.mp4",
    # Links to another folder, to themselves and to nothing, and a pipe.
    *(f"samples/step_0000{number}/prompt_00.mp4" for number in (76, 77, 78, 79)),
    "%00",
    "%ff",
]


def test_nothing_but_samples_is_given(
    app: ASGIApp, run_dir: Path, run_path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    outside = run_dir.parent / "secret.mp4"
    outside.write_text("secret")
    for number, target in ((76, outside), (77, "prompt_00.mp4"), (78, "gone.mp4"), (79, None)):
        file = run_dir / "samples" / f"step_{number:06d}" / "prompt_00.mp4"
        file.parent.mkdir()
        if target is None:
            os.mkfifo(file)
        else:
            file.symlink_to(target)
    with serving(app) as server:
        for path in [f"{run_path}{path}" for path in UNSERVED] + ["/runs/0123456789abcdef/", "/runs/../etc/passwd"]:
            status, body, _ = ask(server, path)
            assert status == 404, path
            assert b"secret" not in body
            assert b"family" not in body
        assert ask(server, f"{run_path}state")[0] == 200
    assert capfd.readouterr().err == ""


def test_what_cannot_be_served_is_one_line(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(DitLoraError, match=rf"port {port} cannot be used: .*--port"):
            serve_report(run_dir, port, print)
    with pytest.raises(DitLoraError, match="is not a run"):
        serve_report(tmp_path, 0, print)
    result = CliRunner().invoke(command, ["report", str(run_dir), "--port", "80"])
    assert isinstance(result.exception, DitLoraError)
    assert "--serve --port 80" in str(result.exception)
    monkeypatch.setattr("dit_lora.cli.arguments.find_spec", lambda name: None)
    result = CliRunner().invoke(command, ["report", str(run_dir), "--serve"])
    expected = "the studio needs starlette and uvicorn; pip install 'dit-lora[studio]'"
    assert str(result.exception) == expected


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


def test_a_run_that_cannot_be_read_any_more_is_an_error_in_words(
    client: StudioClient, run_dir: Path, run_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> str:
        raise OSError(5, "Input/output error")

    assert client.get(run_path).status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr("dit_lora.studio.run_pages.LiveReportPage.compute_fingerprint", fail)
        answer = client.get(f"{run_path}state")
    assert (answer.status_code, answer.text) == (500, "[Errno 5] Input/output error\n")
    (run_dir / "config.yaml").write_text("- 1")
    answer = client.get(run_path)
    assert answer.status_code == 400
    assert "is not a recipe" in answer.text
