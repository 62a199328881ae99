"""LoRA goes where it is asked to, in fp32, alike on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_adapter_checks import chat_model, inputs

from dit_lora.adapters.attach import ADAPTER_NAME, attach_lora, is_lora_b
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

TARGETS = get_family("cogvideox").lora_targets


@pytest.fixture
def transformer(tiny_checkpoints: dict[str, Path]) -> torch.nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    path = tiny_checkpoints["cogvideox-2b"]
    return CogVideoXTransformer3DModel.from_pretrained(
        path, subfolder="transformer", dtype=torch.bfloat16
    ).requires_grad_(False)


def test_adapters_are_fp32_over_a_frozen_bf16_base(transformer: torch.nn.Module) -> None:
    report = attach_lora(transformer, LoraConfig(rank=4, alpha=8), TARGETS, seed=0)
    assert report.num_adapted == 8  # 2 blocks x 4 targets
    assert report.num_parameters == 8 * 4 * (64 + 64)
    for name, parameter in transformer.named_parameters():
        lora = ".lora_" in name
        assert parameter.requires_grad == lora
        assert parameter.dtype is (torch.float32 if lora else torch.bfloat16)
    config = transformer.peft_config[ADAPTER_NAME].to_dict()
    assert (config["r"], config["lora_alpha"]) == (4, 8)


def test_dropout_and_init_reach_peft(tiny_checkpoints: dict[str, Path]) -> None:
    from diffusers import CogVideoXTransformer3DModel

    spread = {}
    for init in ("kaiming", "gaussian"):
        model = CogVideoXTransformer3DModel.from_pretrained(tiny_checkpoints["cogvideox-2b"], subfolder="transformer")
        attach_lora(model, LoraConfig(rank=32, dropout=0.5, init=init), TARGETS, seed=0)
        assert model.peft_config[ADAPTER_NAME].to_dict()["lora_dropout"] == 0.5
        drops = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and "lora" in n]
        assert {drop.p for drop in drops} == {0.5}
        weights = [p.flatten() for n, p in model.named_parameters() if ".lora_A." in n]
        spread[init] = torch.cat(weights).std().item()
    assert spread["gaussian"] == pytest.approx(1 / 32, rel=0.05)  # PEFT: std 1 / rank
    assert spread["kaiming"] == pytest.approx((1 / 3 / 64) ** 0.5, rel=0.05)  # uniform, bound 1/sqrt(fan-in)


def test_alpha_defaults_to_rank(transformer: torch.nn.Module) -> None:
    attach_lora(transformer, LoraConfig(rank=6), TARGETS, seed=0)
    assert transformer.peft_config[ADAPTER_NAME].to_dict()["lora_alpha"] == 6


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_the_start_depends_on_the_seed_alone(tiny_checkpoints: dict[str, Path], init: str) -> None:
    from diffusers import CogVideoXTransformer3DModel

    def start(seed: int, disturbance: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(disturbance)
        model = CogVideoXTransformer3DModel.from_pretrained(tiny_checkpoints["cogvideox-2b"], subfolder="transformer")
        attach_lora(model, LoraConfig(rank=4, init=init), TARGETS, seed=seed)
        return {n: p for n, p in model.named_parameters() if ".lora_" in n}

    first_start, repeated_start, other_start = start(0, 1), start(0, 2), start(1, 1)
    assert all(torch.equal(first_start[name], repeated_start[name]) for name in first_start)
    assert not all(torch.equal(first_start[name], other_start[name]) for name in first_start)
    assert all(not first_start[name].any() for name in first_start if is_lora_b(name))


def test_a_target_that_matches_nothing_is_refused_with_what_there_is(
    transformer: torch.nn.Module,
) -> None:
    with pytest.raises(DitLoraError) as error:
        attach_lora(transformer, LoraConfig(targets=("to_q", "to_qq", "o_q")), TARGETS, seed=0)
    message = str(error.value)
    assert "match no linear layer of CogVideoXTransformer3DModel: to_qq, o_q" in message
    for target in ("to_q (2)", "to_out.0 (2)", "proj_out (1)"):
        assert target in message


def test_convolutions_without_groups_are_offered_and_depthwise_ones_are_not(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """Sana's mix-FFN has both; PEFT takes a depthwise one at no rank that one would want."""
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel.from_pretrained(tiny_checkpoints["sana-600m"], subfolder="transformer")
    targets = ("conv_inverted", "conv_depth")
    with pytest.raises(DitLoraError) as error:
        attach_lora(model, LoraConfig(targets=targets), (), seed=0)
    message = str(error.value)
    assert "match no linear layer of SanaTransformer2DModel: conv_depth" in message
    for target in ("to_q (4)", "conv_inverted (2, convolutions)", "conv_point (2, convolutions)"):
        assert target in message
    report = attach_lora(model, LoraConfig(rank=4, targets=targets[:1]), (), seed=0)
    assert (report.num_adapted, report.num_convolutions) == (0, 2)
    assert report.num_parameters == 2 * 4 * (32 + 2 * 80)


def layers_with_lora(model: torch.nn.Module) -> set[str]:
    return {n.partition(".lora_A.")[0] for n, _ in model.named_parameters() if ".lora_A." in n}


def text_layers(*names: str) -> set[str]:
    return {f"model.language_model.layers.{i}.{name}" for i in range(2) for name in names}


LLAVA: list[tuple[tuple[str, ...], set[str]]] = [
    (("q_proj",), text_layers("self_attn.q_proj")),
    (
        ("self_attn.o_proj", "up_proj", "lm_head"),
        text_layers("self_attn.o_proj", "mlp.up_proj") | {"lm_head"},
    ),
    (
        ("language_model.layers.1.self_attn.q_proj", "vision_tower.encoder.layers.0.mlp.fc1"),
        {
            "model.language_model.layers.1.self_attn.q_proj",
            "model.vision_tower.encoder.layers.0.mlp.fc1",
        },
    ),
    (
        ("linear_1", "model.vision_tower.encoder.layers.1.self_attn.k_proj"),
        {
            "model.multi_modal_projector.linear_1",
            "model.vision_tower.encoder.layers.1.self_attn.k_proj",
        },
    ),
]


@pytest.mark.parametrize(("targets", "expected"), LLAVA)
def test_within_keeps_names_of_the_language_model_out_of_the_vision_tower(
    targets: tuple[str, ...], expected: set[str]
) -> None:
    """And what only exists elsewhere goes there; PEFT's own config says the same."""
    import peft

    model, second_model = (chat_model("llava").bfloat16() for _ in range(2))
    lora = LoraConfig(rank=4, targets=targets, dropout=0.25)
    report = attach_lora(model, lora, ("v_proj",), seed=0, submodules=("language_model",))
    assert layers_with_lora(model) == expected
    assert report.num_adapted == len(expected)
    assert model.active_adapters() == ["default"]
    assert type(model) is type(second_model)  # none of Diffusers' mixins, whose methods have the same names
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
        assert parameter.dtype is (torch.float32 if ".lora_" in name else torch.bfloat16)
    drops = {m.p for n, m in model.named_modules() if n.endswith("lora_dropout.default")}
    assert drops == {0.25}
    config = peft.LoraConfig(target_modules=model.peft_config[ADAPTER_NAME].to_dict()["target_modules"])
    second_model.add_adapter(config)
    assert layers_with_lora(second_model) == expected


def test_qwens_vision_blocks_can_be_named() -> None:
    model = chat_model("qwen")
    lora = LoraConfig(rank=4, targets=("q_proj", "visual.blocks.1.attn.qkv"))
    attach_lora(model, lora, (), seed=0, submodules=("language_model",))
    assert layers_with_lora(model) == text_layers("self_attn.q_proj") | {"model.visual.blocks.1.attn.qkv"}


def test_within_that_is_not_in_the_model_is_refused() -> None:
    """Else the adapters would go into its vision tower."""
    with pytest.raises(DitLoraError, match=r"these submodules.*\n  - text_model\n  - llm"):
        attach_lora(
            chat_model("llava"),
            LoraConfig(),
            ("q_proj",),
            seed=0,
            submodules=("text_model", "llm"),
        )
    with pytest.raises(DitLoraError, match=r"match no linear layer .*: qq_proj; it has"):
        attach_lora(
            chat_model("llava"),
            LoraConfig(targets=("q_proj", "qq_proj")),
            (),
            seed=0,
            submodules=("language_model",),
        )


def test_a_head_that_is_the_embedding_too_is_refused() -> None:
    from tiny_chat_models import mistral

    model = mistral(tie_word_embeddings=True)
    with pytest.raises(DitLoraError, match=r"share their weight.*tie_word.*\n  - lm_head$"):
        attach_lora(model, LoraConfig(), ("q_proj", "lm_head"), seed=0)
    assert not layers_with_lora(model)
    attach_lora(model, LoraConfig(), ("q_proj",), seed=0)


@pytest.mark.parametrize("name", ["llava", "videochat2"])
def test_fused_lora_is_the_same_chat_model(name: str) -> None:
    from dit_lora.fuse.api import fuse

    def step(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss = model(**inputs(name)).logits.square().mean()
        trained = [p for p in model.parameters() if p.requires_grad]
        return loss.detach(), list(torch.autograd.grad(loss, trained))

    model = chat_model(name)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")
    if name == "videochat2":
        targets = (*targets, "projection")
    attach_lora(model, LoraConfig(rank=4, alpha=7), targets, seed=0, submodules=("language_model",))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    reference_loss, gradients = step(model)
    report = fuse(model, {"lora_linear": "on"}, check=False)
    assert report.ops == ["lora_linear"]
    assert len(report.fusion.patched_modules) == 8 + len(targets) - 4
    fused_loss, fused_gradients = step(model)
    torch.testing.assert_close(fused_loss, reference_loss, rtol=1e-5, atol=1e-6)
    assert len(fused_gradients) == len(gradients) == 2 * (8 + len(targets) - 4)
    for fused_gradient, gradient in zip(fused_gradients, gradients, strict=True):
        torch.testing.assert_close(fused_gradient, gradient, rtol=1e-4, atol=1e-7)
        assert gradient.any()
