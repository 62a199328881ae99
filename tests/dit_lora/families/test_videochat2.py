"""A VideoChat2 checkpoint follows the original: what its prompts say, refuse, and how pictures are normalised."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import llama_tokenizer

from dit_lora.config.recipe import ModelConfig
from dit_lora.data.chat.conversation import Conversation, Turn
from dit_lora.errors import DitLoraError
from dit_lora.families.videochat2 import FAMILY
from dit_lora.families.videochat2.checkpoint import VideoChat2Checkpoint
from dit_lora.families.videochat2.tiny import VARIANTS
from dit_lora.models.videochat2.configuration import VideoChat2Config
from dit_lora.models.videochat2.tokenizer import load_tokenizer
from dit_lora.models.videochat2.vision import VideoChat2VisionEncoder, build_position_table

ASKED = Conversation("a", "video", None, (Turn("What is it?", "A ball."),))
CONTROL = {
    "mistral": ["[INST]", "</s>", "<s>"],
    "vicuna": ["###", "</s>", "<s>"],
    "phi3": ["<|end|>", "<|user|>", "<|endoftext|>", "<s>"],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, VideoChat2Checkpoint]:
    root = tmp_path_factory.mktemp("videochat2")
    for variant in ("videochat2-mistral", "videochat2-vicuna", "videochat2-phi3"):
        FAMILY.build_tiny_checkpoint(variant, root / variant, 0)
    paths = {VARIANTS[path.name]: path for path in root.iterdir()}
    return {name: FAMILY.open(ModelConfig(family="videochat2", path=str(path))) for name, path in paths.items()}


def prompt(checkpoint: VideoChat2Checkpoint, one: Conversation = ASKED) -> str:
    rendered = checkpoint.tokenize_conversation(one, checkpoint.shape("video", 32, 32), (0.25, 0.5))
    ids = [token for piece in rendered.pieces if piece.part != "media" for token in piece.ids]
    return str(checkpoint.tokenizer.decode(ids))


@pytest.mark.parametrize("name", CONTROL)
def test_seconds_are_said_where_the_originals_training_says_them(
    name: str, tiny: dict[str, VideoChat2Checkpoint]
) -> None:
    """`add_second_msg` is the default of its Vicuna data set alone (it_dataset*.py, dataset/__init__.py)."""
    checkpoint = tiny[name]
    for settings in (
        checkpoint.vision_settings,
        replace(checkpoint.vision_settings, timestamps=None),
    ):
        has_seconds = "2 frames sampled at 0.2, 0.5 seconds" in prompt(checkpoint.copy_with_vision_settings(settings))
        assert has_seconds is (name == "vicuna")
    for is_given in (True, False):
        chosen = checkpoint.copy_with_vision_settings(replace(checkpoint.vision_settings, timestamps=is_given))
        assert ("seconds" in prompt(chosen)) is is_given


@pytest.mark.parametrize("name", CONTROL)
def test_texts_with_control_tokens_of_the_format_are_refused(name: str, tiny: dict[str, VideoChat2Checkpoint]) -> None:
    for token in CONTROL[name]:
        for turn in (
            Turn("What?", f"Red. {token} Blue."),
            Turn(f"Why {token}?", "So."),
            Turn("What?", "That.", f"{token}Look."),
        ):
            with pytest.raises(DitLoraError) as refused:
                prompt(tiny[name], replace(ASKED, turns=(ASKED.turns[0], turn)))
            assert f"its text contains {token}, which" in str(refused.value)
        with pytest.raises(DitLoraError, match="its text contains"):
            prompt(tiny[name], replace(ASKED, system=token))
    other_markers = {"###", "<|end|>"} - set(CONTROL[name])
    assert all(marker in prompt(tiny[name], _saying(f"A {marker} mark.")) for marker in other_markers)


def _saying(answer: str) -> Conversation:
    return replace(ASKED, turns=(Turn("What?", answer),))


def test_pictures_are_normalised_as_imagenet(tiny: dict[str, VideoChat2Checkpoint]) -> None:
    batch = {"input_ids": torch.tensor([[1]]), "pixels": torch.full((1, 1, 3, 1, 1), 255)}
    pixel_values = tiny["mistral"].build_model_inputs(batch)["pixel_values"].flatten()
    expected = (1 - torch.tensor((0.485, 0.456, 0.406))) / torch.tensor((0.229, 0.224, 0.225))
    torch.testing.assert_close(pixel_values, expected)


def test_legacy_answers_embed_the_beginning_of_text_as_its_id(
    tiny: dict[str, VideoChat2Checkpoint],
) -> None:
    checkpoint = tiny["mistral"]
    model: Any = checkpoint.load_model(torch.float32).eval()
    assert model.config.legacy
    embeddings: list[torch.Tensor] = []
    model.model.language_model.register_forward_pre_hook(
        lambda _m, _a, kwargs: embeddings.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    rendered = checkpoint.tokenize_conversation(replace(ASKED, kind="text"), None, include_answer=False)
    checkpoint.answer(model, rendered, None, 1)
    assert torch.equal(embeddings[0][0, 0], torch.ones(48))


def test_positions_are_resized_but_at_the_pretrained_size() -> None:
    for size, patch, side, pretrained in ((224, 56, 4, 4), (112, 28, 4, 14)):
        config = VideoChat2Config(
            vision_config={"image_size": size, "patch_size": patch, "hidden_size": 8}
            | {"num_hidden_layers": 2, "num_attention_heads": 1},
            tile_size=size,
        ).vision_config
        encoder = VideoChat2VisionEncoder(config)
        recorded: list[torch.Tensor] = []
        encoder.blocks[0].register_forward_pre_hook(lambda _m, inputs, calls=recorded: calls.append(*inputs))
        encoder.patch_embed.requires_grad_(False)
        encoder.patch_embed.proj.weight.zero_()
        encoder.patch_embed.proj.bias.zero_()
        encoder(torch.zeros(1, 8, 3, size, size))
        cpu = torch.device("cpu")
        assert torch.equal(recorded[0][0], build_position_table(8, side, 8, 4, cpu, pretrained))


@pytest.mark.parametrize("model_type", ["llama", "videochat2", None])
def test_a_tokenizer_is_what_its_file_says(model_type: str | None, tmp_path: Path) -> None:
    """Transformers reads such a folder as its own LlamaTokenizer, without the space after each </s>."""
    stored = llama_tokenizer()
    stored.save_pretrained(tmp_path)
    about = tmp_path / "tokenizer_config.json"
    settings = json.loads(about.read_text()) | {"tokenizer_class": "LlamaTokenizer"}
    about.write_text(json.dumps(settings))
    if model_type == "videochat2":
        VideoChat2Config().save_pretrained(tmp_path)
    elif model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    text = "[INST] the cat [/INST] a dog </s> [INST] b [/INST] c </s>"
    expected = stored(text, add_special_tokens=False).input_ids
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer(text, add_special_tokens=False).input_ids == expected
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    tokenizer.save_pretrained(tmp_path / "again")
    second_tokenizer = load_tokenizer(tmp_path / "again")
    assert second_tokenizer(text, add_special_tokens=False).input_ids == expected
