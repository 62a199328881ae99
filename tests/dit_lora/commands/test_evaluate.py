"""A chat model is asked as published, resumed without loss, and told apart from its base."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_chat import Say, answerer, questions_about
from torch import nn

from dit_lora.commands import evaluate as evaluation
from dit_lora.commands.evaluate import (
    PREDICTIONS_FILE,
    EvaluationRequest,
    evaluate,
    evaluate_target,
    told,
)
from dit_lora.data.chat import mvbench
from dit_lora.data.chat.mvbench import Question
from dit_lora.data.media.media import MediaFile
from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.families.chat_base import Viewing


@pytest.fixture
def questions(shape_clips: Path) -> list[Question]:
    return questions_about(shape_clips)


def scripted(tuned: str, base: str) -> Say:
    """The letter said to question n, with the adapter and without; `-` names none."""

    def say(model: nn.Module, question: str) -> str:
        at = int(question.partition("Question ")[2].partition("?")[0])
        return (tuned if getattr(model, "is_tuned", lambda: True)() else base)[at] + ") indeed"

    return say


def test_accuracies_and_pairs_are_counted(questions: list[Question], tmp_path: Path) -> None:
    asked = answerer(scripted("BBA-B", "ABBDB"))
    found = evaluate(asked, questions, tmp_path, against_base=True, quiet=True)
    colours, shapes = found.results["tasks"]
    assert (colours["task"], shapes["task"]) == ("Colours", "Shapes")
    assert (colours["questions"], colours["right"], colours["chance"]) == (3, 2, 0.5)
    assert colours["accuracy"] == pytest.approx(2 / 3)
    assert colours["base"]["accuracy"] == pytest.approx(2 / 3)
    assert (colours["only_tuned"], colours["only_base"]) == (1, 1)
    assert (shapes["accuracy"], shapes["base"]["accuracy"], shapes["chance"]) == (0.5, 0.5, 0.25)
    assert (shapes["unnamed"], shapes["base"]["unnamed"]) == (1, 0)
    total, average = found.results["all"], found.results["average"]
    assert total["accuracy"] == total["accuracy_read"] == 3 / 5
    assert average["accuracy"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert average["chance"] == pytest.approx((0.5 + 0.25) / 2)
    assert json.loads((tmp_path / "results.json").read_text()) == found.results
    lines = told(found.results)
    assert lines[1].split() == ["Colours", "3", "66.7%", "66.7%", "+0.0"]
    assert lines[4].split() == ["mean", "of", "tasks", "58.3%", "58.3%", "+0.0"]
    assert lines[5] == "right only with the fine-tune: 1; only without: 1"
    assert lines[6] == "chance 37.5%; no option named: 1"
    assert asked.model.is_tuned()


def test_without_a_base_nothing_is_said_of_one(questions: list[Question], tmp_path: Path) -> None:
    found = evaluate(answerer(scripted("BBBBB", "")), questions, tmp_path, quiet=True)
    assert found.results["average"]["accuracy"] == 1
    assert "base" not in found.results["all"]
    assert told(found.results)[0].split() == ["questions", "accuracy"]


def test_questions_are_asked_as_published(questions: list[Question], tmp_path: Path) -> None:
    asked = replace(answerer(), system="Be brief.")
    evaluate(asked, questions[1:2], tmp_path, quiet=True)
    ((conversation, seconds, prefix),) = asked.checkpoint.asked
    (turn,) = conversation.turns
    assert turn.question == mvbench.prompt(questions[1])
    assert (turn.instruction, prefix) == (mvbench.SYSTEM, "Best option:(")
    assert (conversation.system, seconds, conversation.kind) == ("", (), "video")
    (pixels,) = asked.checkpoint.pixels
    # Of 9 frames at 8 fps: the notebook's four, cropped at the centre.
    times = (0.125, 0.375, 0.625, 0.875)
    line = json.loads((tmp_path / PREDICTIONS_FILE).read_text().splitlines()[1])
    assert line["seconds"] == list(times)
    expected = mvbench.read_frames_at(questions[1].media, times, height=8, width=10, fit="cover")
    assert torch.equal(pixels, expected)


def test_questions_are_asked_as_trained(questions: list[Question], tmp_path: Path) -> None:
    asked = replace(answerer(), system="Be brief.")
    asked.checkpoint.how = Viewing(4, 8, 10, timestamps=True)
    evaluate(asked, questions[1:2], tmp_path, protocol="trained", quiet=True)
    ((conversation, seconds, prefix),) = asked.checkpoint.asked
    times = (0.0, 0.25, 0.5, 0.875)  # in the middle of four parts
    assert (conversation.system, seconds, prefix) == ("Be brief.", times, "Best option:(")
    expected = mvbench.read_frames_at(questions[1].media, times, height=8, width=10, fit="stretch")
    assert torch.equal(asked.checkpoint.pixels[0], expected)
    with pytest.raises(DitLoraError, match="protocol: 'trained', now 'notebook'"):
        evaluate(asked, questions[1:2], tmp_path, quiet=True)


def test_a_model_that_is_always_told_the_times_is_told_them(
    questions: list[Question], tmp_path: Path
) -> None:
    asked = answerer()
    asked.checkpoint.timed = True
    evaluate(asked, questions[:1], tmp_path, quiet=True)
    assert asked.checkpoint.asked[0][1] == (0.125, 0.375, 0.625, 0.875)


def test_tiles_are_cut_as_in_training(questions: list[Question], tmp_path: Path) -> None:
    asked = answerer()
    asked.checkpoint.how = Viewing(4, 8, 10, tiles=2)
    evaluate(asked, questions[:1], tmp_path, quiet=True)
    seconds = (0.125, 0.375, 0.625, 0.875)
    size = {"height": 8, "width": 10}
    expected = mvbench.read_frames_at(questions[0].media, seconds, **size, fit="stretch")
    assert torch.equal(asked.checkpoint.pixels[0], expected)


def test_the_part_that_is_asked_about_is_shown(questions: list[Question], tmp_path: Path) -> None:
    part = replace(questions[0], start=0.5, end=0.75)
    evaluate(answerer(), [part], tmp_path, quiet=True)
    line = json.loads((tmp_path / PREDICTIONS_FILE).read_text().splitlines()[1])
    assert line["seconds"] == [0.5, 0.5, 0.625, 0.75]


def test_a_bad_clip_is_one_failed_question_that_is_asked_again(
    questions: list[Question], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"no video")
    late = replace(questions[2], start=50.0, end=60.0)
    asked = [questions[0], replace(questions[1], media=MediaFile(bad)), late]
    out = tmp_path / "out"
    found = evaluate(answerer(scripted("BBB", "BBB")), asked, out, against_base=True, quiet=True)
    total = found.results["all"]
    assert (total["failed"], total["accuracy"], total["accuracy_read"]) == (2, 1 / 3, 1.0)
    shapes = found.results["tasks"][1]
    assert (shapes["accuracy"], shapes["accuracy_read"]) == (0.0, None)
    assert shapes["base"]["accuracy"] == 0.0
    assert str(bad) in found.predictions[1]["failed"]
    assert "nothing lies between" in found.predictions[2]["failed"]
    assert (
        "could not be read, and counts as wrong: 2; of the others 100.0%" in told(found.results)[-1]
    )
    bad.write_bytes(questions[1].media.source().read_bytes())
    again = answerer(scripted("BBB", "BBB"))
    found = evaluate(again, asked, out, against_base=True, quiet=True)
    assert found.results["all"]["failed"] == 1
    assert len(again.checkpoint.pixels) == 2  # with and without the adapter


def test_an_interrupted_evaluation_goes_on_where_it_stopped(
    questions: list[Question], tmp_path: Path
) -> None:
    say, calls = scripted("BABAB", "AAAAA"), iter(range(100))

    def stops(model: nn.Module, question: str) -> str:
        if next(calls) == 5:  # between the answers of the third question
            raise KeyboardInterrupt
        return say(model, question)

    with pytest.raises(InterruptedRunError, match="2 of 5 questions are answered and kept") as stop:
        evaluate(answerer(stops), questions, tmp_path / "a", against_base=True, quiet=True)
    assert stop.value.exit_code == 130
    book = tmp_path / "a" / PREDICTIONS_FILE
    whole = book.read_bytes()
    book.write_bytes(whole + b'{"key": "torn by a ki')
    second = answerer(say)
    resumed = evaluate(second, questions, tmp_path / "a", against_base=True, quiet=True)
    assert len(second.checkpoint.asked) == 2 * 3
    assert book.read_bytes().startswith(whole)
    at_once = evaluate(answerer(say), questions, tmp_path / "b", against_base=True, quiet=True)
    assert resumed.results == at_once.results
    assert resumed.predictions == at_once.predictions
    third = answerer(say)
    evaluate(third, questions, tmp_path / "a", against_base=True, quiet=True)
    assert not third.checkpoint.asked


def test_more_questions_or_changed_ones_are_asked_and_others_are_not(
    questions: list[Question], tmp_path: Path
) -> None:
    evaluate(answerer(), questions[:3], tmp_path, quiet=True)
    changed = [replace(questions[0], answer=0), *questions[1:4]]
    second = answerer()
    found = evaluate(second, changed, tmp_path, quiet=True)
    assert len(second.checkpoint.asked) == 2
    assert [one["right"] for one in found.predictions] == [True, False, False, False]


def test_answers_of_another_model_are_not_mixed_in(
    questions: list[Question], tmp_path: Path
) -> None:
    evaluate(answerer(), questions[:1], tmp_path, quiet=True)
    other = replace(answerer(), made={"target": "run", "weights": "def"})
    with pytest.raises(DitLoraError, match="weights: 'abc', now 'def'"):
        evaluate(other, questions[:1], tmp_path, quiet=True)
    with pytest.raises(DitLoraError, match="against_base: False, now True"):
        evaluate(answerer(), questions[:1], tmp_path, against_base=True, quiet=True)


def test_a_base_is_not_compared_with_itself(questions: list[Question], tmp_path: Path) -> None:
    with pytest.raises(DitLoraError, match="needs an adapter"):
        evaluate(answerer(model=nn.Linear(1, 1)), questions, tmp_path, against_base=True)


def test_a_target_is_evaluated_from_its_folder(
    questions: list[Question], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, str | None, int | None]] = []

    def load(target: Path, model: str | None, *, frames: int | None) -> object:
        asked.append((target, model, frames))
        return answerer()

    monkeypatch.setattr(evaluation, "load_answerer", load)
    records = [
        {
            "video": Path(one.media.name).name,
            "question": one.question,
            "candidates": list(one.candidates),
            "answer": one.candidates[1],
        }
        for one in questions
    ]
    clips = Path(questions[0].media.name).parent
    data, run = tmp_path / "mine.json", tmp_path / "run"
    data.write_text(json.dumps([*records, {**records[0], "answer": "blue"}]))
    run.mkdir()
    (run / "config.yaml").touch()
    request = EvaluationRequest(run, data, clips, model="base", against_base=True, limit=2)
    with pytest.raises(DitLoraError, match=r"--skip\n  - mine/5: its answer 'blue'"):
        evaluate_target(request, quiet=True)
    assert not asked
    found = evaluate_target(replace(request, skip=True), quiet=True)
    assert asked == [(run, "base", None)]  # as many frames as trained
    assert found.out == run / "evaluation_mine"
    assert found.results["all"]["questions"] == 2
    assert found.results["setting"]["protocol"] == "trained"
    assert "base" in found.results["all"]
    assert list(found.results["left_out"]) == ["mine/5"]


def test_mvbench_is_asked_with_its_number_of_frames(
    questions: list[Question], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr(
        evaluation,
        "load_answerer",
        lambda target, model, *, frames: kept.append(frames) or answerer(),
    )
    clip = Path(questions[0].media.name)
    videos = tmp_path / "video" / "clevrer" / "video_validation"
    videos.mkdir(parents=True)
    (videos / clip.name).write_bytes(clip.read_bytes())
    (tmp_path / "json").mkdir()
    record = {"video": clip.name, "question": "What?", "candidates": ["x", "y"], "answer": "x"}
    (tmp_path / "json" / "moving_count.json").write_text(json.dumps([record]))
    request = EvaluationRequest(Path("nowhere"), tmp_path, out=tmp_path / "out")
    results = evaluate_target(request, quiet=True).results
    assert results["tasks"][0]["task"] == "Moving Count"
    assert results["setting"]["protocol"] == "notebook"
    evaluate_target(replace(request, frames=8), quiet=True)
    assert kept == [16, 8]
