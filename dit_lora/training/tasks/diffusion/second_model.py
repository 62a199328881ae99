"""Generates samples with a second checkpoint of the same architecture and the trained adapter (`validation.model`)."""

import copy
import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.groups import base_parameters
from dit_lora.adapters.lora_mixins import adaptable
from dit_lora.adapters.under import configs_under, put_under
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.training.execution.offload import offload_base
from dit_lora.training.task import AnySetup
from dit_lora.training.tasks.diffusion.model import quantized
from dit_lora.training.tasks.diffusion.stored_loras import in_samples, named_under, read_stored


def open_second(recipe: Recipe, checkpoint: Checkpoint) -> Checkpoint | None:
    """Open `validation.model`; None if not set. Raises `DitLoraError` if its architecture differs."""
    location = recipe.validation.model
    if location is None:
        return None
    model = recipe.model.model_copy(update={"path": location, "revision": None})
    try:
        # Without the recipe: a checkpoint that refuses to train, such as a distilled one, may be used for samples.
        sampling_checkpoint: Checkpoint = get_family(recipe.model.family).open(model)
        sampling_checkpoint = sampling_checkpoint.with_header(checkpoint.header())
        sampling_checkpoint.check_shape(VideoShape.of(recipe.data))
    except DitLoraError as error:
        reason = str(error).removeprefix("model.path: ")
        raise DitLoraError(f"validation.model: {reason}") from error
    differing = _differing(checkpoint, sampling_checkpoint)
    if differing:
        raise DitLoraError(
            f"validation.model: {location} is of another architecture than {recipe.model.path}: {'; '.join(differing)}"
        )
    return sampling_checkpoint


def require_adapter_alone(recipe: Recipe, model: nn.Module) -> None:
    """Raise `DitLoraError` if base weights train although `validation.model` or `train.preserve` needs them frozen."""
    trained = base_parameters(model)
    if recipe.train.preserve is not None and trained:
        raise DitLoraError(
            f"train.preserve: its target is the base's own output, and {len(trained)} base weights train too, such as "
            f"{next(iter(trained))}; leave one of them out"
        )
    if recipe.validation.model is not None and trained:
        raise DitLoraError(
            "validation.model: samples of it take the adapter alone, "
            f"and {len(trained)} base weights train too, such as "
            f"{next(iter(trained))}; leave one of them out"
        )


def second_transformer(
    setup: AnySetup, second: Checkpoint, weights: Mapping[str, torch.Tensor]
) -> nn.Module:
    """Load the second checkpoint's transformer with the adapter, for sampling; on this process only.

    `weights` are the trained weights, unsharded.
    """
    recipe, device = setup.recipe, setup.session.accelerator.device
    model = second.load_transformer(setup.dtype)
    stored = read_stored(recipe, second, model, under_alone=True)
    # Quantised like the trained one: if that does not fit unquantised, two do not fit either.
    quantized(recipe, model, get_family(recipe.model.family).group_patterns)
    # Before adapters are attached, while the layers have the names that the files use.
    configs = configs_under(model, [file.layers for file in stored.under])
    config = copy.deepcopy(setup.transformer.peft_config[ADAPTER_NAME])  # type: ignore[union-attr,index]
    # PEFT draws a random A, which is replaced below.
    with torch.random.fork_rng(devices=[]):
        adaptable(model).add_adapter(config, adapter_name=ADAPTER_NAME)  # type: ignore[operator]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            # Keeps the dtype of the trained weights, and copies: the run's own weights go on training.
            parameters[name].data = tensor.detach().to("cpu", copy=True)
    frozen_adapters, sample_adapters = named_under(recipe, configs, stored), in_samples(recipe)
    put_under(
        model,
        {name: adapter for name, adapter in frozen_adapters.items() if name in sample_adapters},
    )
    model.requires_grad_(False).eval()
    offload_base(recipe, model, setup.session.accelerator)
    if recipe.train.offload == "none":
        model.to(device)
    return model


def forget(device: torch.device) -> None:
    """Free the memory of an unreferenced transformer: it is part of reference cycles with its pipeline."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _differing(checkpoint: Checkpoint, second: Checkpoint) -> list[str]:
    """One message for each difference between the two pipelines and transformer configs."""
    pipelines = [opened.pipeline_class.__name__ for opened in (second, checkpoint)]
    messages = [f"{pipelines[0]}, not {pipelines[1]}"] if pipelines[0] != pipelines[1] else []
    # Compared by key, so that a missing setting counts as a difference.
    sampling_config, trained_config = (
        _architecture(opened.transformer_config) for opened in (second, checkpoint)
    )
    messages += [
        f"{key} {sampling_config.get(key)}, not {trained_config.get(key)}"
        for key in sorted(sampling_config.keys() | trained_config.keys())
        if sampling_config.get(key) != trained_config.get(key)
    ]
    return messages


def _architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    # Library names and versions are not part of the architecture.
    return {key: value for key, value in config.items() if not key.startswith("_")}
