"""The evaluation's page shows accuracies and wrong answers, stays small, and trusts nothing it was given."""

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from html_page import Page
from PIL import Image, ImageChops

from dit_lora.data.chat.mvbench import Question
from dit_lora.data.media.media import MediaFile
from dit_lora.errors import DitLoraError
from dit_lora.report.evaluation_page import CARDS, write_evaluation_page

HOSTILE = '<script>alert("x")</script> & a cat'


def line(named: Sequence[int], base: Sequence[int] | None = None, **more: Any) -> dict[str, Any]:
    """A prediction; the right option is always the second."""
    found = {
        "said": f"said {named}",
        "named": list(named),
        "right": 1 in named,
        "seconds": [0.0, 0.5],
    }
    if base is not None:
        found["base"] = {"said": f"base {base}", "named": list(base), "right": 1 in base}
    return found | more


def counts(right: int, of: int, base: int | None = None, **more: Any) -> dict[str, Any]:
    found = {
        "questions": of,
        "right": right,
        "accuracy": right / of,
        "accuracy_read": right / of,
        "chance": 0.25,
        "unnamed": 0,
        "failed": 0,
    }
    if base is not None:
        found["base"] = {"accuracy": base / of, "right": base, "unnamed": 0}
        found |= {"only_tuned": 3, "only_base": 2}
    return found | more


def results(*tasks: dict[str, Any], base: bool = True, **more: Any) -> dict[str, Any]:
    named = [{"task": f"Task {at}", **one} for at, one in enumerate(tasks)]
    average: dict[str, Any] = {"accuracy": 0.625, "chance": 0.25}
    if base:
        average["base"] = {"accuracy": 0.5}
    viewing = {"frames": 16, "height": 224, "width": 320}
    setting = {
        "target": "runs/mine",
        "family": "videochat2",
        "dtype": "torch.bfloat16",
        "viewing": viewing,
    }
    total = counts(13, 20, 10 if base else None)
    found = {"setting": setting, "average": average, "all": total, "tasks": named, "left_out": {}}
    return found | more


def write(
    folder: Path, found: dict[str, Any], questions: Any, predictions: Any, **more: Any
) -> Page:
    path = folder / "evaluation.html"
    given = {"title": "mine", **more}
    assert write_evaluation_page(path, found, questions, predictions, **given) == path
    return Page(path)


@pytest.fixture
def question(shape_clips: Path) -> Question:
    clip = sorted(shape_clips.glob("*.mp4"))[0]
    return Question(
        "Task 0", "mine/0", MediaFile(clip), "What moved?", ("a cat", "a disc", "air"), 1
    )


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path, question: Question) -> None:
    page = write(tmp_path, results(counts(1, 2, 1)), [question], [line([0], [1])])
    addresses = [
        value or ""
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "href", "srcset", "poster", "action", "data")
    ]
    assert len(addresses) == 2
    assert all(address.startswith("data:") for address in addresses)
    assert not page.all("script")
    assert "@import" not in page.source
    assert "url(" not in page.source
    policy = [tag["content"] for tag in page.all("meta") if "http-equiv" in tag]
    assert (policy[0] or "").startswith("default-src 'none'")
    assert "prefers-color-scheme: dark" in page.source


def test_everything_from_the_data_is_escaped(tmp_path: Path, question: Question) -> None:
    asked = replace(question, task=HOSTILE, id=HOSTILE, question=HOSTILE, candidates=(HOSTILE, "b"))
    said = line([0], [1], said=HOSTILE)
    said["base"]["said"] = HOSTILE
    found = results(counts(1, 2, 1, task=HOSTILE), left_out={HOSTILE: HOSTILE})
    found["setting"]["target"] = HOSTILE
    failed = {"failed": HOSTILE}
    page = write(tmp_path, found, [asked, asked], [said, failed], title=HOSTILE)
    assert "<script" not in page.source
    assert page.source.count("&lt;script&gt;") >= 13


def test_each_task_has_a_bar_with_and_without_the_fine_tune_and_chance(
    tmp_path: Path, question: Question
) -> None:
    found = results(counts(6, 8, 2), counts(1, 8, 4, unnamed=5, failed=1, chance=1 / 3))
    page = write(tmp_path, found, [], [])
    labels = [one["aria-label"] for one in page.all("div") if "aria-label" in one]
    assert labels == [
        "Task 0: 75.0%, without the fine-tune 25.0%, chance 25.0%",
        "Task 1: 12.5%, without the fine-tune 50.0%, chance 33.3%",
        "Mean of tasks: 62.5%, without the fine-tune 50.0%, chance 25.0%",
    ]
    styles = [one["style"] for _, one in page.tags if "style" in one]
    assert styles[:6] == [
        "width: 75.00%",
        "width: 25.00%",
        "left: 25.00%",
        "width: 12.50%",
        "width: 50.00%",
        "left: 33.33%",
    ]
    assert "75.0% +50.0" in page.text
    assert "12.5% -37.5" in page.text
    assert "Task 1 8 3 2 5 1" in page.text
    assert "62.5% mean of 2 tasks; chance 25.0%" in page.text
    assert "Right only with it 3 only without it: 2" in page.text
    assert "runs/mine" in page.section("Setting")
    assert "224 x 320" in page.section("Setting")


def test_without_a_base_there_is_one_bar_a_task(tmp_path: Path) -> None:
    page = write(tmp_path, results(counts(6, 8), base=False), [], [])
    assert page.source.count("fill base") == 0
    assert "without" not in page.text.partition("Setting")[0]


def test_wrong_answers_are_shown_with_their_frames(tmp_path: Path, question: Question) -> None:
    lines = [line([0], [1]), line([1], [0]), line([], [2]), line([2], [0])]
    asked = [replace(question, id=f"mine/{at}") for at in range(4)]
    asked[0] = replace(asked[0], start=0.25, end=1.0)
    page = write(tmp_path, results(counts(1, 4, 1)), asked, lines)
    lost = page.section('Right only without the fine-tune <span class="count">1 question</span>')
    assert "mine/0 · 0.25 to 1 s" in lost
    assert "What moved?" in lost
    assert "(A) a cat chosen (B) a disc right · chosen without the fine-tune (C) air" in lost
    assert "said said [0]" in lost
    assert "mine/2" in page.section('No option named <span class="count">1 question</span>')
    assert "mine/3" in page.section('Wrong <span class="count">1 question</span>')
    assert "mine/1" not in page.text
    pictures = [one["src"] or "" for one in page.all("img")]
    assert len(pictures) == 3
    with Image.open(io.BytesIO(base64.b64decode(pictures[0].partition(",")[2]))) as picture:
        assert picture.size == (2 * 144, 96)  # two frames of 64x96
        # The disc moves: the second frame is another, beyond what JPEG does to the first.
        left, right = picture.crop((0, 0, 144, 96)), picture.crop((144, 0, 288, 96))
        extremes = ImageChops.difference(left, right).getextrema()
        assert max(highest for _, highest in extremes) > 100


def test_what_could_not_be_read_is_named(tmp_path: Path, question: Question) -> None:
    gone = replace(question, id="mine/1", media=MediaFile(tmp_path / "gone.mp4"))
    lines = [{"failed": "no moov atom"}, line([0], [2])]
    left_out = {f"mine/{at}": "its answer is not among its candidates" for at in range(60)}
    found = results(counts(0, 2, 0, failed=1), left_out=left_out)
    page = write(tmp_path, found, [question, gone], lines)
    assert "mine/0 no moov atom" in page.text
    assert "no picture" in page.section('Wrong <span class="count">1 question</span>')
    assert "mine/49 its answer" in page.text
    assert "mine/50" not in page.text
    assert "10 more are in results.json" in page.text


def test_the_worst_task_comes_first_and_the_page_stays_small(
    tmp_path: Path, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    monkeypatch.setattr(
        "dit_lora.report.evaluation_page._strip", lambda *given: reads.append(given) or b"x"
    )
    asked = [replace(question, task=f"Task {at % 2}", id=f"mine/{at}") for at in range(200)]
    found = results(counts(50, 100, 50), counts(20, 100, 50))
    page = write(tmp_path, found, asked, [line([0], [1])] * 60 + [line([0], [0])] * 140)
    cards = re.findall(r"<bdi>(mine/\d+)</bdi>", page.source)
    assert len(cards) == len(reads) == CARDS
    assert cards[:3] == ["mine/1", "mine/0", "mine/3"]
    assert "44 more are not shown" in page.text  # a third of the room for the lost ones
    assert "108 more are not shown" in page.text


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DitLoraError, match="cannot write"):
        write_evaluation_page(
            tmp_path / "file" / "x.html", results(counts(1, 2, 1)), [], [], title=""
        )
