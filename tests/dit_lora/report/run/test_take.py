"""Taking a step's adapter from the report: by the served page's button, or by the line on the one that is written."""

import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from report_runs import write_run

from dit_lora.data.media.video import write_sample
from dit_lora.errors import DitLoraError
from dit_lora.report.run.page import choose_export_format, write_report
from dit_lora.report.run.serve import ReportServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with samples of four steps and checkpoints of two of them."""
    folder = write_run(tmp_path / "kitten run")
    shutil.rmtree(folder / "samples", ignore_errors=True)
    for step in (0, 2, 4, 6):
        frame = torch.full((1, 32, 48, 3), 10 * step).byte()
        write_sample(folder / "samples" / f"step_{step:06d}" / "prompt_00", frame, 8)
    for step in (4, 6):
        file = folder / "checkpoints" / f"step_{step:06d}" / "trainable.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"weights")
    return folder


class Exports:
    """What was asked to be exported."""

    def __init__(self) -> None:
        self.asked: list[tuple[Path, str, Path]] = []

    def __call__(self, file: Path, form: str, out: Path) -> None:
        if out.exists():
            raise DitLoraError(f"{out.name} exists already")
        out.mkdir(parents=True)
        self.asked.append((file, form, out))


@pytest.fixture
def served(folder: Path) -> Iterator[tuple[ReportServer, Exports, str]]:
    exports = Exports()
    with ReportServer(folder, export=exports) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        assert ask(server, "GET", "/")[0] == 403
        page = ask(server, "GET", f"/?token={server.token}")[1]
        yield server, exports, page.split('data-token="')[1].split('"')[0]
        server.shutdown()
        thread.join()


def ask(server: ReportServer, method: str, path: str, body: Any = None, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=100)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_written_page_has_the_line_to_type_and_no_button(folder: Path) -> None:
    page = write_report(folder).read_text()
    line = "/checkpoints/step_000006/trainable.safetensors --to diffusers --out &#39;kitten run&#39;/exports"
    assert f"dit-lora export &#39;kitten run&#39;{line}" in page
    assert 'id="export"' not in page
    assert '<option value="4" data-file="trainable.safetensors">' in page.split('id="take"')[1].split("</select>")[0]
    assert '<option value="2"' not in page.split('id="take"')[1].split("</select>")[0]
    shutil.rmtree(folder / "checkpoints")
    assert 'id="take"' not in write_report(folder).read_text()


def test_a_step_is_taken_once_and_by_its_own_page_alone(
    served: tuple[ReportServer, Exports, str], folder: Path
) -> None:
    server, exports, token = served
    origin = {"Origin": server.origin}
    for status, body, headers in (
        (403, {"token": token, "step": 4}, {}),
        (403, {"token": token, "step": 4}, {"Origin": "http://evil.example"}),
        (403, {"token": "x", "step": 4}, origin),
        (400, {"token": token, "step": "4"}, origin),
        (400, {"token": token, "step": True}, origin),
        (400, [], origin),
        (422, {"token": token, "step": 2}, origin),  # it has no checkpoint
    ):
        assert ask(server, "POST", "/export", body, **headers)[0] == status, body
    assert exports.asked == []
    status, message = ask(server, "POST", "/export", {"token": token, "step": 4}, **origin)
    assert (status, json.loads(message)) == (200, {"written": "exports/step_000004"})
    file = folder / "checkpoints" / "step_000004" / "trainable.safetensors"
    assert exports.asked == [(file, "diffusers", folder / "exports" / "step_000004")]
    assert ask(server, "POST", "/export", {"token": token, "step": 4}, **origin)[0] == 422


def test_the_adapter_that_stays_of_a_checkpoint_is_taken(
    served: tuple[ReportServer, Exports, str], folder: Path
) -> None:
    server, exports, token = served
    checkpoint = folder / "checkpoints" / "step_000006" / "trainable.safetensors"
    adapter = checkpoint.rename(checkpoint.with_name("pytorch_lora_weights.safetensors"))
    page = write_report(folder).read_text()
    assert "/checkpoints/step_000006/pytorch_lora_weights.safetensors --to diffusers" in page
    assert '<option value="4" data-file="trainable.safetensors"' in page
    body = {"token": token, "step": 6}
    assert ask(server, "POST", "/export", body, Origin=server.origin)[0] == 200
    assert exports.asked == [(adapter, "diffusers", folder / "exports" / "step_000006")]


def test_a_server_that_exports_nothing_takes_nothing(folder: Path) -> None:
    with ReportServer(folder) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        assert 'id="export"' not in ask(server, "GET", "/")[1]
        origin = {"Origin": server.origin}
        assert ask(server, "POST", "/export", {"token": "", "step": 4}, **origin)[0] == 405
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("config", "form"),
    [
        ({"model": {"family": "wan"}}, "diffusers"),
        ({"model": {"family": "wan"}, "lora": {"kind": "oft"}}, "peft"),
        ({"model": {"family": "videochat2"}}, None),
        ({"model": {"family": "wan"}, "train": {"mode": "full"}}, None),
        ({"model": {"family": "wan"}, "optim": {"groups": {"adapter": None}}}, None),
    ],
)
def test_the_form_is_that_which_reads_the_adapter(config: dict[str, Any], form: str | None) -> None:
    assert choose_export_format(config) == form


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_the_button_exports_the_step_that_is_chosen(served: tuple[ReportServer, Exports, str], folder: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    server, exports, _ = served
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(server.url)
        assert page.locator(".film .pair figure:visible").count() == 4
        page.select_option("#take", "4")
        page.click("#export")
        sync_api.expect(page.locator("#exported")).to_have_text("saved in exports/step_000004")
        page.click("#export")
        expected = "not exported: step_000004 exists already"
        sync_api.expect(page.locator("#exported")).to_have_text(expected)
        page.goto(f"file://{write_report(folder)}")
        page.select_option("#take", "4")
        assert "step_000004 " in f"{page.locator('#take-line').text_content()} "
        browser.close()
    assert [path.name for _, _, path in exports.asked] == ["step_000004"]
