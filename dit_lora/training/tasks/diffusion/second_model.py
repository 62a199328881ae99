"""Generates samples with a second checkpoint of the same architecture and the trained adapter (`validation.model`)."""

import copy
from collections.abc import Mapping

import torch
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.groups import get_base_parameters
from dit_lora.adapters.lora_mixins import add_adapter_methods
from dit_lora.adapters.under import attach_frozen_adapters, build_frozen_configs
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.training.execution.offload import offload_base
from dit_lora.training.task import AnySetup
from dit_lora.training.tasks.diffusion.model import quantize_if_requested
from dit_lora.training.tasks.diffusion.stored_loras import (
    list_sample_adapters,
    map_frozen_adapters_by_name,
    read_recipe_lora_files,
)


def open_sampling_checkpoint(recipe: Recipe, checkpoint: Checkpoint) -> Checkpoint | None:
    """Open the checkpoint `validation.model`; None if not set. Raises `DitLoraError` if its architecture differs."""
    location = recipe.validation.model
    if location is None:
        return None
    model = recipe.model.model_copy(update={"path": location, "revision": None})
    try:
        # Without the recipe: a checkpoint that refuses to train, such as a distilled one, may be used for samples.
        sampling_checkpoint: Checkpoint = get_family(recipe.model.family).open(model)
        sampling_checkpoint = sampling_checkpoint.copy_with_training_metadata(checkpoint.info.training_metadata())
        sampling_checkpoint.info.check_shape(VideoShape.from_data(recipe.data))
    except DitLoraError as error:
        reason = str(error).removeprefix("model.path: ")
        raise DitLoraError(f"validation.model: {reason}") from error
    differing = _list_differences(checkpoint, sampling_checkpoint)
    if differing:
        raise DitLoraError(
            f"validation.model: {location} is of another architecture than {recipe.model.path}: {'; '.join(differing)}"
        )
    return sampling_checkpoint


def require_only_adapter_trains(recipe: Recipe, model: nn.Module) -> None:
    """Raise `DitLoraError` if base weights train although an option of the recipe needs them frozen.

    These are `validation.model`, `train.preserve` and `train.target: guided`.
    """
    trained = get_base_parameters(model)
    for option, is_set in (
        ("train.preserve", recipe.train.preserve is not None),
        ("train.target: guided", recipe.train.target == "guided"),
    ):
        if is_set and trained:
            raise DitLoraError(
                f"{option}: its target is made from the base's own output, and {len(trained)} base weights train too, "
                f"such as {next(iter(trained))}; leave one of them out"
            )
    if recipe.validation.model is not None and trained:
        raise DitLoraError(
            f"validation.model: its samples use only the adapter, but {len(trained)} base weights train too, such "
            f"as {next(iter(trained))}; leave one of them out"
        )


def load_sampling_transformer(
    setup: AnySetup, sampling_checkpoint: Checkpoint, weights: Mapping[str, torch.Tensor]
) -> nn.Module:
    """Load the second checkpoint's transformer with the adapter, for sampling; on this process only.

    `weights` are the trained weights, unsharded.
    """
    recipe, device = setup.recipe, setup.accelerator.device
    model = sampling_checkpoint.denoiser.load_transformer(setup.dtype)
    stored = read_recipe_lora_files(recipe, sampling_checkpoint, model, only_under=True)
    # Quantised like the trained one: if that does not fit unquantised, two do not fit either.
    quantize_if_requested(recipe, model, get_family(recipe.model.family).group_patterns)
    # Before adapters are attached, while the layers have the names that the files use.
    configs = build_frozen_configs(model, [file.layers for file in stored.under_files])
    config = copy.deepcopy(setup.transformer.peft_config[ADAPTER_NAME])  # type: ignore[union-attr,index]
    # PEFT draws a random A, which is replaced below.
    with torch.random.fork_rng(devices=[]):
        add_adapter_methods(model).add_adapter(config, adapter_name=ADAPTER_NAME)  # type: ignore[operator]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            # Keeps the dtype of the trained weights, and copies: the run's own weights go on training.
            parameters[name].data = tensor.detach().to("cpu", copy=True)
    frozen_adapters, in_samples = map_frozen_adapters_by_name(recipe, configs, stored), list_sample_adapters(recipe)
    attach_frozen_adapters(model, {n: adapter for n, adapter in frozen_adapters.items() if n in in_samples})
    model.requires_grad_(False).eval()
    offload_base(recipe, model, setup.accelerator)
    if recipe.train.offload == "none":
        model.to(device)
    return model


def _list_differences(checkpoint: Checkpoint, sampling_checkpoint: Checkpoint) -> list[str]:
    pipelines = [opened.info.pipeline_class.__name__ for opened in (sampling_checkpoint, checkpoint)]
    messages = [f"{pipelines[0]}, not {pipelines[1]}"] if pipelines[0] != pipelines[1] else []
    # Compared by key, so that a missing setting counts as a difference.
    sampling_config, trained_config = (
        # Library names and versions are not part of the architecture.
        {key: value for key, value in opened.info.transformer_config.items() if not key.startswith("_")}
        for opened in (sampling_checkpoint, checkpoint)
    )
    messages += [
        f"{key} {sampling_config.get(key)}, not {trained_config.get(key)}"
        for key in sorted(sampling_config.keys() | trained_config.keys())
        if sampling_config.get(key) != trained_config.get(key)
    ]
    return messages
