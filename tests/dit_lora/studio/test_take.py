"""Taking a step's adapter from the report: by the served page's button, or by the line on the one that is written."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import write_run
from starlette.types import ASGIApp
from studio_client import StudioClient, serving

from dit_lora.data.media.video import write_sample
from dit_lora.environment.command_job import CommandJob
from dit_lora.report.run.page import choose_export_format, write_report
from dit_lora.studio.app import build_app
from dit_lora.studio.jobs import JobQueue
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.run_pages import RunPages

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


class ExportQueue(JobQueue):
    """Starts no command, and makes the folder of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    def add(self, arguments: Sequence[str], page: str, *, needs_gpu: bool, results: Path | None = None) -> CommandJob:
        Path(arguments[-1]).mkdir(parents=True)
        self.asked.append([*arguments])
        return CommandJob("1", [*arguments], Path("none.log"), page)


@pytest.fixture
def served(folder: Path) -> tuple[ASGIApp, ExportQueue, str]:
    queue = ExportQueue()
    app = build_app(RunPages(RunLibrary([folder]), queue).list_routes())
    return app, queue, f"/runs/{compute_run_id(folder)}/"


def list_export_arguments(file: Path, step: int) -> list[str]:
    output = file.parents[2] / "exports" / f"step_{step:06d}"
    return ["export", str(file), "--to", "diffusers", "--out", str(output)]


def test_the_written_page_has_the_line_to_type_and_no_button(folder: Path) -> None:
    page = write_report(folder).read_text()
    line = "/checkpoints/step_000006/trainable.safetensors --to diffusers --out &#39;kitten run&#39;/exports"
    assert f"dit-lora export &#39;kitten run&#39;{line}" in page
    assert 'id="export"' not in page
    assert '<option value="4" data-file="trainable.safetensors">' in page.split('id="take"')[1].split("</select>")[0]
    assert '<option value="2"' not in page.split('id="take"')[1].split("</select>")[0]
    shutil.rmtree(folder / "checkpoints")
    assert 'id="take"' not in write_report(folder).read_text()


def test_a_step_is_taken_once(served: tuple[ASGIApp, ExportQueue, str], folder: Path) -> None:
    app, queue, path = served
    client = StudioClient(app)
    assert f'data-token="{client.keys.page_token}"' in client.get(path).text
    # The last one has no checkpoint.
    for status, step in ((400, "4"), (400, True), (400, -4), (400, 4.0), (422, 2)):
        assert client.write(f"{path}export", step=step).status_code == status, step
    assert queue.asked == []
    answer = client.write(f"{path}export", step=4)
    assert (answer.status_code, answer.json()) == (200, {"written": "exports/step_000004"})
    file = folder / "checkpoints" / "step_000004" / "trainable.safetensors"
    assert queue.asked == [list_export_arguments(file, 4)]
    assert client.write(f"{path}export", step=4).status_code == 422


def test_the_adapter_that_stays_of_a_checkpoint_is_taken(
    served: tuple[ASGIApp, ExportQueue, str], folder: Path
) -> None:
    app, queue, path = served
    checkpoint = folder / "checkpoints" / "step_000006" / "trainable.safetensors"
    adapter = checkpoint.rename(checkpoint.with_name("pytorch_lora_weights.safetensors"))
    page = write_report(folder).read_text()
    assert "/checkpoints/step_000006/pytorch_lora_weights.safetensors --to diffusers" in page
    assert '<option value="4" data-file="trainable.safetensors"' in page
    client = StudioClient(app)
    client.get(path)
    assert client.write(f"{path}export", step=6).status_code == 200
    assert queue.asked == [list_export_arguments(adapter, 6)]


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
def test_the_button_exports_the_step_that_is_chosen(served: tuple[ASGIApp, ExportQueue, str], folder: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    app, queue, path = served
    with serving(app, path) as server, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(server.url)
        sync_api.expect(page.locator(".film .pair figure:visible")).to_have_count(4)
        page.select_option("#take", "4")
        page.click("#export")
        sync_api.expect(page.locator("#exported")).to_contain_text("is being written to exports/step_000004")
        page.click("#export")
        sync_api.expect(page.locator("#exported")).to_contain_text("step_000004 exists already")
        page.goto(f"file://{write_report(folder)}")
        page.select_option("#take", "4")
        assert "step_000004 " in f"{page.locator('#take-line').text_content()} "
        browser.close()
    assert [Path(arguments[-1]).name for arguments in queue.asked] == ["step_000004"]
