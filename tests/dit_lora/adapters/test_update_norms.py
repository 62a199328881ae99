"""Norms of updates are those of the products that they are norms of."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dit_lora.adapters.attach import attach_lora, is_lora_b
from dit_lora.adapters.quantize import quantize_base
from dit_lora.adapters.update_norms import (
    EXTREME_UPDATE_RATIO,
    ModuleUpdate,
    compute_module_updates,
    compute_product_norm,
    compute_weight_norms,
    list_loaded_layers,
    measure_base_weight_changes,
)
from dit_lora.config.recipe import LoraConfig


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 64)])
        self.conv = nn.Conv2d(3, 8, 3)


def adapted(kind: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = Small().requires_grad_(False)
    if kind:
        quantize_base(model, kind)  # type: ignore[arg-type]
    attach_lora(model, LoraConfig(rank=4, alpha=12), ("0", "1", "conv"), seed=0)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if is_lora_b(name):
            parameter.data = draws(*parameter.shape, seed=number)
    return model


@pytest.mark.parametrize("b_scale", [1.0, 1e-12, 1e12])
def test_the_norm_of_a_product_is_taken_without_it(b_scale: float) -> None:
    a, b = draws(8, 300, seed=1), b_scale * draws(200, 8, seed=2)
    exact = torch.linalg.matrix_norm(b.double() @ a.double()).item()
    assert compute_product_norm(b, a) == pytest.approx(exact, rel=1e-10)
    assert compute_product_norm(0 * b, a) == 0


def test_the_norm_of_a_convolutions_update() -> None:
    a, b = draws(4, 3, 3, 3, seed=1), draws(8, 4, 1, 1, seed=2)
    delta = nn.functional.conv2d(a.permute(1, 0, 2, 3), b).permute(1, 0, 2, 3)  # as PEFT merges it
    assert compute_product_norm(b, a) == pytest.approx(torch.linalg.vector_norm(delta).item(), rel=1e-5)


@pytest.mark.parametrize("kind", [None, "int8"])
def test_updates_are_relative_to_the_weights_that_they_are_added_to(kind: str | None) -> None:
    """Of PEFT's own delta, over the weight that the layer computes with."""
    model = adapted(kind)
    layers = list_loaded_layers(model)
    assert {loaded_layer.scaling for loaded_layer in layers.values()} == {3.0}
    tensors = {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if ".lora_" in name}
    update_by_name = {
        item.name: item for item in compute_module_updates(tensors, layers, compute_weight_norms(model, []))
    }
    assert update_by_name.keys() == {"blocks.0", "blocks.1", "conv"}
    for name, update in update_by_name.items():
        layer: nn.Module = model.get_submodule(name)
        delta = layer.get_delta_weight("default")  # type: ignore[operator]
        norm = torch.linalg.vector_norm(delta).item()
        base = layer.base_layer
        is_quantized = hasattr(base, "dequantize")
        weight = base.dequantize(torch.float32) if is_quantized else base.weight  # type: ignore[operator, union-attr]
        assert update.norm == pytest.approx(norm, rel=1e-5)
        assert update.relative_norm == pytest.approx(norm / torch.linalg.vector_norm(weight).item(), rel=1e-5)


def test_norms_of_a_model_without_values_are_read_from_the_checkpoints_files(
    tmp_path: Path,
) -> None:
    model = adapted()
    expected = compute_weight_norms(model, [])
    checkpoint_tensors = {
        name.replace(".base_layer", ""): p.detach().clone()
        for name, p in model.named_parameters()
        if ".lora_" not in name
    }
    del checkpoint_tensors["conv.weight"]
    save_file(checkpoint_tensors, tmp_path / "model.safetensors")
    norms = compute_weight_norms(model.to("meta"), [tmp_path / "model.safetensors"])
    assert norms == pytest.approx({name: expected[name] for name in ("blocks.0", "blocks.1")})


@pytest.mark.parametrize("size", [0.0, 1e-9])
def test_an_update_of_a_weight_that_begins_at_nothing_is_no_extreme_one(size: float) -> None:
    """Such as modulations of DiT: their layers' update is held against what layers of this model weigh."""
    model = adapted()
    model.get_parameter("blocks.0.base_layer.weight").data *= size

    def updates(times: float) -> dict[str, ModuleUpdate]:
        tensors = {
            name.replace(".default", ""): times * p.detach()
            for name, p in model.named_parameters()
            if ".lora_" in name
        }
        update_list = compute_module_updates(tensors, list_loaded_layers(model), compute_weight_norms(model, []))
        return {update.name: update for update in update_list}

    mild = updates(0.3)["blocks.0"]
    assert mild.relative_norm is None if size == 0 else (mild.relative_norm or 0) > EXTREME_UPDATE_RATIO
    assert 0 < (mild.relative_to_typical or 0) <= EXTREME_UPDATE_RATIO
    assert all((update.relative_to_typical or 0) > EXTREME_UPDATE_RATIO for update in updates(30.0).values())


def test_how_far_base_weights_have_trained_is_read_from_the_checkpoints_files(
    tmp_path: Path,
) -> None:
    before = {"a": draws(3, 4), "b": draws(5), "zero": torch.zeros(4), "c": draws(2)}
    save_file(before, tmp_path / "model.safetensors")
    current_weights = {
        "a": 21 * before["a"],
        "b": before["b"],
        "zero": torch.full((4,), 0.1),
        "c": draws(3),
        "d": draws(1),
    }
    update_by_name = {
        update.name: update
        for update in measure_base_weight_changes(current_weights, [tmp_path / "model.safetensors"])
    }
    assert {name: update.relative_norm for name, update in update_by_name.items()} == {
        "a": pytest.approx(20),
        "b": 0,
        "zero": None,
    }
    assert [
        name for name, update in update_by_name.items() if (update.relative_to_typical or 0) > EXTREME_UPDATE_RATIO
    ] == ["a"]
