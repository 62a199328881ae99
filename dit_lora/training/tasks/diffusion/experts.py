"""Generates samples with two experts while one trains: loads the other's adapter; only one is on the device."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_run_metadata
from dit_lora.adapters.load import load_adapter
from dit_lora.config.recipe import Recipe
from dit_lora.environment.hub_files import resolve_result_folder
from dit_lora.errors import DitLoraError
from dit_lora.families.base import CheckpointInfo
from dit_lora.numerics.dtensors import is_sharded
from dit_lora.verify.expert_pair import EXPERT_FILE_PATTERNS, find_adapter_files


def find_other_expert_adapter(recipe: Recipe, info: CheckpointInfo) -> Path | None:
    """The adapter file that `validation.other_expert` names; None if it names none.

    Raises `DitLoraError` if it has no adapter of the other expert, for example because it was trained on this one.
    """
    location = recipe.validation.other_expert
    if location is None:
        return None
    (other_part,) = (part for part in info.expert_names if part != info.part)
    files = find_adapter_files(resolve_result_folder(location, (ADAPTER_FILE, *EXPERT_FILE_PATTERNS)))
    # Each adapter file's metadata name the expert it was trained on.
    parts = {read_run_metadata(file).get("part"): file for file in files}
    if other_part not in parts:
        parts_text = ", ".join(f"{file.name} is for {part}" for part, file in parts.items())
        raise DitLoraError(
            f"validation.other_expert: {location} has no adapter of {other_part} "
            f"({info.expert_names[other_part]}), while this run trains {info.part}: "
            f"{parts_text or 'it has none at all'}"
        )
    return parts[other_part]


@contextmanager
def use_both_experts(
    pipeline: Any, info: CheckpointInfo, trained_expert: nn.Module, adapter: Path | None
) -> Iterator[None]:
    """Let a pipeline denoise with both experts, with only one of them on the device at a time.

    The other gets its `adapter`, if given. The trained one stays where it is if it is sharded or on several devices.
    """
    names = [part for part in info.expert_names if part != info.part]
    if not names:
        yield
        return
    if adapter is not None:
        load_adapter(pipeline, adapter)
    # Diffusers leaves a loaded adapter in training mode, where its dropout would be active.
    other_expert = getattr(pipeline, names[0]).eval()
    devices = {tensor.device for tensor in (*trained_expert.parameters(), *trained_expert.buffers())}
    with ExitStack() as stack:
        if len(devices) > 1 or is_sharded(trained_expert):
            other_expert.to(pipeline.vae.device)
        else:
            (device,) = devices
            # Callbacks run in reverse order: the other expert leaves the device before the trained one returns.
            stack.callback(trained_expert.to, device)
            stack.callback(other_expert.to, "cpu")
            for model, idle in ((trained_expert, other_expert), (other_expert, trained_expert)):
                stack.enter_context(_swap_on_call(device, model, idle))
        yield


def _swap_on_call(device: torch.device, model: nn.Module, idle: nn.Module) -> Any:
    """Register a hook that moves `idle` off the device whenever `model` is called; returns its handle."""

    def swap_models(_module: nn.Module, _args: Any) -> None:
        if next(model.parameters()).device != device:
            idle.to("cpu")
            model.to(device)

    return model.register_forward_pre_hook(swap_models)
