"""LoRA goes where it is asked to, in fp32, alike on every rank."""

from pathlib import Path

import pytest
import torch

from dit_lora.adapters.attach import adapter_config, attach_lora, is_lora_b
from dit_lora.config import LoraConfig
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
    assert report.adapted == 8  # 2 blocks x 4 targets
    assert report.parameters == 8 * 4 * (64 + 64)
    for name, parameter in transformer.named_parameters():
        lora = ".lora_" in name
        assert parameter.requires_grad == lora
        assert parameter.dtype is (torch.float32 if lora else torch.bfloat16)
    config = adapter_config(transformer)
    assert (config["r"], config["lora_alpha"]) == (4, 8)


def test_dropout_and_init_reach_peft(tiny_checkpoints: dict[str, Path]) -> None:
    from diffusers import CogVideoXTransformer3DModel

    spread = {}
    for init in ("kaiming", "gaussian"):
        model = CogVideoXTransformer3DModel.from_pretrained(
            tiny_checkpoints["cogvideox-2b"], subfolder="transformer"
        )
        attach_lora(model, LoraConfig(rank=32, dropout=0.5, init=init), TARGETS, seed=0)
        assert adapter_config(model)["lora_dropout"] == 0.5
        drops = [
            m for n, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and "lora" in n
        ]
        assert {drop.p for drop in drops} == {0.5}
        weights = [p.flatten() for n, p in model.named_parameters() if ".lora_A." in n]
        spread[init] = torch.cat(weights).std().item()
    assert spread["gaussian"] == pytest.approx(1 / 32, rel=0.05)  # PEFT: std 1 / rank
    assert spread["kaiming"] == pytest.approx(
        (1 / 3 / 64) ** 0.5, rel=0.05
    )  # uniform, bound 1/sqrt(fan-in)


def test_alpha_defaults_to_rank(transformer: torch.nn.Module) -> None:
    attach_lora(transformer, LoraConfig(rank=6), TARGETS, seed=0)
    assert adapter_config(transformer)["lora_alpha"] == 6


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_the_start_depends_on_the_seed_alone(tiny_checkpoints: dict[str, Path], init: str) -> None:
    from diffusers import CogVideoXTransformer3DModel

    def start(seed: int, disturbance: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(disturbance)
        model = CogVideoXTransformer3DModel.from_pretrained(
            tiny_checkpoints["cogvideox-2b"], subfolder="transformer"
        )
        attach_lora(model, LoraConfig(rank=4, init=init), TARGETS, seed=seed)
        return {n: p for n, p in model.named_parameters() if ".lora_" in n}

    one, again, other = start(0, 1), start(0, 2), start(1, 1)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert all(not one[name].any() for name in one if is_lora_b(name))


def test_a_target_that_matches_nothing_is_refused_with_what_there_is(
    transformer: torch.nn.Module,
) -> None:
    with pytest.raises(DitLoraError) as error:
        attach_lora(transformer, LoraConfig(targets=("to_q", "to_qq", "o_q")), TARGETS, seed=0)
    message = str(error.value)
    assert "match no linear layer of CogVideoXTransformer3DModel: to_qq, o_q" in message
    for known in ("to_q (2)", "to_out.0 (2)", "proj_out (1)"):
        assert known in message


def test_convolutions_without_groups_are_offered_and_depthwise_ones_are_not(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """Sana's mix-FFN has both; PEFT takes a depthwise one at no rank that one would want."""
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel.from_pretrained(
        tiny_checkpoints["sana-600m"], subfolder="transformer"
    )
    targets = ("conv_inverted", "conv_depth")
    with pytest.raises(DitLoraError) as error:
        attach_lora(model, LoraConfig(targets=targets), (), seed=0)
    message = str(error.value)
    assert "match no linear layer of SanaTransformer2DModel: conv_depth" in message
    for known in ("to_q (4)", "conv_inverted (2, convolutions)", "conv_point (2, convolutions)"):
        assert known in message
    report = attach_lora(model, LoraConfig(rank=4, targets=targets[:1]), (), seed=0)
    assert (report.adapted, report.convolutions) == (0, 2)
    assert report.parameters == 2 * 4 * (32 + 2 * 80)
