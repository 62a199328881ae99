"""MVBench's folders and one's own questions: read whole, judged as published."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dit_lora.data.chat.frames import frame_seconds
from dit_lora.data.chat.mvbench import (
    SYSTEM,
    TASKS,
    FrameFolder,
    at_most,
    named_options,
    notebook_seconds,
    prompt,
    read_facts,
    read_frames_at,
    read_questions,
)
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import ClipError
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.errors import DitLoraError

GOOD: dict[str, Any] = {
    "video": "a.mp4",
    "question": "What moved?",
    "candidates": ["The cube.", "The ball.", "Nothing."],
    "answer": "The ball.",
}


def touched(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def written(path: Path, records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def benchmark(root: Path) -> Path:
    """Three tasks: a plain one, a bounded one, and one of folders of frames."""
    bounded = {**GOOD, "start": 1.5, "end": 4}
    written(root / "json" / "moving_count.json", [GOOD, {**GOOD, "start": 1.5, "end": 4}])
    written(root / "json" / "action_sequence.json", [bounded, {**bounded, "video": "b.mp4"}])
    written(root / "json" / "episodic_reasoning.json", [{**bounded, "video": "s01", "fps": 3}])
    touched(root / "video/clevrer/video_validation/a.mp4")
    touched(root / "video/star/Charades_v1_480/a.mp4")
    touched(root / "video/data0613/star/Charades_v1_480/b.mp4")
    touched(root / "video/tvqa/frames_fps3_hq/s01/00001.jpg")
    return root


def test_mvbenchs_layout_is_read_in_the_order_of_its_table(tmp_path: Path) -> None:
    found = read_questions(benchmark(tmp_path))
    assert not found.problems
    assert [(one.task, one.id) for one in found.all] == [
        ("Action Sequence", "action_sequence/0"),
        ("Action Sequence", "action_sequence/1"),
        ("Moving Count", "moving_count/0"),
        ("Moving Count", "moving_count/1"),
        ("Episodic Reasoning", "episodic_reasoning/0"),
    ]
    video = tmp_path / "video"
    assert [one.media for one in found.all] == [
        MediaFile(video / "star/Charades_v1_480/a.mp4"),
        MediaFile(video / "data0613/star/Charades_v1_480/b.mp4"),
        MediaFile(video / "clevrer/video_validation/a.mp4"),
        MediaFile(video / "clevrer/video_validation/a.mp4"),
        FrameFolder(video / "tvqa/frames_fps3_hq/s01", 3.0),
    ]
    # Only five of the tasks are about a part of their videos, whatever the records say.
    assert [(one.start, one.end) for one in found.all] == [
        (1.5, 4.0),
        (1.5, 4.0),
        (None, None),
        (None, None),
        (1.5, 4.0),
    ]
    assert {one.answer for one in found.all} == {1}


def test_the_table_is_the_published_one() -> None:
    assert len(TASKS) == 20
    bounded = {name for name, task in TASKS.items() if task.bounded}
    assert bounded == {
        "Action Sequence",
        "Action Prediction",
        "Object Interaction",
        "Action Localization",
        "Episodic Reasoning",
    }
    assert [name for name, task in TASKS.items() if task.frames] == ["Episodic Reasoning"]


def test_everything_that_is_wrong_is_listed(tmp_path: Path) -> None:
    records: list[Any] = [
        GOOD,
        {**GOOD, "video": "gone.mp4", "answer": "The sky.", "question": " "},
        {**GOOD, "candidates": ["The ball."]},
        {**GOOD, "video": "../a.mp4"},
        {**GOOD, "start": 4, "end": 1},
        {**GOOD, "task": 3},
        "no record",
        {**GOOD, "candidates": ["x"] * 27},
        {**GOOD, "start": float("nan"), "end": 2},
        {**GOOD, "video": str(tmp_path / "a.mp4")},
    ]
    touched(tmp_path / "a.mp4")
    found = read_questions(written(tmp_path / "mine.json", records))
    assert [one.id for one in found.all] == ["mine/0"]
    words = {one.file: one.words for one in found.problems}
    assert list(words) == [f"mine/{at}" for at in range(1, 10)]
    assert f"{tmp_path / 'gone.mp4'} is missing" in words["mine/1"]
    assert "'The sky.' is not among its candidates" in words["mine/1"]
    assert "question is missing or empty" in words["mine/1"]
    assert "2 to 26 candidates; got 1" in words["mine/2"]
    assert "leads out of the folder" in words["mine/3"]
    assert "leads out of the folder" in words["mine/9"]
    assert "start first; got 4 and 1" in words["mine/4"]
    assert "its task must be a name; got 3" in words["mine/5"]
    assert "of type str" in words["mine/6"]
    assert "got 27" in words["mine/7"]
    assert "got nan and 2" in words["mine/8"]


def test_a_tasks_missing_folder_is_one_problem(tmp_path: Path) -> None:
    root = benchmark(tmp_path)
    written(root / "json" / "fine_grained_pose.json", [GOOD] * 200)
    written(root / "json" / "mine.json", [GOOD])
    found = read_questions(root)
    assert len(found.all) == 5
    (pose, unknown) = found.problems
    assert pose.words == (
        f"Fine-grained Pose: 200 questions, but there is no folder {root / 'video/nturgbd'}"
    )
    assert unknown.file == "json/mine.json"


def test_ones_own_file_may_name_tasks_images_and_parts(tmp_path: Path) -> None:
    records = [
        {**GOOD, "task": "Colours", "start": 0, "end": 2.5},
        {**GOOD, "video": None, "image": "b.png", "candidates": [1, 2], "answer": 2},
    ]
    records[1].pop("video")
    path = tmp_path / "questions" / "mine.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    media = touched(tmp_path / "clips" / "a.mp4").parent
    touched(media / "b.png")
    first, second = read_questions(path, media).all
    assert (first.task, first.start, first.end) == ("Colours", 0.0, 2.5)
    assert second.task == "mine"
    assert second.media == MediaFile(media / "b.png")
    assert (second.candidates, second.answer) == (("1", "2"), 1)


def test_of_equal_candidates_the_last_is_the_answer(tmp_path: Path) -> None:
    touched(tmp_path / "a.mp4")
    record = {**GOOD, "candidates": ["x", "y", "x"], "answer": "x"}
    (one,) = read_questions(written(tmp_path / "mine.json", [record])).all
    assert one.answer == 2


@pytest.mark.parametrize("text", ["{}", "[]", "[1"])
def test_what_is_no_list_of_questions_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(DitLoraError, match=r"mine\.json (must hold a list|is not valid JSON)"):
        read_questions(path)
    with pytest.raises(DitLoraError, match="holds no json"):
        read_questions(tmp_path)


def test_the_prompt_is_the_published_one(tmp_path: Path) -> None:
    found = read_questions(benchmark(tmp_path)).all
    assert prompt(found[0]) == (
        "Carefully watch the video and pay attention to the cause and sequence of events, the detail and movement "
        "of objects, and the action and pose of persons. Based on your observations, select the best option that "
        "accurately addresses the question.\n"
        "Question: What moved?\nOptions:\n(A) The cube.\n(B) The ball.\n(C) Nothing.\n"
        "Only give the best option."
    )
    assert prompt(found[0]).startswith(SYSTEM)


# What the notebook's check_ans says of "(" + answer for each option, worked out by hand.
@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("B) The ball.", (1,)),
        ("b", (1,)),
        (" B) The ball.\n(A) The cube.", (1,)),
        ("\n\nC.", (2,)),
        ("C.) Nothing", (2,)),
        ("(A) The cube", (0,)),
        ("A)/(B)", (0, 1)),
        ("A)The cube", (0,)),
        ("D) Something else", ()),
        ("AB)", ()),
        ("The ball.", ()),
        ("Best option: (B)", ()),
        # The notebook takes these for every option; they name none.
        ("", ()),
        (" ", ()),
        (".", ()),
    ],
)
def test_answers_are_judged_as_published(said: str, named: tuple[int, ...]) -> None:
    assert named_options(said, 3) == named


def test_a_limit_holds_for_each_task(tmp_path: Path) -> None:
    found = read_questions(benchmark(tmp_path)).all
    assert [one.id for one in at_most(found, 1)] == [
        "action_sequence/0",
        "moving_count/0",
        "episodic_reasoning/0",
    ]
    assert at_most(found, None) == found


def test_a_folder_of_frames_is_a_video(tmp_path: Path) -> None:
    folder = tmp_path / "s01"
    folder.mkdir()
    for number in range(1, 8):  # written in another order than their names'
        Image.new("RGB", (40, 30), (8 - number) * 30).save(folder / f"{8 - number:05d}.png")
    video = FrameFolder(folder, 3.0)
    facts = read_facts(video)
    assert (facts.fps, facts.frames, facts.height, facts.width) == (3.0, 7, 30, 40)
    assert facts.seconds == pytest.approx(7 / 3)
    seconds = (0.0, 1 / 3, 4 / 3, 99.0)
    pixels = read_frames_at(video, seconds, height=6, width=8, fit="cover")
    assert pixels.shape == (4, 3, 6, 8)
    assert pixels.dtype == torch.uint8
    assert [frame[0].unique().item() // 30 for frame in pixels] == [1, 1, 4, 7]


def test_an_empty_folder_of_frames_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClipError, match="holds no images"):
        read_facts(FrameFolder(tmp_path, 3.0))


def test_frames_are_the_notebooks() -> None:
    """`get_index` of mvbench.ipynb, written out: bounds rounded to frames, the last frame inside."""
    rng, other = random.Random(0), 0
    for _ in range(300):
        frames, fps = rng.randint(1, 400), rng.choice([3.0, 8.0, 23.976, 25.0, 30.0])
        first, count = rng.choice([0, 1]), rng.choice([8, 16])
        start = rng.uniform(0, frames / fps) if rng.random() < 0.5 else None
        end = None if start is None else start + rng.uniform(0.1, 20)
        begin = max(first, round((-100000 if start is None else start) * fps))
        stop = min(round((100000 if end is None else end) * fps), frames - 1 + first)
        header = VideoHeader(fps, frames / fps, frames, 8, 8)
        if stop < begin:
            with pytest.raises(ClipError, match="nothing lies between"):
                notebook_seconds(header, count, start=start, end=end, first=first)
            continue
        part = float(stop - begin) / count
        expected = [int(begin + part / 2 + np.round(part * at)) for at in range(count)]
        found = notebook_seconds(header, count, start=start, end=end, first=first)
        assert [round(second * fps) for second in found] == expected
        assert found == tuple(sorted(found))
        assert first <= min(expected) <= max(expected) <= frames - 1 + first
        if start is None and not first:
            middle = frame_seconds(frames / fps, fps, count)
            other += [round(second * fps) for second in middle] != expected
    assert other > 20  # not the ones that training takes
