"""The released VideoChat2s at their own sizes: parameters part by part, and of the LoRA of stage 3."""

from typing import Any

import peft
import pytest
import torch
from launching import ROOT
from torch import nn

from dit_lora.models.videochat2.configuration import VideoChat2Config
from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration
from dit_lora.models.videochat2.released import map_tensor_name

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# Of the language model with its output head, as its card or its safetensors index says.
LANGUAGE_MODELS = {
    "VideoChat2-Mistral-7B": 7_241_732_096,
    "VideoChat2-HD-Mistral-7B": 7_241_732_096,
    "VideoChat2-Vicuna-7B": 6_738_415_616,
    "VideoChat2-Phi3-mini": 3_821_079_552,
}
# target_modules of models/videochat_mistra/videochat2_it_mistral.py
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def vision_count(blocks: int) -> int:
    """UMT-L: width 1024, patches of 1x16x16, no bias of keys."""
    width = 1024
    attention = 3 * width * width + 2 * width + linear(width, width)
    mlp = linear(width, 4 * width) + linear(4 * width, width)
    return linear(3 * 16 * 16, width) + blocks * (attention + mlp + 2 * 2 * width)


def qformer_count() -> int:
    """BERT-base with cross-attention to 1024 in every other layer and a second feed-forward for the queries."""
    width, inner = 768, 3072
    attention = 4 * linear(width, width) + 2 * width
    cross = 2 * linear(width, width) + 2 * linear(1024, width) + 2 * width
    feed_forward = linear(width, inner) + linear(inner, width) + 2 * width
    embeddings = (30522 + 1) * width + 512 * width + 2 * width
    return embeddings + 12 * (attention + 2 * feed_forward) + 6 * cross


def counted(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def built(name: str) -> Any:
    """The model of that config, without memory for its weights."""
    config = VideoChat2Config.from_pretrained(CONFIGS / name)
    with torch.device("meta"):
        return VideoChat2ForConditionalGeneration(config)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_parts_have_the_published_sizes(name: str) -> None:
    model = built(name)
    trunk = model.model
    text = trunk.language_model.config.hidden_size
    assert counted(trunk.vision_encoder) == vision_count(23)
    # UMT's tables give ViT-L 304 M (arXiv 2303.16058): 24 blocks, and what comes after them.
    assert 0 < 304e6 - vision_count(24) < 1.5e6
    assert counted(trunk.vision_layernorm) == 2 * 1024
    assert counted(trunk.qformer) == qformer_count()
    assert trunk.query_tokens.shape == (1, 32, 768)
    assert trunk.extra_query_tokens.shape == (1, 64, 768)
    assert counted(trunk.projection) == linear(768, text)
    assert counted(trunk.language_model) + counted(model.lm_head) == LANGUAGE_MODELS[name]
    other_parts = vision_count(23) + 2 * 1024 + qformer_count() + 96 * 768 + linear(768, text)
    assert counted(model) == LANGUAGE_MODELS[name] + other_parts


def test_stage_3_of_mistral_adapts_225_layers() -> None:
    """Each LoRA tensor of the release has a layer here, and none is of another module than the language model."""
    model = built("VideoChat2-Mistral-7B")
    width, inner, heads = 4096, 14336, 1024
    with torch.device("meta"):
        adapted: Any = peft.inject_adapter_in_model(
            peft.LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS), model
        )
    expected = {n.removesuffix(".lora_A.default.weight") for n in adapted.state_dict() if "lora_A" in n}
    released = [
        f"mistral_model.base_model.model.model.layers.{layer}.{module}.lora_A.default.weight"
        for layer in range(32)
        for module in (
            *(f"self_attn.{kind}_proj" for kind in "qkvo"),
            *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down")),
        )
    ]
    released.append("mistral_model.base_model.model.lm_head.lora_A.default.weight")
    placements = [map_tensor_name(n) for n in released]
    assert {p.name for p in placements if p and p.part == "A"} == expected
    assert len(expected) == 225
    sizes = sum(p.numel() for n, p in adapted.named_parameters() if "lora_" in n)
    per_layer = 2 * (width + width) + 2 * (width + heads) + 3 * (width + inner)
    assert sizes == 16 * (32 * per_layer + width + 32000)
