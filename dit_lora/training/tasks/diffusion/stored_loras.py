"""Reads the LoRA files that a recipe starts from, and says what a run's header tells of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from dit_lora.adapters.attach_file import attach_lora_file, require_consistent
from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_provenance
from dit_lora.adapters.find_lora import find_lora, public_name
from dit_lora.adapters.lora_file import LoraFile, StoredLayer, read_lora
from dit_lora.adapters.start import attach_started
from dit_lora.adapters.under import configs_under, put_under, under_name
from dit_lora.config.recipe import Recipe
from dit_lora.config.remedies import hub_name
from dit_lora.environment.hub_files import result_folder
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint
from dit_lora.families.without_weights import from_configs
from dit_lora.results.experts import PAIR_PATTERNS, files_of_experts
from dit_lora.results.verified_files import require_file_as_verified

_INIT = "lora.init"


@dataclass(frozen=True)
class StoredLoras:
    """The files, read for one model."""

    continued: LoraFile | None = None
    """The file that training continues from."""
    under: tuple[LoraFile, ...] = ()
    """The files of `lora.under`, in its order."""


def read_stored(
    recipe: Recipe, checkpoint: Checkpoint, model: nn.Module, *, under_alone: bool = False
) -> StoredLoras:
    """Read the files for a model without adapters. Raises `DitLoraError` for what is not there or not this model's."""
    lora, continued = recipe.lora, None
    if lora.from_file and not under_alone:
        continued = _read(recipe, checkpoint, model, lora.init, _INIT)
    under = tuple(
        _read(recipe, checkpoint, model, one.path, f"lora.under[{number}]")
        for number, one in enumerate(lora.under)
    )
    return StoredLoras(continued, under)


def checked(recipe: Recipe, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Read the files for the bare architecture, before hours of encoding; return what the run's header says of them.

    Raises `DitLoraError` for all that `read_stored` and `attach_stored` would refuse.
    """
    lora = recipe.lora
    if not lora.from_file and not lora.under:
        return {}
    with torch.device("meta"), from_configs():
        model = checkpoint.load_transformer(torch.float32)
    stored, told = read_stored(recipe, checkpoint, model), dict[str, Any]()
    if stored.continued is not None:
        require_consistent(model, stored.continued, lora)
        told["continued"] = {"name": public_name(lora.init), **stored.continued.digests}
    if stored.under:
        told["under"] = [
            {
                "name": public_name(one.path),
                **file.digests,
                "scale": one.scale,
                "in_samples": one.in_samples,
            }
            for one, file in zip(lora.under, stored.under, strict=True)
        ]
    return told


def notes(recipe: Recipe, checkpoint: Checkpoint, transformer_digest: str) -> list[str]:
    """Return lines about files that were trained on other weights than these: they fit, and may not mean the same."""
    named = [(_INIT, recipe.lora.init)] if recipe.lora.from_file else []
    named += [(f"lora.under[{n}]", one.path) for n, one in enumerate(recipe.lora.under)]
    lines = []
    for option, path in named:
        made = read_provenance(_found(checkpoint, path, option))
        if made.get("transformer_digest", transformer_digest) != transformer_digest:
            lines.append(
                f"warning: {option}: {public_name(path)} was trained on {made.get('base_model')}, "
                "with other weights than "
                f"this {checkpoint.path.name}"
            )
    return lines


def attach_stored(
    recipe: Recipe, model: nn.Module, stored: StoredLoras, targets: Sequence[str]
) -> str:
    """Attach what trains, the file's adapter or a new one, and frozen ones under it; return lines that say so.

    `targets` are those of a recipe that names none.
    """
    lora = recipe.lora
    # While the layers still have the names that files know.
    configs = configs_under(model, [file.layers for file in stored.under])
    if stored.continued is None:
        said = str(attach_started(model, lora, targets, seed=recipe.train.seed))
    else:
        report = attach_lora_file(model, stored.continued, lora, targets, seed=recipe.train.seed)
        said = f"{report}; continued from {public_name(lora.init)}"
    if not stored.under:
        return said
    put_under(model, named_under(recipe, configs, stored))
    lines = [
        f"lora.under: {public_name(one.path)}: {len(file.layers)} layers, scale {one.scale:g}, frozen; on in training"
        f"{' and in samples' if one.in_samples else ', off in samples'}"
        for one, file in zip(lora.under, stored.under, strict=True)
    ]
    return "\n".join([said, *lines])


def named_under(
    recipe: Recipe, configs: Sequence[LoraConfig], stored: StoredLoras
) -> dict[str, tuple[LoraConfig, Mapping[str, StoredLayer], float]]:
    """Return what `put_under` takes of the frozen adapters, by their names in the model."""
    whole = zip(configs, stored.under, recipe.lora.under, strict=True)
    return {
        under_name(number): (config, file.layers, one.scale)
        for number, (config, file, one) in enumerate(whole)
    }


def in_samples(recipe: Recipe) -> list[str]:
    """Return the names of the frozen adapters that are on in samples."""
    return [under_name(n) for n, one in enumerate(recipe.lora.under) if one.in_samples]


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
    file = _found(checkpoint, named, option)
    made = read_provenance(file)
    # First: of another model no name fits, and the list of them says less.
    for what, own in (("family", recipe.model.family), ("part", checkpoint.part)):
        theirs = made.get(what)
        if theirs is not None and theirs != own:
            raise DitLoraError(f"{option}: {named} is an adapter of {what} {theirs}, not of {own}")
    names = get_family(recipe.model.family).comfyui
    return read_lora(file, model, names, checkpoint.pipeline_class)


def _found(checkpoint: Checkpoint, named: str, option: str) -> Path:
    file = _of_pair(checkpoint, named) or find_lora(named, option)
    require_file_as_verified(file, option)
    return file


def _of_pair(checkpoint: Checkpoint, named: str) -> Path | None:
    """Return this expert's file of a folder or repository that has both experts'; None where it has not."""
    folder = Path(named).expanduser()
    if not checkpoint.parts or folder.is_file():
        return None
    if hub_name(named) is not None and not named.endswith(".safetensors"):
        folder = result_folder(named, (ADAPTER_FILE, *PAIR_PATTERNS))
    name = checkpoint.parts[checkpoint.part]
    own = [
        file
        for file in files_of_experts(folder)
        if read_provenance(file).get("part") == checkpoint.part or file.stem.endswith(name)
    ]
    return own[0] if own else None
