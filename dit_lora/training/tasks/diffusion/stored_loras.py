"""Reads the LoRA files that a recipe starts from, and describes them in a run's metadata."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from dit_lora.adapters.attach_file import attach_lora_file, require_recipe_matches_lora
from dit_lora.adapters.diffusers_format import ADAPTER_FILE, read_run_metadata
from dit_lora.adapters.find_lora import find_lora, get_public_name
from dit_lora.adapters.lora_file import LoraFile, StoredLayer, read_lora
from dit_lora.adapters.start import attach_initialized_lora
from dit_lora.adapters.under import attach_frozen_adapters, build_frozen_configs, get_frozen_adapter_name
from dit_lora.config.recipe import Recipe
from dit_lora.config.remedies import get_hub_name
from dit_lora.environment.hub_files import resolve_result_folder
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Checkpoint, CheckpointInfo
from dit_lora.families.without_weights import build_from_configs
from dit_lora.verify.expert_pair import EXPERT_FILE_PATTERNS, find_adapter_files
from dit_lora.verify.verified_files import require_file_unchanged

_INIT_OPTION = "lora.init"


@dataclass(frozen=True)
class RecipeLoraFiles:
    """LoRA files from which a run starts, read for one model."""

    initial_file: LoraFile | None = None
    """The file that training continues from; None for a new adapter."""
    under_files: tuple[LoraFile, ...] = ()
    """The files of `lora.under`, in order."""


def read_recipe_lora_files(
    recipe: Recipe, checkpoint: Checkpoint, model: nn.Module, *, only_under: bool = False
) -> RecipeLoraFiles:
    """Read the LoRA files of a recipe for a model without adapters.

    Raises `DitLoraError` if they are missing or another model's.
    """
    lora, continued = recipe.lora, None
    # A second checkpoint, for samples, gets the trained adapter and not the file that it started from.
    if lora.has_file_init and not only_under:
        continued = _read_lora_file(recipe, checkpoint, model, lora.init, _INIT_OPTION)
    frozen_files = tuple(
        _read_lora_file(recipe, checkpoint, model, entry.path, f"lora.under[{number}]")
        for number, entry in enumerate(lora.under)
    )
    return RecipeLoraFiles(continued, frozen_files)


def check_lora_files(recipe: Recipe, checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Read the recipe's LoRA files for the meta model, before hours of encoding.

    Returns their metadata for the run's header.

    Raises `DitLoraError` for all that `read_recipe_lora_files` and `attach_trained_and_frozen_loras` would refuse.
    """
    lora = recipe.lora
    if not lora.has_file_init and not lora.under:
        return {}
    # Names and shapes are all that the checks need.
    with torch.device("meta"), build_from_configs():
        model = checkpoint.denoiser.load_transformer(torch.float32)
    stored, metadata = read_recipe_lora_files(recipe, checkpoint, model), dict[str, Any]()
    if stored.initial_file is not None:
        require_recipe_matches_lora(model, stored.initial_file, lora)
        metadata["continued"] = {"name": get_public_name(lora.init), **stored.initial_file.digests}
    if stored.under_files:
        metadata["under"] = [
            {"name": get_public_name(entry.path), **file.digests, "scale": entry.scale, "in_samples": entry.in_samples}
            for entry, file in zip(lora.under, stored.under_files, strict=True)
        ]
    return metadata


def find_base_mismatches(recipe: Recipe, checkpoint: Checkpoint, transformer_digest: str) -> list[str]:
    """Warnings about LoRA files trained on other weights than this checkpoint's.

    They fit, but may not work as well.
    """
    options_and_paths = [(_INIT_OPTION, recipe.lora.init)] if recipe.lora.has_file_init else []
    options_and_paths += [(f"lora.under[{n}]", entry.path) for n, entry in enumerate(recipe.lora.under)]
    lines = []
    for option, path in options_and_paths:
        metadata = read_run_metadata(_find_lora_file(checkpoint.info, path, option))
        # Files of other programs have no digest: there is nothing to warn about.
        if metadata.get("transformer_digest", transformer_digest) != transformer_digest:
            lines.append(
                f"warning: {option}: {get_public_name(path)} was trained on {metadata.get('base_model')}, with other "
                f"weights than this {checkpoint.path.name}"
            )
    return lines


def attach_trained_and_frozen_loras(
    recipe: Recipe, model: nn.Module, stored: RecipeLoraFiles, targets: Sequence[str]
) -> list[str]:
    """Attach the trained adapter (from the file, or new) and frozen ones below it.

    Returns a line on each, the trained one first. `targets` are used if the recipe names none.
    """
    lora = recipe.lora
    # First, while the layers still have the names that the files use.
    configs = build_frozen_configs(model, [file.layers for file in stored.under_files])
    if stored.initial_file is None:
        description = str(attach_initialized_lora(model, lora, targets, seed=recipe.train.seed))
    else:
        report = attach_lora_file(model, stored.initial_file, lora, targets, seed=recipe.train.seed)
        description = f"{report}, continued from {get_public_name(lora.init)}"
    if not stored.under_files:
        return [description]
    attach_frozen_adapters(model, map_frozen_adapters_by_name(recipe, configs, stored))
    lines = [
        f"lora.under: {get_public_name(entry.path)}: {len(file.layers)} layers, scale {entry.scale:g}, frozen; "
        f"on in training{' and in samples' if entry.in_samples else ', off in samples'}"
        for entry, file in zip(lora.under, stored.under_files, strict=True)
    ]
    return [description, *lines]


def map_frozen_adapters_by_name(
    recipe: Recipe, configs: Sequence[LoraConfig], stored: RecipeLoraFiles
) -> dict[str, tuple[LoraConfig, Mapping[str, StoredLayer], float]]:
    """The frozen adapters by their names in the model, as arguments for `attach_frozen_adapters`."""
    rows = zip(configs, stored.under_files, recipe.lora.under, strict=True)
    return {
        get_frozen_adapter_name(number): (config, file.layers, entry.scale)
        for number, (config, file, entry) in enumerate(rows)
    }


def list_sample_adapters(recipe: Recipe) -> list[str]:
    """Names of the frozen adapters that are active in samples."""
    return [get_frozen_adapter_name(n) for n, entry in enumerate(recipe.lora.under) if entry.in_samples]


def require_changed_adapter(
    recipe: Recipe, checkpoint: Checkpoint, model: nn.Module, weights: Mapping[str, torch.Tensor]
) -> None:
    """Raise `CheckFailedError` if the adapter is bitwise equal to the one that training continued from.

    `weights` are the trained weights by name, unsharded.
    """
    if not recipe.lora.has_file_init or recipe.optim.groups.adapter is None:
        return
    with torch.device("meta"), build_from_configs():
        meta_model = checkpoint.denoiser.load_transformer(torch.float32)
    continued = read_recipe_lora_files(recipe, checkpoint, meta_model).initial_file
    assert continued is not None
    # One changed matrix is enough.
    for name, layer in continued.layers.items():
        for part, initial in (("lora_A", layer.a), ("lora_B", layer.b)):
            # The adapter's name follows, which PEFT puts between the part and `weight`.
            (current,) = (t for n, t in weights.items() if n.startswith(f"{name}.{part}."))
            if not torch.equal(current.cpu(), initial):
                return
    raise CheckFailedError(f"cannot save: every matrix is still that of {recipe.lora.init}, so nothing was learned")


def _read_lora_file(recipe: Recipe, checkpoint: Checkpoint, model: nn.Module, location: str, option: str) -> LoraFile:
    file = _find_lora_file(checkpoint.info, location, option)
    metadata = read_run_metadata(file)
    # First: a file of another model has no name that fits, and the list of names says less.
    for field, expected in (("family", recipe.model.family), ("part", checkpoint.info.part)):
        stored_value = metadata.get(field)
        if stored_value is not None and stored_value != expected:
            raise DitLoraError(f"{option}: {location} is an adapter of {field} {stored_value}, not of {expected}")
    names = get_family(recipe.model.family).comfyui
    return read_lora(file, model, names, checkpoint.info.pipeline_class)


def _find_lora_file(info: CheckpointInfo, location: str, option: str) -> Path:
    file = _find_expert_file(info, location) or find_lora(location, option)
    require_file_unchanged(file, option)
    return file


def _find_expert_file(info: CheckpointInfo, location: str) -> Path | None:
    """The adapter file of this expert in a folder or repository with both experts' adapters.

    None if it has no such file.
    """
    folder = Path(location).expanduser()
    if not info.expert_names or folder.is_file():
        return None
    if get_hub_name(location) is not None and not location.endswith(".safetensors"):
        # A whole repository on the Hub: only its adapters are downloaded.
        folder = resolve_result_folder(location, (ADAPTER_FILE, *EXPERT_FILE_PATTERNS))
    name = info.expert_names[info.part]
    matching = [
        file
        for file in find_adapter_files(folder)
        if read_run_metadata(file).get("part") == info.part or file.stem.endswith(name)
    ]
    return matching[0] if matching else None
