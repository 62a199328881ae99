"""A chat model is opened from what was trained, and holds a conversation."""

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_chat import Checkpoint, answerer
from tiny_chat_models import mistral
from torch import nn

from dit_lora import families
from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import parameter_groups
from dit_lora.adapters.peft_format import save_chat_adapter
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.data.chat.conversation import Turn
from dit_lora.data.media.media import MediaFile
from dit_lora.errors import DitLoraError
from dit_lora.families.chat_base import VisionSettings
from dit_lora.training.tasks.chat import answerer as answering
from dit_lora.training.tasks.chat.answerer import answer_prompts, load_answerer, read_prompts


def test_turns_are_one_conversation_about_the_same_frames(shape_clips: Path) -> None:
    clip = MediaFile(min(shape_clips.glob("*.mp4")))
    tested_answerer = replace(answerer(lambda model, question: f"{question}!"), system="Be brief.")
    answers = answer_prompts(tested_answerer, clip, ["What?", "Why?"], instruction="Look.")
    assert list(answers) == ["What?!", "Why?!"]
    _, (second, seconds) = tested_answerer.checkpoint.asked
    assert second.turns == (Turn("What?", "What?!", "Look."), Turn("Why?", "", "Look."))
    assert (second.system, second.kind) == ("Be brief.", "video")
    assert seconds == (0.0, 0.25, 0.5, 0.875)
    first_pixels, second_pixels = tested_answerer.checkpoint.pixels
    assert first_pixels is second_pixels


def test_a_question_may_be_about_nothing_or_an_image(tmp_path: Path, shape_clips: Path) -> None:
    from PIL import Image

    Image.new("RGB", (30, 20), (200, 10, 10)).save(tmp_path / "red.png")
    tested_answerer = answerer()
    tested_answerer.answer_question(None, "Hello?")
    tested_answerer.answer_question(MediaFile(tmp_path / "red.png"), "What colour?", history=(Turn("Hi", "Hello"),))
    (text, _), (image, seconds) = tested_answerer.checkpoint.asked
    assert (text.kind, image.kind, seconds) == ("text", "image", ())
    assert [turn.question for turn in image.turns] == ["Hi", "What colour?"]
    assert tested_answerer.checkpoint.pixels[0] is None
    assert tested_answerer.checkpoint.pixels[1].shape == (1, 3, 8, 10)


def test_typing_ends_with_the_input() -> None:
    lines = iter(["What?", "  ", " Why? "])

    def read(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    assert list(read_prompts(read)) == ["What?", "Why?"]


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
        return SimpleNamespace(open=open_checkpoint) if name == "fake" else families.get_family(name)

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
    """An adapter with base weights next to it, and its base."""
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
    metadata = {
        "family": "fake",
        "base_model": "base",
        "viewing": {"frames": 6, "height": 8, "width": 10, "timestamps": False},
        "system": "Be brief.",
    }
    save_chat_adapter(model, tmp_path / "run" / "adapter", metadata)
    return Trained(base, tmp_path / "run" / "adapter", metadata, fresh, logits(model))


def test_the_fine_tune_is_loaded_bit_for_bit(trained: Trained) -> None:
    loaded = load_answerer(trained.adapter, str(trained.base))
    assert not loaded.model.training
    assert torch.equal(logits(loaded.model), trained.tuned)
    assert not torch.equal(trained.tuned, trained.fresh)


def test_an_adapter_says_how_it_was_trained(trained: Trained) -> None:
    loaded = load_answerer(trained.adapter, str(trained.base))
    assert loaded.checkpoint.vision_settings == VisionSettings(6, 8, 10, timestamps=False)
    assert loaded.system == "Be brief."
    assert load_answerer(trained.adapter, str(trained.base), frames=3).checkpoint.vision_settings.frames == 3
    with pytest.raises(DitLoraError, match=r"does not name its base model \(trained on base\); give --model"):
        load_answerer(trained.adapter)


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
        loaded = load_answerer(target)
        assert torch.equal(logits(loaded.model), trained.tuned)
        assert loaded.checkpoint.vision_settings == VisionSettings(5, 8, 10, timestamps=False)
        assert loaded.system == "Be brief."
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
    with pytest.raises(DitLoraError, match="has no result yet"):
        load_answerer(run)
    (run / "model").mkdir()
    (run / "model" / "fake").touch()
    assert torch.equal(logits(load_answerer(run).model), trained.fresh)
    assert family[-1].path == str(run / "model")
    with pytest.raises(DitLoraError, match="--model does not apply"):
        load_answerer(run, "other")


def test_a_checkpoint_is_opened_by_the_family_that_can(trained: Trained, tmp_path: Path) -> None:
    loaded = load_answerer(trained.base)
    assert loaded.checkpoint.vision_settings == VisionSettings(4, 8, 10)
    assert torch.equal(logits(loaded.model), trained.fresh)
    with pytest.raises(
        DitLoraError, match=r"is not a folder of a run, an adapter or a chat model\n  - fake: .* is no fake"
    ):
        load_answerer(tmp_path)


def test_an_adapter_of_a_diffusion_model_is_refused(trained: Trained, tmp_path: Path) -> None:
    model = mistral().requires_grad_(False)
    attach_lora(model, LoraConfig(rank=2), ("q_proj",), seed=0)
    for parameter in model.parameters():
        parameter.data += 1
    save_chat_adapter(model, tmp_path / "other", {"family": "sana", "base_model": "a/b"})
    with pytest.raises(DitLoraError, match="of the family sana, which is not a chat model"):
        load_answerer(tmp_path / "other")
