"""Which layers are quantised and which not, LoRA on top, what the guard says of them, and what is refused."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from micro_batches import fake_batch
from torch import nn

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.diffusers_format import save_adapter
from dit_lora.adapters.groups import find_base_members
from dit_lora.adapters.quantize import (
    count_parameter_bytes,
    count_quantized_bytes,
    find_quantizable_layers,
    quantize_base,
)
from dit_lora.config.load import parse_recipe
from dit_lora.config.optim import GroupConfig, GroupsConfig
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.fuse.api import fuse, unfuse
from dit_lora.fuse.lora import find_lora_problem
from dit_lora.guard.checks import check_base_weights
from dit_lora.guard.diagnosis import DiagnosisContext
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.state_checks import find_bad_state
from dit_lora.numerics.quantized_linear import Quantization, QuantizedLinear
from dit_lora.training.tasks.diffusion.model import require_quantization
from dit_lora.verify.diffusion_model import DiffusionReferenceModel

pytest.importorskip("bitsandbytes")
KINDS: tuple[Quantization, ...] = ("nf4", "int8", "fp8")
QUERY = "transformer_blocks.0.attn1.to_q"


@pytest.fixture
def transformer(tiny_checkpoints: dict[str, Path]) -> Any:
    path = tiny_checkpoints["cogvideox-2b"]
    model = ModelConfig(family="cogvideox", path=str(path))
    return get_family("cogvideox").open(model).denoiser.load_transformer(torch.float32)


def adapted(model: Any, kind: Quantization, lora: LoraConfig | None = None) -> Any:
    quantize_base(model, kind)
    targets = get_family("cogvideox").lora_targets
    attach_lora(model, lora or LoraConfig(rank=4, alpha=6), targets, seed=0)
    return moved(model)


def moved(model: Any) -> Any:
    """Its adapter's B is not zero."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model


def call(model: Any) -> torch.Tensor:
    """Two different samples."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
    size = (2, frames, config.in_channels, config.sample_height, config.sample_width)
    captions = (2, config.max_text_seq_length, config.text_embed_dim)
    output: torch.Tensor = model(
        torch.randn(size, generator=generator),
        torch.randn(captions, generator=generator),
        torch.tensor([3, 700]),
        return_dict=False,
    )[0]
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_the_linear_layers_of_the_blocks_alone_are_quantised(transformer: Any, kind: Quantization) -> None:
    """As many bytes as shapes say; what the model computes changes a little."""
    linear = {name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    block_layers = {name for name in linear if name.startswith("transformer_blocks.")}
    assert block_layers < linear
    before, computed = call(transformer), count_quantized_bytes(transformer, kind)
    num_parameters = sum(p.numel() for p in transformer.parameters())
    report = quantize_base(transformer, kind)
    quantized_layers = {n for n, module in transformer.named_modules() if isinstance(module, QuantizedLinear)}
    assert quantized_layers == block_layers
    assert report.bytes_after == count_parameter_bytes(transformer) == computed
    assert (report.num_layers, report.num_total_parameters) == (len(block_layers), num_parameters)
    error = (call(transformer) - before).norm() / before.norm()
    assert 1e-4 < error < (0.2 if kind == "nf4" else 0.05)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))])
        self.head = nn.Linear(8, 8)
        self.head.weight = self.blocks[0][1].weight
        self.blocks.append(nn.MultiheadAttention(8, 2))


def test_shared_weights_and_what_is_trained_are_left_out(transformer: Any) -> None:
    """So is the projection of torch's own attention, which uses its weight in another way."""
    assert find_quantizable_layers(Tied()) == ["blocks.0.0"]
    quantizable_names = find_quantizable_layers(transformer)
    groups = GroupsConfig(backbone=GroupConfig(lr=1e-5, modules=(f"{QUERY}.bias", "*.ff.net.2.*")))
    remaining = set(find_quantizable_layers(transformer, find_base_members(transformer, groups, {})))
    assert {QUERY, "transformer_blocks.1.ff.net.2"} == {
        name for name in quantizable_names if name not in remaining and "blocks.0.ff" not in name
    }


@pytest.mark.parametrize("kind", KINDS)
def test_lora_on_top_is_fp32_and_alone_gets_gradients(transformer: Any, kind: Quantization) -> None:
    """Through the fused layer as through PEFT's own."""
    model = adapted(transformer, kind)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for n, p in model.named_parameters() if n in trained} == {torch.float32}

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        output = call(model)
        output.square().mean().backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == trained
        parameter_gradients = (p.grad for p in model.parameters() if p.grad is not None)
        return [output.detach(), *(grad.clone() for grad in parameter_gradients)]

    expected_gradients = gradients()
    fuse(model, {"lora_linear": "on"}, check=False)
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert [find_lora_problem(layer) for layer in layers] == [None] * len(layers)
    for gradient, expected in zip(gradients(), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    unfuse(model)


def nothing_run() -> MicroBatch:
    def never(*_: Any) -> Any:
        raise AssertionError("facts need no replay")

    return fake_batch(("a",), 7, 0, 0, {}, never, never)


@pytest.mark.parametrize(("kind", "name"), [("nf4", "scale"), ("int8", "scale"), ("fp8", "weight")])
def test_the_guard_names_a_frozen_weight_that_is_damaged(transformer: Any, kind: Quantization, name: str) -> None:
    """A NaN among the scales (bitsandbytes' absmax), or a flipped bit that makes one of fp8."""
    model = adapted(transformer, kind)
    suspects = DiagnosisContext(model)
    assert find_bad_state(nothing_run(), suspects) is None
    layer = f"{QUERY}.base_layer"
    bad = 0xFF if name == "weight" else torch.nan
    model.get_parameter(f"{layer}.{name}").data.view(-1)[1] = bad
    verdict = find_bad_state(nothing_run(), suspects)
    assert verdict is not None
    assert (verdict.cause, verdict.module) == ("weights", layer)
    assert f"the frozen weight {layer}.{name} has 1 NaN" in verdict.message
    (finding,) = check_base_weights(model)
    assert finding.fatal
    assert f"{layer}.{name} has 1 NaN" in finding.message


def test_damaged_weights_are_refused_before_a_code_hides_them(transformer: Any) -> None:
    """Each of them is named."""
    other_weight = "transformer_blocks.1.ff.net.2.weight"
    transformer.get_parameter(f"{QUERY}.weight").data[1, 2] = torch.inf
    transformer.get_parameter(other_weight).data[3, 0] = torch.nan
    pattern = rf"not finite; (?s:.*){QUERY}.weight has 1 Inf(?s:.*){other_weight} has 1 NaN"
    with pytest.raises(DitLoraError, match=pattern):
        quantize_base(transformer, "nf4")


@pytest.mark.parametrize("kind", KINDS)
def test_the_loader_of_flux_takes_an_adapter_over_a_quantised_base(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, kind: Quantization
) -> None:
    """It compares shapes of weights with the file's, and widens layers: those in 4 bits stay as they are."""
    family = get_family("flux")
    checkpoint = family.open(ModelConfig(family="flux", path=str(tiny_checkpoints["flux-dev"])))
    trained, quantized_model = (checkpoint.denoiser.load_transformer(torch.float32) for _ in range(2))
    attach_lora(trained, LoraConfig(rank=4), family.lora_targets, seed=0)
    file = save_adapter(moved(trained), checkpoint.info.pipeline_class, tmp_path, {"family": "flux"})
    quantize_base(quantized_model, kind)
    layers = [module for module in quantized_model.modules() if isinstance(module, QuantizedLinear)]
    DiffusionReferenceModel(checkpoint).load_adapter(quantized_model, file)
    assert layers == [module for module in quantized_model.modules() if isinstance(module, QuantizedLinear)]
    expected = dict(trained.named_parameters())
    named_parameters = quantized_model.named_parameters()
    actual = {n.replace(".default_0.", ".default."): p for n, p in named_parameters if ".lora_" in n}
    assert actual.keys() == {name for name in expected if ".lora_" in name}
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


def test_nothing_left_to_quantise_is_refused(transformer: Any) -> None:
    groups = GroupsConfig(backbone=GroupConfig(lr=1e-5))
    with pytest.raises(DitLoraError, match=r"no linear layer of CogVideoX\w+ is left to quantise"):
        quantize_base(transformer, "int8", find_base_members(transformer, groups, {}))


def test_what_a_recipe_or_a_machine_cannot_do_is_refused(
    recipe_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(**changes: Any) -> Any:
        model = {**recipe_values["model"], **changes.pop("model")}
        return parse_recipe({**recipe_values, "model": model, **changes}, source="a test")

    nf4, int8 = (recipe(model={"quantize": kind}) for kind in ("nf4", "int8"))
    require_quantization(nf4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require_quantization(int8)
    with pytest.raises(DitLoraError, match=r"pip install 'dit-lora\[bitsandbytes\]'"):
        require_quantization(nf4)
    full_training = {
        "train": {"mode": "full", "steps": 1},
        "optim": {"groups": {"backbone": {"lr": 1e-5}}},
    }
    recipe_values.pop("lora")
    with pytest.raises(DitLoraError, match=r"model\.quantize does not apply to train\.mode: full"):
        recipe(model={"quantize": "int8"}, **full_training)
