"""Reads the LoRA files that a recipe starts from, and describes them in a run's metadata."""

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
    """The file that training continues from; None for a new adapter."""
    under: tuple[LoraFile, ...] = ()
    """The files of `lora.under`, in order."""


def read_stored(
    recipe: Recipe, checkpoint: Checkpoint, model: nn.Module, *, under_alone: bool = False
) -> StoredLoras:
    """Read the files for a model without adapters. Raises `DitLoraError` for missing files and files of another
    model.
    """
    lora, continued = recipe.lora, None
    if lora.from_file and not under_alone:
        continued = _read(recipe, checkpoint, model, lora.init, _INIT)
    frozen_files = tuple(
        _read(recipe, checkpoint, model, entry.path, f"lora.under[{number}]")
        for number, entry in enumerate(lora.under)
    )
    return StoredLoras(continued, frozen_files)


def checked(recipe: Recipe, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Read the files for the meta model, before hours of encoding; returns their metadata for the run's header.

    Raises `DitLoraError` for everything that `read_stored` and `attach_stored` would refuse.
    """
    lora = recipe.lora
    if not lora.from_file and not lora.under:
        return {}
    with torch.device("meta"), from_configs():
        model = checkpoint.load_transformer(torch.float32)
    stored, metadata = read_stored(recipe, checkpoint, model), dict[str, Any]()
    if stored.continued is not None:
        require_consistent(model, stored.continued, lora)
        metadata["continued"] = {"name": public_name(lora.init), **stored.continued.digests}
    if stored.under:
        metadata["under"] = [
            {
                "name": public_name(entry.path),
                **file.digests,
                "scale": entry.scale,
                "in_samples": entry.in_samples,
            }
            for entry, file in zip(lora.under, stored.under, strict=True)
        ]
    return metadata


def notes(recipe: Recipe, checkpoint: Checkpoint, transformer_digest: str) -> list[str]:
    """Warnings about files that were trained on other weights than this checkpoint's: they fit, but may not work as
    well.
    """
    options_and_paths = [(_INIT, recipe.lora.init)] if recipe.lora.from_file else []
    options_and_paths += [
        (f"lora.under[{n}]", entry.path) for n, entry in enumerate(recipe.lora.under)
    ]
    lines = []
    for option, path in options_and_paths:
        metadata = read_provenance(_found(checkpoint, path, option))
        # Files of other programs have no digest: there is nothing to warn about.
        if metadata.get("transformer_digest", transformer_digest) != transformer_digest:
            lines.append(
                f"warning: {option}: {public_name(path)} was trained on {metadata.get('base_model')}, "
                "with other weights than "
                f"this {checkpoint.path.name}"
            )
    return lines


def attach_stored(
    recipe: Recipe, model: nn.Module, stored: StoredLoras, targets: Sequence[str]
) -> str:
    """Attach the trained adapter (from the file, or new) and frozen ones below it; returns lines that describe them.

    `targets` are used if the recipe names none.
    """
    lora = recipe.lora
    # First, while the layers still have the names that the files use.
    configs = configs_under(model, [file.layers for file in stored.under])
    if stored.continued is None:
        description = str(attach_started(model, lora, targets, seed=recipe.train.seed))
    else:
        report = attach_lora_file(model, stored.continued, lora, targets, seed=recipe.train.seed)
        description = f"{report}; continued from {public_name(lora.init)}"
    if not stored.under:
        return description
    put_under(model, named_under(recipe, configs, stored))
    lines = [
        f"lora.under: {public_name(entry.path)}: {len(file.layers)} layers, scale {entry.scale:g}, frozen; "
        f"on in training{' and in samples' if entry.in_samples else ', off in samples'}"
        for entry, file in zip(lora.under, stored.under, strict=True)
    ]
    return "\n".join([description, *lines])


def named_under(
    recipe: Recipe, configs: Sequence[LoraConfig], stored: StoredLoras
) -> dict[str, tuple[LoraConfig, Mapping[str, StoredLayer], float]]:
    """The frozen adapters by their names in the model, as arguments for `put_under`."""
    rows = zip(configs, stored.under, recipe.lora.under, strict=True)
    return {
        under_name(number): (config, file.layers, entry.scale)
        for number, (config, file, entry) in enumerate(rows)
    }


def in_samples(recipe: Recipe) -> list[str]:
    """Names of the frozen adapters that are active in samples."""
    return [under_name(n) for n, entry in enumerate(recipe.lora.under) if entry.in_samples]


def require_moved(
    recipe: Recipe, checkpoint: Checkpoint, model: nn.Module, weights: Mapping[str, torch.Tensor]
) -> None:
    """Raise `CheckFailedError` if the adapter is bitwise equal to the one that training continued from.

    `weights` are the trained weights by name, unsharded.
    """
    if not recipe.lora.from_file or recipe.optim.groups.adapter is None:
        return
    with torch.device("meta"), from_configs():
        meta_model = checkpoint.load_transformer(torch.float32)
    continued = read_stored(recipe, checkpoint, meta_model).continued
    assert continued is not None
    for name, layer in continued.layers.items():
        # One changed matrix is enough.
        for part, initial in (("lora_A", layer.a), ("lora_B", layer.b)):
            # The adapter's name follows, which PEFT puts between the part and `weight`.
            (current,) = (t for n, t in weights.items() if n.startswith(f"{name}.{part}."))
            if not torch.equal(current.cpu(), initial):
                return
    raise CheckFailedError(
        f"refused to save: every matrix is that of {recipe.lora.init} still; nothing was learned beside it"
    )


def _read(
    recipe: Recipe, checkpoint: Checkpoint, model: nn.Module, named: str, option: str
) -> LoraFile:
    file = _found(checkpoint, named, option)
    metadata = read_provenance(file)
    # First: a file of another model has no name that fits, and the list of names says less.
    for field, expected in (("family", recipe.model.family), ("part", checkpoint.part)):
        stored_value = metadata.get(field)
        if stored_value is not None and stored_value != expected:
            raise DitLoraError(
                f"{option}: {named} is an adapter of {field} {stored_value}, not of {expected}"
            )
    names = get_family(recipe.model.family).comfyui
    return read_lora(file, model, names, checkpoint.pipeline_class)


def _found(checkpoint: Checkpoint, named: str, option: str) -> Path:
    file = _of_pair(checkpoint, named) or find_lora(named, option)
    require_file_as_verified(file, option)
    return file


def _of_pair(checkpoint: Checkpoint, named: str) -> Path | None:
    """This expert's file in a folder or repository with both experts' adapters; None if it has no such file."""
    folder = Path(named).expanduser()
    if not checkpoint.parts or folder.is_file():
        return None
    if hub_name(named) is not None and not named.endswith(".safetensors"):
        # A whole repository on the Hub: only its adapters are downloaded.
        folder = result_folder(named, (ADAPTER_FILE, *PAIR_PATTERNS))
    name = checkpoint.parts[checkpoint.part]
    matching = [
        file
        for file in files_of_experts(folder)
        if read_provenance(file).get("part") == checkpoint.part or file.stem.endswith(name)
    ]
    return matching[0] if matching else None
