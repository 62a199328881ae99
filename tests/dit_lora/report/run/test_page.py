"""The page says what the run's files say, holds all it shows, and trusts nothing it was given."""

import base64
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from report_runs import HOSTILE, metrics_line, report, write_lines

from dit_lora.data.media.sound import Sound
from dit_lora.data.media.video import write_sample, write_video
from dit_lora.errors import DitLoraError
from dit_lora.report.run import samples
from dit_lora.report.run.page import write_report


def test_the_page_loads_nothing_and_runs_its_own_scripts_alone(run_dir: Path) -> None:
    """Every address is a data URI or its own anchor, no style imports, and the policy has each script's digest."""
    page = report(run_dir)
    addresses = [
        value or ""
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "href", "srcset", "poster", "data", "action", "xlink:href")
    ]
    local_addresses = [address for address in addresses if not address.startswith("#")]
    assert len(local_addresses) == 4  # the empty icon and three videos
    assert all(address.startswith("data:") for address in local_addresses)
    library, *own_scripts = re.findall(r"<script>(.*?)</script>", page.source, re.DOTALL)
    assert library.startswith("/*! https://github.com/leeoniya/uPlot")
    assert not re.search(r"https?://|url\(|@import", page.source.replace(library, ""))
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in (library, *own_scripts)
    ]
    [policy] = [meta["content"] or "" for meta in page.all("meta") if "http-equiv" in meta]
    assert policy.endswith("script-src " + " ".join(f"'sha256-{digest}'" for digest in digests))
    assert len(own_scripts) == 2
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert not re.search(r"http|unsafe-inline'.*script|\*", policy.replace("style-src 'unsafe-inline'", ""))


def test_the_headline_figures_are_those_of_the_files(run_dir: Path) -> None:
    text = report(run_dir).text
    assert "Model THUDM/CogVideoX-2b Family cogvideox Trained LoRA of rank 12" in text
    assert "interrupted guard: no step failed as of 20" in text
    assert "Steps 20 of 40, not finished" in text
    assert "Training loss 1.100 mean of the last 5" in text  # steps 16 to 20: 1.2 to 1.0
    assert "Eval loss 2.500 → 2.000 -20.0%, step 0 to 20" in text
    assert "Seconds per step 0.250 median, 0.29% waiting for data" in text  # 20 * 0.002 of 9 + 19 * 0.25
    assert "Samples per second 8.00 median" in text
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


def test_eval_losses_in_metrics_lines_count_too(run_dir: Path) -> None:
    (run_dir / "eval_loss.jsonl").unlink()
    lines = [
        metrics_line(1, eval_loss=4.0),
        metrics_line(2),
        metrics_line(3, eval_loss=5.0),
    ]
    write_lines(run_dir / "metrics.jsonl", lines)
    assert "4.000 → 5.000 +25.0%, step 1 to 3" in report(run_dir).text


def test_a_run_that_an_earlier_version_began_shows_all_of_its_eval_losses(run_dir: Path) -> None:
    """Its first losses are in held_out.jsonl, and what a resumed run measures is in eval_loss.jsonl."""
    write_lines(run_dir / "held_out.jsonl", [{"step": 0, "held_out_loss": 4.0}, {"step": 2, "held_out_loss": 3.0}])
    write_lines(run_dir / "eval_loss.jsonl", [{"step": 20, "eval_loss": 5.0}])
    page = report(run_dir)
    assert "4.000 → 5.000 +25.0%, step 0 to 20" in page.text
    assert [loss for loss in page.data[1]["curves"][1]["y"] if loss is not None] == [4.0, 3.0, 5.0]


def test_a_nan_loss_leaves_a_gap_and_is_said(run_dir: Path) -> None:
    lines = [metrics_line(step) for step in range(1, 21)]
    lines[6]["loss"] = math.nan
    write_lines(run_dir / "metrics.jsonl", lines)
    page = report(run_dir)
    assert "The loss is not finite at step 7." in page.text
    losses = page.data[1]["curves"][0]["y"]
    assert [index + 1 for index, loss in enumerate(losses) if loss is None] == [7]
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
    assert {tag.get("type") for tag in page.all("script")} == {None, "application/json"}
    assert page.source.count("<script>") == 3  # uPlot's and ours
    assert HOSTILE in [curve["name"] for data in page.data[1:] for curve in data["curves"]]
    assert page.text.count('alert("x")') >= 8
    assert any(HOSTILE in (video["aria-label"] or "") for video in page.all("video"))


def test_all_videos_are_embedded_byte_for_byte_and_can_be_chosen(run_dir: Path) -> None:
    page = report(run_dir)
    prefix = "data:video/mp4;base64,"
    videos = page.all("video")
    contents = [base64.b64decode((video["src"] or "").removeprefix(prefix)) for video in videos]
    expected = [run_dir / "samples" / f"step_{step:06d}" / "prompt_00.mp4" for step in (0, 10, 20)]
    assert contents == [path.read_bytes() for path in expected]
    assert all({"muted", "loop", "playsinline"} <= set(v) and "controls" not in v for v in videos)
    sound = Sound(torch.zeros(2, 48_000), 48_000)
    write_video(expected[1], torch.zeros(9, 32, 48, 3, dtype=torch.uint8), 8, sound)
    page = report(run_dir)
    tiles = [button for button in page.all("button") if button.get("class") == "tile"]
    assert ["data-sound" in tile for tile in tiles] == [False, True, False]  # heard at full size
    assert "after step 10, with sound" in page.text
    options = [(o["value"], "selected" in o) for o in page.all("option") if "value" in o]
    assert [value for value, _ in options[:3]] == ["film", "two", "slider"], "the filmstrip is the default"
    assert options[3:9] == [
        ("0", True),
        ("10", False),
        ("20", False),
        ("0", False),
        ("10", False),
        ("20", True),
    ]


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
    contents = [base64.b64decode((image["src"] or "").removeprefix(prefix)) for image in images]
    assert contents == [path.read_bytes() for path in paths]
    assert not page.all("video")
    monkeypatch.setattr(samples, "EMBED_LIMIT_BYTES", 1)
    sources = [image["src"] for image in report(run_dir).all("img")]
    assert sources == ["samples/step_000000/prompt_00.png", "samples/step_000020/prompt_00.png"]


def test_what_a_prompt_is_made_from_is_shown_before_its_samples(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_dir / "samples" / "references"
    folder.mkdir()
    for step in (10, 2, 1):
        Image.new("RGB", (9, 9), (step, 0, 0)).save(folder / f"prompt_00_{step}.jpg")
    (folder / "prompt_00_1.html").write_text("<script>window.hit=1</script>")
    (folder / "prompt_07_1.jpg").write_bytes(b"of no prompt that is sampled")
    page = report(run_dir)
    images = [image for image in page.all("img") if HOSTILE in (image["alt"] or "")]
    assert [(image["alt"] or "").split(":")[0] for image in images] == [
        *("reference 1", "reference 2", "reference 3"),
    ]
    paths = [folder / f"prompt_00_{position}.jpg" for position in (1, 2, 10)]
    prefix = "data:image/jpeg;base64,"
    contents = [base64.b64decode((image["src"] or "").removeprefix(prefix)) for image in images]
    assert contents == [path.read_bytes() for path in paths]
    assert page.source.index("reference 3<") < page.source.index('data-step="0"')
    monkeypatch.setattr(samples, "EMBED_LIMIT_BYTES", 1)
    page = report(run_dir)
    assert [image["src"] for image in page.all("img") if "reference" in (image["alt"] or "")] == [
        path.relative_to(run_dir).as_posix() for path in paths
    ]
    assert "6 samples are linked" in page.text
    for path in paths[1:]:
        path.unlink()
    write_video(folder / "prompt_00_1.mp4", torch.zeros(3, 32, 48, 3, dtype=torch.uint8), 8)
    paths[0].unlink()
    labels = [video["aria-label"] or "" for video in report(run_dir).all("video")]
    assert [label.split(":")[0] for label in labels] == [
        *("reference", "before training", "after step 10", "after step 20"),
    ]


def test_videos_beyond_the_limit_are_linked_and_that_is_said(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts base64, and the ends of the run come first: those two fit exactly, the one between does not."""
    ends = [run_dir / "samples" / f"step_{step:06d}" / "prompt_00.mp4" for step in (0, 20)]
    limit = sum(len(base64.b64encode(path.read_bytes())) for path in ends)
    monkeypatch.setattr(samples, "EMBED_LIMIT_BYTES", limit)
    page = report(run_dir)
    sources = [video["src"] or "" for video in page.all("video")]
    assert [source.startswith("data:") for source in sources] == [True, False, True]
    assert sources[1] == "samples/step_000010/prompt_00.mp4"
    assert "1 sample is linked: this page embeds at most" in page.text
    monkeypatch.setattr(samples, "EMBED_LIMIT_BYTES", 1)
    assert "3 samples are linked: this page embeds at most" in report(run_dir).text


def test_a_torn_last_line_is_left_out_and_said(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text(encoding="utf-8")[:-30], encoding="utf-8")
    text = report(run_dir).text
    assert "The last line of metrics.jsonl is incomplete" in text
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
    text = report(run_dir).section("Guard events")
    assert "step 8 non-finite loss stop" in text
    assert "Action stop: stopped the run Samples clips/7.mp4 Micro-step, rank 2, 1" in text
    assert "Seconds 1.93" in text
    assert "offenders: sample: clips/7.mp4; rank: 1; reason: latents hold NaN" in text


def test_what_is_missing_is_said_where_it_is_expected(tmp_path: Path) -> None:
    """A folder with only a recipe gives a page."""
    (tmp_path / "config.yaml").write_text("model: {family: cogvideox, path: x}\ntrain: {steps: 5}\n")
    text = report(tmp_path).text
    for text_part in ("Steps 0 of 5", "No step has been recorded", "No samples", "No guard events"):
        assert text_part in text
    assert "Not recorded: environment.json is missing" in text


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
def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(DitLoraError, match=reason) as error:
        write_report(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert not (tmp_path / "report.html").exists()


def test_the_report_appears_whole_or_not_at_all(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old page stays until the rename, and no temporary file remains."""
    (run_dir / "report.html").write_text("old")
    observed = []

    def replace(source: Path, target: Path) -> None:
        observed.append((target.read_text(encoding="utf-8"), Path(source).read_text(encoding="utf-8")))
        source.rename(target)

    monkeypatch.setattr(os, "replace", replace)
    path = write_report(run_dir)
    [(before, second_text)] = observed
    assert before == "old"
    assert second_text == path.read_text(encoding="utf-8")
    assert second_text.rstrip().endswith("</html>")
    assert not [name for name in os.listdir(run_dir) if "partial" in name]


def test_a_report_that_cannot_be_written_is_one_line(run_dir: Path) -> None:
    (run_dir / "report.html").mkdir()
    with pytest.raises(DitLoraError, match=r"cannot write .*report\.html"):
        write_report(run_dir)
    assert not (run_dir / ".report.html.partial").exists()


def test_the_drawn_timesteps_are_shown_beside_the_losses(run_dir: Path) -> None:
    """Counts of all steps are added up; shares are of all samples."""
    counts = [{"0-49": 1, "950-999": 2}, {"950-999": 3}, {"0-49": 1, "100-149": 3}]
    lines = [metrics_line(step, drawn_by_timestep=counts[step % 3]) for step in range(1, 7)]
    write_lines(run_dir / "metrics.jsonl", lines)
    text = " ".join(report(run_dir).text.split())
    assert "Sampled timesteps share of 20 samples" in text
    section = text[text.index("Sampled timesteps") :]
    for text_part in (
        "0\u201349 20% 4 samples",
        "100\u2013149 30% 6 samples",
        "950\u2013999 50% 10 samples",
    ):
        assert text_part in section


def test_a_chat_models_answers_and_losses_by_media_are_shown(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "samples")
    texts = {0: "", 10: "in between", 20: "<b>a disc</b>"}
    for step, answer in texts.items():
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
    assert "a.mp4 before training (empty answer) during training 1 answer after step 10 in between" in text
    assert "in between after step 20 <b>a disc</b>" in text
    assert "/data" not in text  # a page may be shown to others
    assert "Loss by kind of media, over the run" in text
    assert "Loss by timestep" not in text
