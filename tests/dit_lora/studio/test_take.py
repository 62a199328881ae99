"""Taking a step's adapter from the report: by the line to type, or on the page to which the served one links."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from report_runs import write_run
from studio_browser import CHROMIUM
from studio_client import serving

from dit_lora.data.media.video import write_sample
from dit_lora.report.run.page import choose_export_format, write_report
from dit_lora.studio.app import build_app, list_pages
from dit_lora.studio.library import RunLibrary, compute_run_id


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


def test_the_written_page_has_the_line_to_type(folder: Path) -> None:
    page = write_report(folder).read_text()
    line = "/checkpoints/step_000006/trainable.safetensors --to diffusers --out &#39;kitten run&#39;/exports"
    assert f"dit-lora export &#39;kitten run&#39;{line}" in page
    assert 'href="work"' not in page
    assert '<option value="4" data-file="trainable.safetensors">' in page.split('id="take"')[1].split("</select>")[0]
    assert '<option value="2"' not in page.split('id="take"')[1].split("</select>")[0]
    shutil.rmtree(folder / "checkpoints")
    assert 'id="take"' not in write_report(folder).read_text()


def test_the_adapter_that_stays_of_a_checkpoint_is_taken(folder: Path) -> None:
    checkpoint = folder / "checkpoints" / "step_000006" / "trainable.safetensors"
    checkpoint.rename(checkpoint.with_name("pytorch_lora_weights.safetensors"))
    page = write_report(folder).read_text()
    assert "/checkpoints/step_000006/pytorch_lora_weights.safetensors --to diffusers" in page
    assert '<option value="4" data-file="trainable.safetensors"' in page


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
def test_the_line_is_that_of_the_step_that_is_chosen(folder: Path, browser: Any) -> None:
    app = build_app(list_pages(RunLibrary([folder])))
    with serving(app, f"/runs/{compute_run_id(folder)}/") as server:
        page = browser.new_page()
        page.goto(server.url)
        page.locator(".film .pair figure:visible").nth(3).wait_for()
        page.select_option("#take", "4")
        assert "step_000004/" in page.locator("#take-line").inner_text()
        page.locator(".take a").click()
        page.wait_for_url("**/work")
        page.goto(f"file://{write_report(folder)}")
        page.select_option("#take", "4")
        assert "step_000004 " in f"{page.locator('#take-line').text_content()} "
        assert page.locator(".take a").count() == 0
        page.close()
