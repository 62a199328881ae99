"""What of a recipe's model trains, and in which dtype it gets there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dit_lora.config.load import parse_recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.training.tasks.diffusion.task import DiffusionTask

FULL = {"groups": {"backbone": {"lr": 1e-4}, "connector": {"lr": 1e-5}}}


def load(values: dict[str, Any], dtype: torch.dtype) -> tuple[Any, list[dict[str, Any]], str]:
    recipe = parse_recipe(values, "test")
    family = get_family(recipe.model.family)
    return DiffusionTask().load_trainable(recipe, family, family.open(recipe.model), dtype)


@pytest.fixture
def full_values(recipe_values: dict[str, Any]) -> dict[str, Any]:
    del recipe_values["lora"]
    recipe_values["optim"] = FULL
    recipe_values["train"]["mode"] = "full"
    return recipe_values


def test_mode_full_trains_every_weight_from_its_fp32_value(
    full_values: dict[str, Any], tiny_checkpoints: dict[str, Path]
) -> None:
    """Weights are fp32 for every compute dtype: a value rounded to bf16 while loading would stay rounded."""
    model, groups, message = load(full_values, torch.bfloat16)
    stored = tiny_checkpoints["cogvideox-2b"] / "transformer"
    weights = load_file(stored / "diffusion_pytorch_model.safetensors")
    parameters = dict(model.named_parameters())
    assert parameters.keys() <= weights.keys()
    for name, parameter in parameters.items():
        assert parameter.requires_grad, name
        assert torch.equal(parameter, weights[name]), name
    assert {group["name"]: group["lr"] for group in groups} == {"connector": 1e-5, "backbone": 1e-4}
    assert sum(len(group["params"]) for group in groups) == len(parameters)
    assert "every weight" in message


def test_mode_lora_trains_matrices_on_a_base_of_the_runs_dtype(
    recipe_values: dict[str, Any],
) -> None:
    model, groups, message = load(recipe_values, torch.bfloat16)
    for name, parameter in model.named_parameters():
        is_lora = "lora_" in name
        assert parameter.requires_grad is is_lora
        assert parameter.dtype is (torch.float32 if is_lora else torch.bfloat16)
    assert [group["name"] for group in groups] == ["adapter"]
    assert "8 of" in message


def test_random_weights_depend_on_the_seed_alone(full_values: dict[str, Any]) -> None:
    full_values["model"]["from_scratch"] = {}

    def first(seed: int, disturbed: int) -> torch.Tensor:
        full_values["train"]["seed"] = seed
        torch.manual_seed(disturbed)
        return next(load(full_values, torch.float32)[0].parameters()).detach()

    assert torch.equal(first(1, 0), first(1, 5))
    assert not torch.equal(first(1, 0), first(2, 0))


@pytest.mark.parametrize("name", ["_native_flash", "flash"])
def test_attention_that_takes_no_mask_is_refused_for_a_family_that_has_one(
    recipe_values: dict[str, Any], tiny_checkpoints: dict[str, Path], name: str
) -> None:
    """Before anything is trained: a batch of full captions has no mask, and the next one may."""
    recipe_values["model"] = {"family": "sana", "path": str(tiny_checkpoints["sana-600m"])}
    recipe_values["data"] |= {"frames": 1, "height": 64, "width": 64}
    recipe_values["kernels"] = {"attention": name}
    with pytest.raises(DitLoraError, match=f"kernels.attention: {name} does not support masks"):
        load(recipe_values, torch.float32)
