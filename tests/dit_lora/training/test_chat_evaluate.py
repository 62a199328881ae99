"""A chat model is asked as published, resumed without loss, and told apart from its base."""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from tiny_chat_models import mistral
from torch import nn

from dit_lora import families
from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.chat_store import save_chat_adapter
from dit_lora.adapters.groups import parameter_groups
from dit_lora.config import LoraConfig, ModelConfig
from dit_lora.data.chat import mvbench
from dit_lora.data.chat.conversation import Conversation, Kind, Turn
from dit_lora.data.chat.mvbench import Question
from dit_lora.data.chat.rendered import Piece, Rendered
from dit_lora.data.media import MediaFile
from dit_lora.data_config import VideoShape
from dit_lora.errors import DitLoraError, InterruptedRunError
from dit_lora.families.chat_base import Viewing
from dit_lora.training.chat import answering
from dit_lora.training.chat.answering import Answerer, converse, load_answerer, typed
from dit_lora.training.chat.evaluate import (
    PREDICTIONS_FILE,
    EvaluationRequest,
    evaluate,
    evaluate_target,
    told,
)

Say = Callable[[nn.Module, str], str]
HOW = Viewing(frames=4, height=8, width=10)


@dataclass
class Checkpoint:
    """A chat checkpoint that keeps what it was asked, and says what it is told to."""

    path: Path = Path("nowhere")
    fit: Any = "stretch"
    how: Viewing = HOW
    say: Say = lambda model, question: "A"
    asked: list[tuple[Conversation, tuple[float, ...], str]] = field(default_factory=list)
    pixels: list[torch.Tensor | None] = field(default_factory=list)

    def viewing(self, how: Viewing) -> "Checkpoint":
        return replace(self, how=how)

    def shape(self, kind: Kind, height: int, width: int) -> VideoShape:
        return VideoShape(
            self.how.frames if kind == "video" else 1, self.how.height, self.how.width
        )

    def render(
        self,
        conversation: Conversation,
        shape: VideoShape | None,
        seconds: Sequence[float] = (),
        *,
        answered: bool = True,
        prefix: str = "",
    ) -> Rendered:
        assert not answered
        self.asked.append((conversation, tuple(seconds), prefix))
        return Rendered((Piece((7, 9, 11), "fixed"),))

    def answer(
        self, model: nn.Module, rendered: Rendered, pixels: torch.Tensor | None, max_tokens: int
    ) -> str:
        assert torch.is_inference_mode_enabled()
        self.pixels.append(pixels)
        return self.say(model, self.asked[-1][0].turns[-1].question)

    def load_model(self, dtype: torch.dtype) -> nn.Module:
        return mistral().to(dtype)


class Net(nn.Module):
    """A model whose adapter can be seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(3, 3, bias=False)
        config = peft.LoraConfig(target_modules=["q"], init_lora_weights=False)
        peft.inject_adapter_in_model(config, self)

    def is_tuned(self) -> bool:
        x = torch.arange(3.0)
        return not torch.equal(self.q(x), self.q.base_layer(x))


def answerer(say: Say = Checkpoint.say, model: nn.Module | None = None) -> Answerer:
    checkpoint, model = Checkpoint(say=say), model or Net()
    made = {"target": "run", "weights": "abc"}
    return Answerer(checkpoint, model, torch.device("cpu"), torch.float32, made=made)


@pytest.fixture
def questions(shape_clips: Path) -> list[Question]:
    """Two tasks of three and two questions, of 2 and 4 options; the right one is always the second."""
    clips = [MediaFile(path) for path in sorted(shape_clips.glob("*.mp4"))]
    tasks = ("Colours", "Shapes", "Colours", "Shapes", "Colours")
    options = {"Colours": ("red", "green"), "Shapes": ("disc", "square", "star", "none")}
    return [
        Question(task, f"mine/{at}", clips[at], f"Question {at}?", options[task], 1)
        for at, task in enumerate(tasks)
    ]


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
    # Of 9 frames at 8 fps: those in the middle of four parts, cropped at the centre.
    times = (0.0, 0.25, 0.5, 0.875)
    line = json.loads((tmp_path / PREDICTIONS_FILE).read_text().splitlines()[1])
    assert line["seconds"] == list(times)
    expected = mvbench.read_frames_at(questions[1].media, times, height=8, width=10, fit="cover")
    assert torch.equal(pixels, expected)


def test_tiles_are_cut_as_in_training(questions: list[Question], tmp_path: Path) -> None:
    asked = answerer()
    asked.checkpoint.how = Viewing(4, 8, 10, tiles=2)
    evaluate(asked, questions[:1], tmp_path, quiet=True)
    seconds = (0.0, 0.25, 0.5, 0.875)
    size = {"height": 8, "width": 10}
    expected = mvbench.read_frames_at(questions[0].media, seconds, **size, fit="stretch")
    assert torch.equal(asked.checkpoint.pixels[0], expected)


def test_the_part_that_is_asked_about_is_shown(questions: list[Question], tmp_path: Path) -> None:
    part = replace(questions[0], start=0.5, end=0.75)
    evaluate(answerer(), [part], tmp_path, quiet=True)
    line = json.loads((tmp_path / PREDICTIONS_FILE).read_text().splitlines()[1])
    assert line["seconds"] == [0.5, 0.625, 0.625, 0.625]


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


def test_turns_are_one_conversation_about_the_same_frames(questions: list[Question]) -> None:
    asked = replace(answerer(lambda model, question: f"{question}!"), system="Be brief.")
    said = converse(asked, questions[0].media, ["What?", "Why?"], instruction="Look.")
    assert list(said) == ["What?!", "Why?!"]
    (_, _, _), (second, seconds, prefix) = asked.checkpoint.asked
    assert second.turns == (Turn("What?", "What?!", "Look."), Turn("Why?", "", "Look."))
    assert (second.system, prefix, second.kind) == ("Be brief.", "", "video")
    assert seconds == (0.0, 0.25, 0.5, 0.875)
    first, again = asked.checkpoint.pixels
    assert first is again


def test_a_question_may_be_about_nothing_or_an_image(tmp_path: Path, shape_clips: Path) -> None:
    from PIL import Image

    Image.new("RGB", (30, 20), (200, 10, 10)).save(tmp_path / "red.png")
    asked = answerer()
    asked.ask(None, "Hello?")
    asked.ask(MediaFile(tmp_path / "red.png"), "What colour?", history=(Turn("Hi", "Hello"),))
    (text, _, _), (image, seconds, _) = asked.checkpoint.asked
    assert (text.kind, image.kind, seconds) == ("text", "image", ())
    assert [turn.question for turn in image.turns] == ["Hi", "What colour?"]
    assert asked.checkpoint.pixels[0] is None
    assert asked.checkpoint.pixels[1].shape == (1, 3, 8, 10)


def test_typing_ends_with_the_input() -> None:
    lines = iter(["What?", "  ", " Why? "])

    def read(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    assert list(typed(read)) == ["What?", "Why?"]


# --- opening what was trained -----------------------------------------------------------------------------------


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> list[ModelConfig]:
    """A chat family `fake`, whose checkpoints are folders with a file named fake; what was opened."""
    opened: list[ModelConfig] = []

    def open_checkpoint(model: ModelConfig) -> Checkpoint:
        if not (Path(model.path) / "fake").exists():
            raise DitLoraError(f"{model.path} is no fake")
        opened.append(model)
        return Checkpoint(Path(model.path))

    def get_family(name: str) -> Any:
        return (
            SimpleNamespace(open=open_checkpoint) if name == "fake" else families.get_family(name)
        )

    monkeypatch.setattr(answering, "get_family", get_family)
    monkeypatch.setattr(answering, "CHAT_FAMILIES", {"fake": ""})
    return opened


@dataclass
class Trained:
    base: Path
    adapter: Path
    made: dict[str, Any]
    fresh: torch.Tensor
    """Logits of the base."""
    tuned: torch.Tensor


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 5, 9, 33], [1, 60, 2, 7]])).logits


@pytest.fixture
def trained(tmp_path: Path, family: list[ModelConfig]) -> Trained:
    """An adapter with base weights beside it, and its base."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "fake").touch()
    model = mistral().requires_grad_(False).eval()
    fresh = logits(copy.deepcopy(model))
    attach_lora(model, LoraConfig(rank=2), ("q_proj", "down_proj"), seed=0)
    connector = {"connector": ["model.norm.*", "model.layers.0.self_attn.q_proj.*"]}
    parameter_groups(model, adapter=1e-4, connector=1e-4, patterns=connector)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    made = {
        "family": "fake",
        "base_model": "base",
        "viewing": {"frames": 6, "height": 8, "width": 10, "timestamps": False},
        "system": "Be brief.",
    }
    save_chat_adapter(model, tmp_path / "run" / "adapter", made)
    return Trained(base, tmp_path / "run" / "adapter", made, fresh, logits(model))


def test_as_base_is_the_base_bit_for_bit_and_leaves_the_fine_tune_as_it_was(
    trained: Trained,
) -> None:
    found = load_answerer(trained.adapter, str(trained.base))
    assert found.is_tuned
    assert not found.model.training
    assert torch.equal(logits(found.model), trained.tuned)
    assert not torch.equal(trained.tuned, trained.fresh)
    for _ in range(2):
        with found.as_base():
            assert torch.equal(logits(found.model), trained.fresh)
        assert torch.equal(logits(found.model), trained.tuned)
    with pytest.raises(ValueError, match="stop"), found.as_base():
        raise ValueError("stop")
    assert torch.equal(logits(found.model), trained.tuned)


def test_an_adapter_says_how_it_was_trained(trained: Trained) -> None:
    found = load_answerer(trained.adapter, str(trained.base))
    assert found.checkpoint.how == Viewing(6, 8, 10, timestamps=False)
    assert (found.timestamps, found.system) == (False, "Be brief.")
    assert load_answerer(trained.adapter, str(trained.base), frames=3).checkpoint.how.frames == 3
    with pytest.raises(
        DitLoraError, match=r"where its base model \(trained on base\) is; give --model"
    ):
        load_answerer(trained.adapter)


def test_a_retrained_adapter_is_another_model(trained: Trained) -> None:
    before = load_answerer(trained.adapter, str(trained.base)).made
    assert load_answerer(trained.adapter, str(trained.base)).made == before
    model = mistral().requires_grad_(False)
    attach_lora(model, LoraConfig(rank=2), ("q_proj",), seed=0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 1
    save_chat_adapter(model, trained.adapter, trained.made)
    assert load_answerer(trained.adapter, str(trained.base)).made != before


def recipe_text(model: Path) -> str:
    values = {
        "model": {"family": "fake", "path": str(model)},
        "data": {"path": "talk.json", "frames": 5, "height": 8, "width": 10},
        "chat": {"timestamps": False, "system": "Be brief."},
        "train": {"steps": 1},
        "run": {"dir": "run"},
    }
    return json.dumps(values)


def test_a_run_knows_its_base(trained: Trained, family: list[ModelConfig]) -> None:
    run = trained.adapter.parent
    (run / "config.yaml").write_text(recipe_text(trained.base))
    for target in (run, trained.adapter):
        found = load_answerer(target)
        assert torch.equal(logits(found.model), trained.tuned)
        assert found.checkpoint.how == Viewing(5, 8, 10, timestamps=False)
        assert found.system == "Be brief."
        assert family[-1].path == str(trained.base)
    elsewhere = trained.base.rename(trained.base.with_name("elsewhere"))
    load_answerer(run, str(elsewhere))
    assert family[-1].path == str(elsewhere)


def test_a_run_of_the_whole_model_is_opened_itself(
    trained: Trained, family: list[ModelConfig], tmp_path: Path
) -> None:
    run = tmp_path / "full"
    run.mkdir()
    (run / "config.yaml").write_text(recipe_text(trained.base))
    with pytest.raises(DitLoraError, match="holds no result yet"):
        load_answerer(run)
    (run / "model").mkdir()
    (run / "model" / "fake").touch()
    assert not load_answerer(run).is_tuned
    assert family[-1].path == str(run / "model")
    with pytest.raises(DitLoraError, match="--model does not apply"):
        load_answerer(run, "other")


def test_a_checkpoint_is_opened_by_the_family_that_can(trained: Trained, tmp_path: Path) -> None:
    found = load_answerer(trained.base)
    assert not found.is_tuned
    assert found.checkpoint.how == Viewing(4, 8, 10)
    assert torch.equal(logits(found.model), trained.fresh)
    with pytest.raises(
        DitLoraError, match=r"nor a chat model's checkpoint\n  - fake: .* is no fake"
    ):
        load_answerer(tmp_path)


def test_an_adapter_of_a_diffusion_model_is_refused(trained: Trained, tmp_path: Path) -> None:
    model = mistral().requires_grad_(False)
    attach_lora(model, LoraConfig(rank=2), ("q_proj",), seed=0)
    for parameter in model.parameters():
        parameter.data += 1
    save_chat_adapter(model, tmp_path / "other", {"family": "sana", "base_model": "a/b"})
    with pytest.raises(DitLoraError, match="of the family sana, which answers no questions"):
        load_answerer(tmp_path / "other")


def test_a_target_is_evaluated_from_its_folder(
    trained: Trained, questions: list[Question], tmp_path: Path
) -> None:
    (trained.adapter.parent / "config.yaml").write_text(recipe_text(trained.base))
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
    data = tmp_path / "mine.json"
    data.write_text(json.dumps([*records, {**records[0], "answer": "blue"}]))
    request = EvaluationRequest(trained.adapter.parent, data, clips, against_base=True, limit=2)
    with pytest.raises(DitLoraError, match=r"--skip\n  - mine/5: its answer 'blue'"):
        evaluate_target(request, quiet=True)
    found = evaluate_target(replace(request, skip=True), quiet=True)
    assert found.out == trained.adapter.parent / "evaluation_mine"
    assert found.results["all"]["questions"] == 2
    assert list(found.results["left_out"]) == ["mine/5"]
    assert found.results["setting"]["viewing"]["frames"] == 5  # as trained
