"""Reads the LoRA files that a recipe starts from, and says what a run's header tells of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dit_lora.adapters.attach import AttachReport, attach_lora
from dit_lora.adapters.attach_file import attach_lora_file, require_consistent
from dit_lora.adapters.diffusers_format import read_provenance
from dit_lora.adapters.find_lora import find_lora, public_name
from dit_lora.adapters.lora_file import LoraFile, read_lora
from dit_lora.config.recipe import Recipe
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.families.without_weights import from_configs

_INIT = "lora.init"


@dataclass(frozen=True)
class StoredLoras:
    """The files, read for one model."""

    continued: LoraFile | None = None
    """The file that training continues from."""


def read_stored(recipe: Recipe, checkpoint: Checkpoint, model: nn.Module) -> StoredLoras:
    """Read the files for a model without adapters. Raises `DitLoraError` for what is not there or not this model's."""
    if not recipe.lora.from_file:
        return StoredLoras()
    return StoredLoras(_read(recipe, checkpoint, model, recipe.lora.init, _INIT))


def checked(recipe: Recipe, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Read the files for the bare architecture, before hours of encoding; return what the run's header says of them.

    Raises `DitLoraError` for all that `read_stored` and `attach_stored` would refuse.
    """
    if not recipe.lora.from_file:
        return {}
    with torch.device("meta"), from_configs():
        model = checkpoint.load_transformer(torch.float32)
    stored = read_stored(recipe, checkpoint, model)
    if stored.continued is None:
        return {}
    require_consistent(model, stored.continued, recipe.lora)
    return {"continued": {"name": public_name(recipe.lora.init), **stored.continued.digests}}


def attach_stored(recipe: Recipe, model: nn.Module, stored: StoredLoras) -> AttachReport:
    """Attach what trains: the file's adapter, or a new one."""
    lora, targets = recipe.lora, get_family(recipe.model.family).lora_targets
    if stored.continued is None:
        return attach_lora(model, lora, targets, seed=recipe.train.seed)
    return attach_lora_file(model, stored.continued, lora, targets, seed=recipe.train.seed)


def require_moved(
    recipe: Recipe, checkpoint: Checkpoint, model: nn.Module, weights: Mapping[str, torch.Tensor]
) -> None:
    """Raise `CheckFailedError` if the adapter is bit for bit what training continued from.

    `weights` are what was trained, whole, by name.
    """
    if not recipe.lora.from_file or recipe.optim.groups.adapter is None:
        return
    with torch.device("meta"), from_configs():
        bare = checkpoint.load_transformer(torch.float32)
    continued = read_stored(recipe, checkpoint, bare).continued
    assert continued is not None
    for name, layer in continued.layers.items():
        for part, was in (("lora_A", layer.a), ("lora_B", layer.b)):
            (now,) = (t for n, t in weights.items() if n.startswith(f"{name}.{part}."))
            if not torch.equal(now.cpu(), was):
                return
    raise CheckFailedError(
        f"refused to save: every matrix is that of {recipe.lora.init} still; nothing was learned beside it"
    )


def _read(
    recipe: Recipe, checkpoint: Checkpoint, model: nn.Module, named: str, option: str
) -> LoraFile:
    file = find_lora(named, option)
    made = read_provenance(file)
    # First: of another model no name fits, and the list of them says less.
    for what, own in (("family", recipe.model.family), ("part", checkpoint.part)):
        theirs = made.get(what)
        if theirs is not None and theirs != own:
            raise DitLoraError(f"{option}: {named} is an adapter of {what} {theirs}, not of {own}")
    names = get_family(recipe.model.family).comfyui
    return read_lora(file, model, names, checkpoint.pipeline_class)
