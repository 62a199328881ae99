"""The page says what the run's files say, holds all it shows, and trusts nothing it was given."""

import base64
import json
import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from html_page import Page

from dit_lora.data.video import write_sample, write_video
from dit_lora.errors import DitLoraError
from dit_lora.report import run_samples
from dit_lora.report.run_report import write_report

HOSTILE = '<script>alert("x")</script> & a cat'


def metrics_line(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.0 - 0.05 * step,
        "grad_norm": 0.4 + 0.01 * step,
        "lr": 1e-3,
        "seconds": 9.0 if step == 1 else 0.25,
        "data_seconds": 0.002,
        "peak_gib": 3.5 + 0.25 * (step == 7),
        "samples": 2 * step,
        "lr_groups": {"adapter": 1e-3, "backbone": 1e-5},
        "grad_norm_groups": {"adapter": 0.3, "backbone": 0.1},
        "loss_by_timestep": {"0-249": 1.0 + step, "750-999": 0.125}
        if step % 2
        else {"250-499": 0.5},
        **changes,
    }


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 20 of 40 steps with one prompt, sampled at steps 0, 10 and 20."""
    folder = tmp_path / "kitten-run"
    folder.mkdir()
    config = {
        "model": {"family": "cogvideox", "path": "THUDM/CogVideoX-2b", "revision": None},
        "lora": {"rank": 12, "targets": ["to_q", "to_k"]},
        "train": {"steps": 40},
        "validation": {"prompts": [HOSTILE]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = {"device": "one GPU", "future": {"key": 7}, "packages": {"torch": "2.13.1"}}
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", [metrics_line(step) for step in range(1, 21)])
    write_lines(
        folder / "held_out.jsonl",
        [{"step": 0, "held_out_loss": 2.5}, {"step": 20, "held_out_loss": 2.0}],
    )
    for step in (0, 10, 20):
        video = torch.full((3, 32, 48, 3), 10 * step, dtype=torch.uint8)
        write_video(folder / "samples" / f"step_{step:06d}" / "prompt_00.mp4", video, 8)
    return folder


def report(folder: Path) -> Page:
    page = Page(write_report(folder))
    assert page.open == [], "a tag is left open"
    return page


def test_the_page_loads_nothing_and_runs_nothing(run_dir: Path) -> None:
    """Every address in it is a data URI, no style imports, and there is no script."""
    page = report(run_dir)
    addresses = [
        value or ""
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "href", "srcset", "poster", "data", "action", "xlink:href")
    ]
    assert len(addresses) == 3  # the empty icon and two videos
    assert all(address.startswith("data:") for address in addresses)
    assert not re.search(r"https?://|url\(|@import|<script", page.source)


def test_the_headline_figures_are_those_of_the_files(run_dir: Path) -> None:
    text = report(run_dir).text
    assert "kitten-run cogvideox THUDM/CogVideoX-2b" in text
    assert "Steps 20 of 40, not finished" in text
    assert "Training loss 1.100 mean of the last 5" in text  # steps 16 to 20: 1.2 to 1.0
    assert "Held-out loss 2.500 → 2.000 -20.0%, step 0 to 20" in text
    assert "Seconds per step 0.250 median" in text
    assert "Peak memory 3.75 GiB" in text  # at step 7 alone


def test_timestep_losses_are_means_over_the_last_quarter(run_dir: Path) -> None:
    """Steps 17 and 19 saw 0-249 at losses 18 and 20; steps 16, 18 and 20 saw 250-499 at 0.5."""
    text = report(run_dir).text.replace("\u2013", "-")
    assert "mean loss, steps 16 to 20" in text
    assert "0-249 19.00 2 steps 250-499 0.5000 3 steps 750-999 0.1250 2 steps" in text


def test_recipe_and_environment_are_shown_with_unknown_keys(run_dir: Path) -> None:
    text = report(run_dir).text
    for row in ("rank 12", "targets to_q, to_k", "revision null", "torch 2.13.1", "future.key 7"):
        assert row in text
    assert "device one GPU" in text


def test_held_out_losses_in_metrics_lines_count_too(run_dir: Path) -> None:
    (run_dir / "held_out.jsonl").unlink()
    lines = [
        metrics_line(1, held_out_loss=4.0),
        metrics_line(2),
        metrics_line(3, held_out_loss=5.0),
    ]
    write_lines(run_dir / "metrics.jsonl", lines)
    assert "4.000 → 5.000 +25.0%, step 1 to 3" in report(run_dir).text


def test_a_nan_loss_leaves_a_gap_and_is_said(run_dir: Path) -> None:
    lines = [metrics_line(step) for step in range(1, 21)]
    lines[6]["loss"] = math.nan
    write_lines(run_dir / "metrics.jsonl", lines)
    page = report(run_dir)
    assert "The loss is not finite at step 7." in page.text
    strokes = page.all("path")[0]["d"] or ""
    assert strokes.count("M") == 2
    assert [line["x1"] for line in page.all("line") if line["class"] == "bad"] == ["35.0%"]
    assert "1.100 mean of the last 5" in page.text


def test_captions_and_other_texts_are_escaped(run_dir: Path) -> None:
    """Prompts, sample names, verdicts, group names and versions are text, never markup."""
    event = {"step": 3, "kind": HOSTILE, "sample_ids": [HOSTILE], "verdict": {"cause": HOSTILE}}
    write_lines(run_dir / "events.jsonl", [event])
    write_lines(
        run_dir / "metrics.jsonl",
        [metrics_line(1, lr_groups={HOSTILE: 1.0}, loss_by_timestep={HOSTILE: 1.0})],
    )
    (run_dir / "environment.json").write_text(json.dumps({"packages": {HOSTILE: HOSTILE}}))
    page = report(run_dir)
    assert page.all("script") == []
    assert page.text.count('alert("x")') >= 8
    assert any(HOSTILE in (video["aria-label"] or "") for video in page.all("video"))


def test_first_and_last_videos_are_embedded_byte_for_byte(run_dir: Path) -> None:
    page = report(run_dir)
    prefix = "data:video/mp4;base64,"
    videos = page.all("video")
    decoded = [base64.b64decode((video["src"] or "").removeprefix(prefix)) for video in videos]
    expected = [run_dir / "samples" / f"step_{step:06d}" / "prompt_00.mp4" for step in (0, 20)]
    assert decoded == [path.read_bytes() for path in expected]
    assert all({"autoplay", "muted", "loop", "playsinline", "controls"} <= set(v) for v in videos)
    assert "before after step 20" in page.text


def test_images_are_shown_as_images(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(run_dir / "samples")
    paths = [
        write_sample(
            run_dir / "samples" / f"step_{step:06d}" / "prompt_00",
            torch.full((1, 32, 48, 3), 10 * step, dtype=torch.uint8),
            None,
        )
        for step in (0, 20)
    ]
    page = report(run_dir)
    images = [image for image in page.all("img") if HOSTILE in (image["alt"] or "")]
    prefix = "data:image/png;base64,"
    decoded = [base64.b64decode((image["src"] or "").removeprefix(prefix)) for image in images]
    assert decoded == [path.read_bytes() for path in paths]
    assert not page.all("video")
    monkeypatch.setattr(run_samples, "EMBED_LIMIT_BYTES", 1)
    sources = [image["src"] for image in report(run_dir).all("img")]
    assert sources == ["samples/step_000000/prompt_00.png", "samples/step_000020/prompt_00.png"]


def test_videos_beyond_the_limit_are_linked_and_that_is_said(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts base64: the first video fits exactly, the second does not."""
    first = run_dir / "samples" / "step_000000" / "prompt_00.mp4"
    limit = len(base64.b64encode(first.read_bytes()))
    monkeypatch.setattr(run_samples, "EMBED_LIMIT_BYTES", limit)
    page = report(run_dir)
    sources = [video["src"] or "" for video in page.all("video")]
    assert sources[0].startswith("data:")
    assert sources[1] == "samples/step_000020/prompt_00.mp4"
    assert "1 sample is linked, not embedded" in page.text
    monkeypatch.setattr(run_samples, "EMBED_LIMIT_BYTES", limit - 1)
    assert "2 samples are linked, not embedded" in report(run_dir).text


def test_a_torn_last_line_is_left_out_and_said(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    text = report(run_dir).text
    assert "The last line of metrics.jsonl is cut off" in text
    assert "Steps 19 of 40" in text


def test_a_step_written_twice_counts_once_with_its_later_values(run_dir: Path) -> None:
    lines = [metrics_line(1), metrics_line(2, loss=9.0), metrics_line(2, loss=1.05)]
    write_lines(run_dir / "metrics.jsonl", lines)
    assert "Training loss 1.500 mean of the last 2" in report(run_dir).text  # (1.95 + 1.05) / 2


def test_events_are_listed_in_words(run_dir: Path) -> None:
    offender = {"sample": "clips/7.mp4", "rank": 1, "reason": "latents hold NaN"}
    event = {
        "step": 8,
        "micro_step": 2,
        "rank": 1,
        "kind": "non_finite_loss",
        "sample_ids": ["clips/7.mp4"],
        "verdict": {"offenders": [offender]},
        "action": "stop",
        "seconds": 1.93412,
    }
    write_lines(run_dir / "events.jsonl", [event])
    words = "8 2 1 non_finite_loss clips/7.mp4 offenders: sample: clips/7.mp4; rank: 1; reason: latents hold NaN"
    assert f"{words} stop 1.93" in report(run_dir).text


def test_what_is_missing_is_said_where_it_is_expected(tmp_path: Path) -> None:
    """A folder with a recipe alone gives a page."""
    (tmp_path / "config.yaml").write_text(
        "model: {family: cogvideox, path: x}\ntrain: {steps: 5}\n"
    )
    text = report(tmp_path).text
    for words in ("Steps 0 of 5", "No step has been recorded", "No samples", "None recorded"):
        assert words in text
    assert "Not recorded: environment.json is absent" in text


@pytest.mark.parametrize("lines", [[metrics_line(1)], [{"step": 1}], [{"loss": 1.0}], [3, None]])
def test_scarce_metrics_give_a_page(run_dir: Path, lines: list[Any]) -> None:
    write_lines(run_dir / "metrics.jsonl", lines)
    assert "kitten-run" in report(run_dir).text


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"is not a run: it has no config\.yaml"),
        ("- 1", "is not a recipe"),
        ("a: [", "cannot read"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_in_one_line(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(DitLoraError, match=reason) as caught:
        write_report(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_the_report_appears_whole_or_not_at_all(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old page stays until the rename, and nothing is left beside the new one."""
    (run_dir / "report.html").write_text("old")
    seen = []

    def replace(source: Path, target: Path) -> None:
        seen.append((target.read_text(encoding="utf-8"), Path(source).read_text(encoding="utf-8")))
        source.rename(target)

    monkeypatch.setattr(os, "replace", replace)
    path = write_report(run_dir)
    [(before, whole)] = seen
    assert before == "old"
    assert whole == path.read_text(encoding="utf-8")
    assert whole.rstrip().endswith("</html>")
    assert not [name for name in os.listdir(run_dir) if "partial" in name]


def test_a_report_that_cannot_be_written_is_one_line(run_dir: Path) -> None:
    (run_dir / "report.html").mkdir()
    with pytest.raises(DitLoraError, match=r"cannot write .*report\.html"):
        write_report(run_dir)
    assert not (run_dir / ".report.html.partial").exists()


def test_a_chat_models_answers_and_losses_by_media_are_shown(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "samples")
    said = {0: "", 10: "in between", 20: "<b>a disc</b>"}
    for step, answer in said.items():
        folder = run_dir / "samples" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        answers = [{"prompt": HOSTILE, "media": "/data/clips/a.mp4", "answer": answer}]
        (folder / "answers.json").write_text(json.dumps(answers), encoding="utf-8")
    lines = [metrics_line(step, loss_by_timestep={}) for step in range(1, 21)]
    for line in lines:
        line["loss_by_media"] = {"video" if line["step"] % 2 else "image": float(line["step"])}
    write_lines(run_dir / "metrics.jsonl", lines)
    page = report(run_dir)
    text = " ".join(page.text.split())
    assert "a.mp4 before no words after step 20 <b>a disc</b>" in text
    assert "in between" not in text
    assert "/data" not in text  # a page may be shown to others
    assert "Loss by kind of media" in text
    assert "Loss by timestep" not in text
