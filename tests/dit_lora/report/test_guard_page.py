"""The page of a guard's folder shows its contents, and escapes text from other people."""

import json
from pathlib import Path
from typing import Any

import pytest
from html_page import Page
from report_runs import write_lines
from typer.testing import CliRunner

from dit_lora.cli.app import app
from dit_lora.report.guard_page import is_guard_folder, write_guard_report

HOSTILE = '</script><img src=x onerror="window.hit=1">'
BUNDLE = "bundles/step_000002_rank_0_micro_step_0"


def event(step: int, cause: str = "data", **more: Any) -> dict[str, Any]:
    verdict = {"cause": cause, "words": f"{cause} of {more.pop('of', 'it')}"} | more.pop("told", {})
    line = {"step": step, "micro_step": 0, "rank": 0, "kind": "non_finite_loss", "guard": "aa"}
    return {**line, "verdict": verdict, "action": "skip", "sample_ids": [], **more}


FLASH = {
    "switch": "attention:flash",
    "module": "blocks.1.attn",
    "op": "aten.div.Tensor",
    "evidence": {"trail": ["softmax reaches 3e4"]},
}
EVENTS = [
    event(2, sample_ids=["dataset index 5"], bundle=BUNDLE),
    event(7, "attention_backend", action="fallback", told=FLASH),
    event(12, sample_ids=["dataset index 5"], known=True),
    event(14, "labels", sample_ids=["row 1 of micro-batch 0"], of=HOSTILE),
    event(3, "weights", action="stop", guard="bb"),
]
START = {
    "id": "aa",
    "started": "2026-01-02 03:04:05 UTC",
    "script": "train.py",
    "loop": "plain PyTorch",
    "ranks": 2,
    "device": "cuda:0",
    "versions": {"torch": "2.13.0"},
    "taken": 1496,
    "lost": 4,
    "switched_off": ["attention:flash"],
    "ended": True,
    "optimizers": ["AdamW"],
    "models": [{"name": "UNet", "class": "UNet", "parameters": 9000, "trained": 40, "dtypes": ["float32"]}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / BUNDLE).mkdir(parents=True)
    (folder / BUNDLE / "bundle.json").write_text("{}")
    (folder / "last_good_step_000002.safetensors").write_bytes(bytes(2**20))
    write_lines(folder / "events.jsonl", EVENTS)
    ended_run = {**START, "id": "bb", "taken": 2, "lost": 1, "switched_off": []}
    (folder / "guard.json").write_text(json.dumps({"format": 1, "starts": [START, ended_run]}))
    return folder


def figures(page: Page) -> list[str]:
    part = page.source.partition('<dl class="figures">')[2].partition("</dl>")[0]
    return [text.partition("<")[0] for text in part.split('"value">')[1:]]


def test_the_page_counts_steps_bad_samples_and_switched_off_parts(folder: Path) -> None:
    page = Page(write_guard_report(folder))
    assert figures(page) == ["1,498", "5", "1", "1"]
    assert "most often dataset index 5 (2x); and 1 without a name" in page.text
    assert "stopped by the guard" in page.text
    assert "0.3% of 1,503" in page.text
    watched = page.section("Watched loops")
    assert "UNet: 40 of 9,000 trained, in float32" in watched
    assert "train.py, plain PyTorch, cuda:0, 2 processes" in watched
    assert "last_good_step_000002.safetensors 1 MiB" in page.section("Saved weights")


def test_equal_events_share_a_row_of_the_table(folder: Path) -> None:
    page = Page(write_guard_report(folder))
    table = page.section("Events")
    assert "2 and 1 more, to step 12 data skip dataset index 5 data of it bundle" in table
    fallback = "7 attention backend fallback blocks.1.attn aten.div.Tensor attention_backend of it"
    assert fallback in table
    assert "switched the component off and skipped the step" in table
    assert "softmax reaches 3e4" in table
    links = [link["href"] for link in page.all("a")]
    assert links == [f"{BUNDLE}/bundle.json", "last_good_step_000002.safetensors"]
    assert f"dit-lora replay mine/{BUNDLE} --script train.py" in page.text


def test_the_timeline_has_a_lane_a_cause_and_a_card_a_start(folder: Path) -> None:
    page = Page(write_guard_report(folder))
    lanes = [lane["aria-label"] for lane in page.all("div") if lane.get("class") == "track"]
    assert lanes == [
        "data: 2 events, over steps 1 to 1,500",
        "attention backend: 1 event, over steps 1 to 1,500",
        "labels: 1 event, over steps 1 to 1,500",
        "weights: 1 event, over steps 1 to 3",
    ]
    ticks = [(tick["class"], tick["style"], tick["title"]) for tick in page.all("i")]
    assert ticks[0] == ("warn", "left: 0.25%", "step 2: skip")
    assert ticks[-1] == ("reject", "left: 100.00%", "step 3: stop")


def test_what_a_stranger_wrote_is_text_and_no_address(folder: Path) -> None:
    (folder / "secret").mkdir()
    (folder / "secret" / "bundle.json").write_text("{}")
    hostile_bundles = ("javascript:alert(1)", "bundles/../secret", "bundles/none", 7)
    write_lines(
        folder / "events.jsonl",
        [event(n, of=HOSTILE, bundle=b) for n, b in enumerate(hostile_bundles)],
    )
    page = Page(write_guard_report(folder))
    assert not page.all("img")
    assert HOSTILE in page.text
    assert [link["href"] for link in page.all("a")] == ["last_good_step_000002.safetensors"]
    assert not page.all("script")


def test_a_folder_with_less_in_it_gives_a_page_of_less(folder: Path) -> None:
    (folder / "guard.json").write_text('{"starts": [3, {"id"')
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"step": 9, "verd')
    page = Page(write_guard_report(folder))
    assert figures(page)[:2] == ["\u2013", "\u2013"]
    assert "so the watched models are not known" in page.text
    assert "Ignored 1 incomplete line of events.jsonl" in page.text
    assert "Events of a guard that is not in guard.json" in page.text
    (folder / "events.jsonl").unlink()
    (folder / "guard.json").write_text(json.dumps({"starts": [{**START, "ended": False}]}))
    page = Page(write_guard_report(folder))
    assert "running, or killed" in page.text
    assert "No events: no step failed" in page.text
    assert "as of the last write" in page.text


def test_the_verb_tells_a_guards_folder_from_a_run(folder: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.output.strip() == str(folder / "report.html")
    result = CliRunner().invoke(app, ["report", str(folder), "--serve"])
    assert "--serve needs a run" in str(result.exception)
    assert not is_guard_folder(folder / "bundles")
    (folder / "config.yaml").write_text("run: {}")
    assert not is_guard_folder(folder)


def test_statistics_of_modules_are_maps(folder: Path) -> None:
    assert "gradient norm by block" not in write_guard_report(folder).read_text()
    losses = [("aa", 5, 9.0), ("bb", 4, 0.125), ("bb", 8, 0.25)]
    lines = [
        {"step": step, "guard": guard, "modules": {"blocks.1.attn": {"grad_norm": norm}}}
        for guard, step, norm in losses
    ]
    write_lines(folder / "statistics.jsonl", lines)
    page = write_guard_report(folder).read_text()
    assert "gradient norm by block, over steps" in page
    assert '"steps": [4, 8], "values": [[0.125, 0.25]]' in page  # of the last start alone


def test_what_is_only_reported_goes_by_its_kind(folder: Path) -> None:
    spike = event(9, "unknown", kind="spike", action="report", of="grad_norm")
    write_lines(folder / "events.jsonl", [*EVENTS, spike])
    assert "<b>spike</b>" in write_guard_report(folder).read_text()
