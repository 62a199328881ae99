"""A walk through the studio with real commands: short trainings of the demo's base, at two widths, in light and dark.

The tests of one width follow each other: each uses the runs of those before. `STUDIO_WALK=FOLDER` keeps the runs, so
that a later test can be repeated without the earlier ones.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from studio_browser import CHROMIUM, check_page, open_page
from studio_client import serving

from dit_lora.adapters.marked_save import read_best_marked_step
from dit_lora.cli.app import app
from dit_lora.cli.tiny import copy_trained_base
from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.data.synthetic.clips import write_shapes
from dit_lora.data.synthetic.scenes import list_balanced_scenes, write_scenes
from dit_lora.families import get_family
from dit_lora.studio.app import build_app, list_pages
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.server import StudioServer

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
    pytest.mark.thorough,
]
WIDTHS, SCHEMES = (1280, 390), ("dark", "light")
COMMAND_TIMEOUT_MS = 900_000  # on a busy machine
EDITED_DATA = Path("demo/edited")
"""Not the data of the runs: a run whose captions have changed is not continued."""
PLAIN_DATA = Path("demo/plain")
"""Pictures without captions."""
CHAT_MODEL = Path("demo/chat")
OVERRIDES = "data.sources=[{path: demo/moons}]\nvalidation.inference_steps=2\nvalidation.every=20"


@dataclass
class Walk:
    """A browser on one screen, and the folder of the studio that it shows."""

    page: Any
    errors: list[str]
    server: StudioServer
    browser: Any
    root: Path

    def get_run_page(self, name: str) -> str:
        return f"/runs/{compute_run_id(Path('runs') / name)}/"

    @property
    def data_page(self) -> str:
        return f"/data/{compute_run_id(EDITED_DATA)}/"

    def start_run(self, source: str, name: str, **fields: str) -> None:
        """Fill the form of a new run, and press Start."""
        self.page.goto(f"/new?from={source}")
        self.page.fill("input[name=name]", name)
        for key, text in fields.items():
            self.page.fill(f"[name='{key}']", text)
        self.page.click("button:has-text('Start')")
        self.page.wait_for_url("**/jobs")

    def find_job(self, text: str, state: str = "") -> Any:
        """The newest command with this text, in a state."""
        jobs = self.page.locator(".job").filter(has=self.page.locator("code", has_text=text))
        return jobs.filter(has=self.page.locator(".pill", has_text=re.compile(state))).first

    def wait_for_job(self, text: str, state: str) -> Any:
        """Wait until a command with this text is in a state, and follow it on the page."""
        job = self.find_job(text, state)
        job.wait_for(timeout=COMMAND_TIMEOUT_MS)
        return job


@pytest.fixture(scope="module", params=WIDTHS)
def walk(request: pytest.FixtureRequest, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    width = request.param
    kept = os.environ.get("STUDIO_WALK")
    root = (Path(kept) if kept else tmp_path_factory.mktemp("walk")) / str(width)
    if not root.exists():
        (root / "runs").mkdir(parents=True)
        copy_trained_base(root / "demo" / "model")
        for folder in (root / "demo" / "moons", root / EDITED_DATA):
            folder.mkdir(parents=True)
            write_scenes(folder, list_balanced_scenes("moon", 6), torch.Generator().manual_seed(0))
        write_shapes(root / PLAIN_DATA, clips=20, frames=1, height=48, width=64, fps=8)
        for file in (root / PLAIN_DATA).glob("*.txt"):
            file.unlink()
        get_family("chat").build_tiny_checkpoint("qwen2.5-vl", root / CHAT_MODEL, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        # The recipe's paths are those of the folder in which the studio was started.
        patch.chdir(root)
        with serving(build_app(list_pages(RunLibrary([Path("runs"), Path("demo")])))) as server:
            page, errors = open_page(browser, server, viewport={"width": width, "height": 900})
            yield Walk(page, errors, server, browser, root)
            page.context.close()


def test_a_training_is_stopped_by_the_button_and_saved(walk: Walk) -> None:
    page = walk.page
    page.goto("/new")
    page.click("text=the demo")
    assert page.locator("pre", has_text="tiny shapes demo/known").is_visible()
    check_page(page, "real_form", SCHEMES)
    page.fill("[name=overrides]", OVERRIDES)
    page.fill("[name=gpu]", "24")
    page.click("button:has-text('Plan its memory')")
    bar = page.locator(".memory-bar", has_text=re.compile(r"fits: [\d.]+ of 24 GiB"))
    bar.wait_for(timeout=COMMAND_TIMEOUT_MS)
    assert {"weights", "activations"} <= set(re.findall(r"[a-z]+", " ".join(bar.locator("li").all_inner_texts())))
    check_page(page, "real_plan", SCHEMES)
    steps = {"train.steps": "40", "train.save_every": "20", "validation.prompts": "a red moon grows"}
    walk.start_run("demo/moon", "first", **steps, overrides=OVERRIDES)
    first_step = walk.wait_for_job("run.dir=", "running").locator("pre", has_text=re.compile(r"step +\d"))
    first_step.wait_for(timeout=COMMAND_TIMEOUT_MS)
    check_page(page, "real_training", SCHEMES)
    page.goto("/")
    page.locator(".run .pill", has_text="running").wait_for()
    check_page(page, "real_runs_running", SCHEMES)
    page.goto("/jobs")
    walk.find_job("run.dir=").locator("button:has-text('Stop')").click()
    walk.find_job("run.dir=", "stopping|stopped").wait_for()
    # It ends when the run is saved, and says so.
    walk.wait_for_job("run.dir=", "stopped").locator("pre", has_text="train.resume=auto").wait_for()
    check_page(page, "real_stopped", SCHEMES)
    # Saved at the step where it stopped; it may have passed step 20 before.
    last_step = json.loads(Path("runs/first/metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert Path(f"runs/first/checkpoints/step_{last_step:06d}").is_dir()
    assert walk.errors == []


def test_three_runs_wait_for_each_other(walk: Walk) -> None:
    page = walk.page
    page.goto(walk.get_run_page("first") + "work")
    page.click("button:has-text('Continue training')")
    page.wait_for_url("**/jobs")
    source = compute_run_id(Path("runs/first"))
    for name, rank in (("rank_4", "4"), ("rank_8", "8")):
        walk.start_run(source, name, **{"train.steps": "4", "train.save_every": "2", "lora.rank": rank})
    walk.find_job("rank_8", "waiting").wait_for()
    assert page.locator(".pill", has_text="waiting").count() == 2
    check_page(page, "real_queue", SCHEMES)
    walk.wait_for_job("rank_8", "done|failed")
    trainings = page.locator(".job").filter(has=page.locator("code", has_text="dit-lora train runs/first"))
    assert trainings.locator(".pill").all_inner_texts() == ["done"] * 3
    check_page(page, "real_queue_done", SCHEMES)
    rows = [json.loads(line) for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
    # The run went on where it was stopped: each step is there once.
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 41))
    assert walk.errors == []


def test_runs_are_compared(walk: Walk) -> None:
    page = walk.page
    page.goto("/")
    for name in ("first", "rank_4", "rank_8"):
        page.check(f"[aria-label='Compare {name}']")
    check_page(page, "real_runs", SCHEMES)
    page.click("button:has-text('Compare')")
    page.locator("td, th", has_text="lora.rank").first.wait_for()
    assert page.locator(".side video, .side img").count() >= 3
    check_page(page, "real_compare", SCHEMES)
    page.goto(walk.get_run_page("rank_8"))
    page.wait_for_load_state("networkidle")
    check_page(page, "real_report", SCHEMES)
    assert walk.errors == []


def test_a_save_is_sampled_again_marked_and_exported(walk: Walk) -> None:
    page, run = walk.page, Path("runs/rank_4")
    work = walk.get_run_page("rank_4") + "work"
    page.goto(work)
    page.locator("form[action$=mark] select").select_option(index=1)
    page.click("button:has-text('Mark as best')")
    page.locator("td b", has_text="best").wait_for()
    assert read_best_marked_step(run) == 2
    check_page(page, "real_work", SCHEMES)
    page.fill("input[name=strengths]", "0,1")
    page.fill("input[name=inference_steps]", "2")
    page.click("button:has-text('Sample')")
    page.goto(work)
    page.locator("form[action$=export] select[name=save]").select_option(index=1)
    page.click("form[action$=export] button")
    page.wait_for_url("**/jobs")
    for command in ("dit-lora export", "dit-lora sample"):
        walk.wait_for_job(command, "done|failed")
        assert walk.find_job(command, "done").count() == 1
    assert walk.find_job("dit-lora sample").locator("video, img").count() >= 2
    check_page(page, "real_sampled", SCHEMES)
    # The marked save is what `--best` takes.
    out = Path("best")
    app(["export", str(run), "--best", "--to", "diffusers", "--out", str(out)], standalone_mode=False)
    files = [folder / "pytorch_lora_weights.safetensors" for folder in (out, run / "exports/step_000002_diffusers")]
    best, exported = map(load_file, files)
    assert best.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in best.items())
    assert walk.errors == []


def test_a_stale_caption_of_a_second_tab_is_shown_and_not_written(walk: Walk) -> None:
    page = walk.page
    page.goto(walk.data_page)
    other, other_errors = open_page(walk.browser, walk.server, viewport=page.viewport_size)
    other.goto(walk.data_page)
    texts = [f"a moon, tab {number}, {os.getpid()}" for number in (1, 2)]
    for tab, text in ((page, texts[0]), (other, texts[1])):
        tab.locator(".sample textarea").first.fill(text)
        tab.locator(".sample button.save").first.click()
    page.locator(".said", has_text="saved").first.wait_for()
    other.locator(".said.wrong", has_text="changed elsewhere").wait_for()
    assert other.locator(".now pre").first.inner_text() == texts[0]
    assert other.locator(".sample textarea").first.input_value() == texts[1]
    table = CaptionTable.read(EDITED_DATA)
    assert table.captions[table.media[0]] == texts[0]
    check_page(other, "real_two_tabs", SCHEMES)
    # So is a change of many captions that was previewed before the edit.
    page.goto(f"{walk.data_page}change?find=moon&replacement=crescent")
    other.locator(".sample button.save").first.click()
    other.locator(".said", has_text="saved").first.wait_for()
    page.click("button:has-text('Change')")
    page.locator(".notes", has_text="Nothing was written").wait_for()
    check_page(page, "real_stale_change", SCHEMES)
    # A thumbnail is refused with 503 while others are made, and asked for again.
    assert [error for error in (*walk.errors, *other_errors) if "409" not in error and "503" not in error] == []
    other.context.close()


def test_the_media_are_audited(walk: Walk) -> None:
    page = walk.page
    page.goto(walk.data_page)
    page.click("text=Audit the media")
    page.click("button:has-text('Audit')")
    walk.wait_for_job("dit-lora audit", "done|failed")
    page.goto(walk.data_page)
    assert page.locator(".figure", has_text="Media audit").locator(".value").inner_text() == "done"
    check_page(page, "real_sheet", SCHEMES)
    assert [error for error in walk.errors if "409" not in error and "503" not in error] == []


def test_pictures_are_described_by_a_chat_model(walk: Walk) -> None:
    page = walk.page
    address = f"/data/{compute_run_id(PLAIN_DATA)}/"
    page.goto(address)
    page.click("text=Describe files without a caption")
    page.fill("input[name=model]", str(CHAT_MODEL))
    page.fill("form[action$=describe] input[name=trigger]", "sks")
    page.fill("input[name=max_tokens]", "16")
    page.click("button:has-text('Describe 20 files')")
    # The page follows the command every 3 seconds; the answers of a tiny model take less than that.
    while not (progress := page.locator("progress")).count() and walk.find_job("dit-lora caption", "running").count():
        page.goto(address)
    assert progress.get_attribute("max") == "20"
    assert re.search(r"\d+ of 20 captions are made", page.locator("[data-key=generated]").inner_text())
    check_page(page, "real_describing", SCHEMES)
    walk.wait_for_job("dit-lora caption", "done|failed")
    # The page's figures have followed; captions show when it is loaded again.
    page.locator(".figure", has_text="Without a caption").locator(".value", has_text=re.compile("^0$")).wait_for()
    page.goto(address)
    captions = CaptionTable.read(PLAIN_DATA).captions
    assert len(captions) == 20
    assert all(caption.startswith("sks, ") for caption in captions.values())
    assert all(
        text.startswith("sks, ")
        for text in page.locator(".sample textarea").evaluate_all("all => all.map(area => area.value)")
    )
    check_page(page, "real_described", SCHEMES)
    assert [error for error in walk.errors if "409" not in error and "503" not in error] == []
