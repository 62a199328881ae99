"""Samples with two experts, of which a run trains one: loads the other's adapter, and keeps one expert in memory."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_provenance
from dit_lora.adapters.load import load_adapter
from dit_lora.config.recipe import Recipe
from dit_lora.environment.hub_files import result_folder
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Checkpoint
from dit_lora.numerics.dtensors import is_sharded
from dit_lora.results.experts import PAIR_PATTERNS, files_of_experts


def other_adapter(recipe: Recipe, checkpoint: Checkpoint) -> Path | None:
    """Return the file that `validation.other_expert` names; None where it names none.

    Raises `DitLoraError` where there is none, or where it was trained on the expert that trains now.
    """
    named = recipe.validation.other_expert
    if named is None:
        return None
    (other,) = (part for part in checkpoint.parts if part != checkpoint.part)
    found = files_of_experts(result_folder(named, (ADAPTER_FILE, *PAIR_PATTERNS)))
    parts = {read_provenance(file).get("part"): file for file in found}
    if other not in parts:
        said = ", ".join(f"{file.name} is for {part}" for part, file in parts.items())
        raise DitLoraError(
            f"validation.other_expert: {named} has no adapter of {other} ({checkpoint.parts[other]}), while this run "
            f"trains {checkpoint.part}: {said or 'it has none at all'}"
        )
    return parts[other]


@contextmanager
def both_experts(
    pipeline: Any, checkpoint: Checkpoint, trained: nn.Module, adapter: Path | None
) -> Iterator[None]:
    """Let a pipeline denoise with the expert that trains and the other, one of them on the device at a time.

    The other comes with its `adapter`, if given. What trains stays where it is if it is spread over ranks or places.
    """
    names = [part for part in checkpoint.parts if part != checkpoint.part]
    if not names:
        yield
        return
    if adapter is not None:
        load_adapter(pipeline, adapter)
    # Diffusers leaves a loaded adapter in training mode, where the dropout of another trainer would act.
    other = getattr(pipeline, names[0]).eval()
    places = {tensor.device for tensor in (*trained.parameters(), *trained.buffers())}
    with ExitStack() as stack:
        if len(places) > 1 or is_sharded(trained):
            other.to(pipeline.vae.device)
        else:
            (device,) = places
            stack.callback(trained.to, device)
            stack.callback(other.to, "cpu")
            for model, idle in ((trained, other), (other, trained)):
                stack.enter_context(_alone_on(device, model, idle))
        yield


def _alone_on(device: torch.device, model: nn.Module, idle: nn.Module) -> Any:
    """Return the handle of a hook that makes room on the device whenever the model is called."""

    def take_turns(_module: nn.Module, _args: Any) -> None:
        if next(model.parameters()).device != device:
            idle.to("cpu")
            model.to(device)

    return model.register_forward_pre_hook(take_turns)
