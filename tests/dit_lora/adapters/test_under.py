"""Frozen adapters beside the one that trains, in PEFT's layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exported import trained
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME, attach_lora, is_frozen_adapter
from dit_lora.adapters.diffusers_format import ADAPTER_FILE
from dit_lora.adapters.groups import get_base_parameters, parameter_groups
from dit_lora.adapters.lora_file import StoredLayer, read_lora
from dit_lora.adapters.under import (
    attach_frozen_adapters,
    build_frozen_configs,
    disable_frozen_adapters,
)
from dit_lora.config.recipe import LoraConfig
from dit_lora.families import get_family
from dit_lora.verify.output_fingerprint import disable_adapters

FAMILY = get_family("cogvideox")


@pytest.fixture
def stored(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> tuple[Any, dict[str, StoredLayer]]:
    """A checkpoint, and an adapter of layers that the family's targets have only in part."""
    base = tiny_checkpoints["cogvideox-2b"]
    adapter = trained("cogvideox", base, tmp_path / "one", rank=3, targets=("to_q", "ff.net.2"))
    model = adapter.checkpoint.denoiser.load_transformer(torch.float32)
    pipeline = adapter.checkpoint.info.pipeline_class
    file = read_lora(adapter.folder / ADAPTER_FILE, model, FAMILY.comfyui, pipeline)
    return adapter.checkpoint, dict(file.layers)


def model_of(stored: tuple[Any, dict[str, StoredLayer]], dtype: torch.dtype) -> Any:
    checkpoint, layers = stored
    model = checkpoint.denoiser.load_transformer(dtype)
    configs = build_frozen_configs(model, [layers, layers])
    attach_lora(model, LoraConfig(rank=4), FAMILY.lora_targets, seed=0)
    attach_frozen_adapters(model, {"under_0": (configs[0], layers, 0.5), "under_1": (configs[1], layers, -2.0)})
    return model.eval()


def output(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    dtype = next(model.parameters()).dtype
    hidden = torch.randn(2, 3, 4, 8, 12, generator=generator).to(dtype)
    text = torch.randn(2, 226, 32, generator=generator).to(dtype)
    with torch.no_grad():
        prediction: torch.Tensor = model(
            hidden_states=hidden, encoder_hidden_states=text, timestep=torch.tensor([300, 900])
        ).sample
    return prediction


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_they_are_in_fp32_and_nothing_but_the_trained_one_trains(stored: Any) -> None:
    model = model_of(stored, torch.bfloat16)
    frozen_parameters = {name: p for name, p in model.named_parameters() if is_frozen_adapter(name)}
    assert len(frozen_parameters) == 2 * 2 * len(stored[1])
    assert {p.dtype for p in frozen_parameters.values()} == {torch.float32}
    assert all(f".{ADAPTER_NAME}." in name for name in trainable(model))
    groups = parameter_groups(model, adapter=1e-3, connector=1e-4, backbone=1e-5, patterns=FAMILY.group_patterns)
    group_names = {name for group in groups for name in group["param_names"]}
    assert not group_names & frozen_parameters.keys()
    assert not any(is_frozen_adapter(name) for name in get_base_parameters(model))
    assert not any(p.requires_grad for p in frozen_parameters.values())


def test_each_acts_by_its_scale_and_goes_away_by_name(stored: Any) -> None:
    model, checkpoint = model_of(stored, torch.float32), stored[0]
    base, before = output(checkpoint.denoiser.load_transformer(torch.float32).eval()), trainable(model)
    full_output = output(model)
    with disable_frozen_adapters(model):
        assert torch.equal(output(model), base)  # B of the trained one is zero
        with disable_adapters(model):
            assert torch.equal(output(model), base)
        assert torch.equal(output(model), base)
    assert torch.equal(output(model), full_output)
    with disable_frozen_adapters(model, keep_active=["under_0"]):
        half_output = output(model)
    expected = checkpoint.denoiser.load_transformer(torch.float32)
    for name, layer in stored[1].items():
        expected.get_submodule(name).weight.data += 0.5 * layer.alpha / layer.rank * layer.b @ layer.a
    torch.testing.assert_close(half_output, output(expected.eval()), rtol=1e-4, atol=1e-5)
    assert (half_output - full_output).abs().max() > 0.01 < (half_output - base).abs().max()
    assert trainable(model) == before
    with pytest.raises(ZeroDivisionError), disable_frozen_adapters(model):
        raise ZeroDivisionError
    assert torch.equal(output(model), full_output)
