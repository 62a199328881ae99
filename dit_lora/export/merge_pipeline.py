"""Merges diffusion adapters into their base: a full pipeline for stock `from_pretrained`, without PEFT."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dit_lora.adapters.changed_weight import WeightChange
from dit_lora.adapters.diffusers_format import RUN_METADATA_FILE, Tensors
from dit_lora.adapters.own_files import copy_checkpoint_files, require_valid_json
from dit_lora.environment.pipeline_index import copy_index
from dit_lora.environment.safetensors_files import FLOAT_DTYPES, open_safetensors, read_header, write_tensors
from dit_lora.errors import CheckFailedError, DitLoraError, format_list
from dit_lora.files import read_json, write_json

_SHARD_INDEX_FILE = "diffusion_pytorch_model.safetensors.index.json"
# Does not match files of a variant such as fp16 (`model.fp16.safetensors`), which are not read.
_WEIGHTS_PATTERN = re.compile(r"diffusion_pytorch_model(-\d+-of-\d+)?\.safetensors")

ProgressWrapper = Callable[[Iterable[Any]], Iterable[Any]]
"""Wraps an iterable in a progress bar, as tqdm does."""
WeightChanges = Mapping[str, WeightChange]
"""Layer names to the changes of their weights."""


def write_merged_pipeline(
    base: Path,
    output_dir: Path,
    changes: WeightChanges,
    weights: Tensors,
    *,
    transformer_config_changes: Mapping[str, Any],
    model_index_changes: Mapping[str, Any],
    training_metadata: Mapping[str, Any],
    part: str = "transformer",
    progress: ProgressWrapper = iter,
) -> None:
    """Write `output_dir` as a copy of the pipeline `base` with `changes` and `weights` merged into its transformer.

    Each changed weight is computed in fp32 and rounded once to its stored dtype. Every other tensor, and the files of
    other components, stay byte-identical. Only one file of the transformer is in memory at a time.

    Args:
        base: The base pipeline's folder.
        output_dir: The folder to write.
        changes: The adapter's changes by layer.
        weights: Trained base weights, which replace those of the base.
        transformer_config_changes: Entries to replace in the base's PART/config.json.
        model_index_changes: Entries to replace in the base's index.
        training_metadata: Metadata to write.
        part: The transformer component.
        progress: Progress bar over the tensors.

    Raises:
        DitLoraError: The base is quantized, lacks a layer, or has a torn JSON file.
        CheckFailedError: A merged weight is not finite.
    """
    # Check everything first: nothing is written for a base that cannot be merged into.
    require_valid_json(base)
    source = base / part
    base_config = read_json(source / "config.json")
    files = _require_mergeable(source, base_config, changes, weights)
    # The index of the shards stays valid, because merged files keep their names and tensors.
    copy_checkpoint_files(
        base, output_dir, lambda name: not name.startswith(f"{part}/") or name == f"{part}/{_SHARD_INDEX_FILE}"
    )
    (output_dir / part).mkdir(exist_ok=True)
    write_json(output_dir / part / "config.json", {**base_config, **transformer_config_changes})
    copy_index(base, output_dir, model_index_changes)
    write_json(output_dir / RUN_METADATA_FILE, training_metadata)
    for file, names in files.items():
        with open_safetensors(file) as opened:
            metadata = opened.metadata()
            tensors = {n: _merge_tensor(n, opened.get_tensor(n), changes, weights) for n in progress(names)}
        bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        if bad:
            raise CheckFailedError(format_list(f"refused to write {file.name}: not finite once merged", bad))
        # Same file name and metadata as in the base.
        write_tensors(tensors, output_dir / part / file.name, metadata)


def require_merged_weights(source: Path, transformer: Any, changes: WeightChanges, weights: Tensors) -> None:
    """Raise `CheckFailedError` unless the loaded transformer's weights equal an fp64 merge up to one rounding."""
    loaded = dict(transformer.named_parameters())
    deviating = []
    for file in list_weight_files(source):
        with open_safetensors(file) as opened:
            for name in opened.keys():  # noqa: SIM118
                change = changes.get(name.removesuffix(".weight"))
                if change is None and name not in weights:
                    continue
                stored_tensor = opened.get_tensor(name)
                # fp64 as the exact reference: the merge itself computed in fp32.
                unmerged = weights.get(name, stored_tensor).double()
                exact = change.apply_to_weight(unmerged) if change else unmerged
                precision = torch.finfo(stored_tensor.dtype)
                # One rounding to the stored dtype, plus fp32's error in products: of the added part, or of all.
                computed = exact - unmerged if change is None or change.is_additive_change else exact
                slack = 1e-6 * computed.abs().max()
                allowed = precision.eps * (exact.abs() + precision.tiny) + slack
                if loaded[name].shape != exact.shape or not ((loaded[name].double() - exact).abs() <= allowed).all():
                    deviating.append(name)
    if deviating:
        summary = "these merged weights, read back, are not base plus adapter; nothing was kept"
        raise CheckFailedError(format_list(summary, deviating))


def find_widest_dtype(source: Path) -> torch.dtype:
    """The widest dtype of the transformer's weights: loading them in it loses nothing."""
    headers = [tensor for file in list_weight_files(source) for tensor in read_header(file).tensors.values()]
    kinds = {FLOAT_DTYPES[tensor.dtype] for tensor in headers if tensor.dtype in FLOAT_DTYPES}
    return functools.reduce(torch.promote_types, kinds)


def _merge_tensor(name: str, tensor: torch.Tensor, changes: WeightChanges, weights: Tensors) -> torch.Tensor:
    """The merged weight in its stored dtype. It is unchanged without a change or a trained weight."""
    change = changes.get(name.removesuffix(".weight"))
    if change is None and name not in weights:
        return tensor
    # A trained base weight replaces the base's; the adapter's change applies to either.
    total = weights.get(name, tensor).float()
    return (change.apply_to_weight(total) if change else total).to(tensor.dtype)


def _require_mergeable(
    source: Path, config: Mapping[str, Any], changes: WeightChanges, weights: Tensors
) -> dict[Path, list[str]]:
    """The transformer's weight files with their tensors' names.

    Raises `DitLoraError` if a weight cannot be merged into.
    """
    if "quantization_config" in config:
        raise DitLoraError(f"{source} is quantised; give --model the checkpoint that it was made from")
    # Every tensor that the merge writes must exist and have a floating-point dtype.
    changed_names = {*weights, *(f"{name}.weight" for name in changes)}
    files: dict[Path, list[str]] = {}
    faults = []
    for file in list_weight_files(source):
        tensors = read_header(file).tensors
        files[file] = list(tensors)
        for name in changed_names.intersection(tensors):
            dtype = tensors[name].dtype
            faults += [] if dtype in FLOAT_DTYPES else [f"{name}: {dtype}"]
    present = {name for names in files.values() for name in names}
    faults += [f"{name}: not there" for name in changed_names - present]
    if faults:
        summary = f"{source} needs these weights in fp32, bf16 or fp16, to merge into"
        raise DitLoraError(format_list(summary, sorted(faults)))
    return files


def list_weight_files(folder: Path) -> list[Path]:
    """The weight files in a transformer's folder. Raises `DitLoraError` if there are none."""
    files = [file for file in sorted(folder.glob("*.safetensors")) if _WEIGHTS_PATTERN.fullmatch(file.name)]
    if not files:
        raise DitLoraError(f"{folder} has no diffusion_pytorch_model.safetensors")
    return files
