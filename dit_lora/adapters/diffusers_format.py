"""Save adapters in Diffusers' format, with rank and alpha in the file's metadata.

Without this metadata a loader assumes alpha = rank. An adapter that was trained with alpha 64 and rank 128 would then
act at twice its strength.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.groups import get_base_parameters
from dit_lora.adapters.kinds import DROPOUT_OPTIONS
from dit_lora.adapters.lora_mixins import get_lora_pipeline_class
from dit_lora.adapters.own_files import copy_checkpoint_files
from dit_lora.adapters.start import build_adapter_state_for_saving, build_config_for_saving
from dit_lora.config.records import RunMetadata, parse_typed_json
from dit_lora.environment.pipeline_index import copy_index
from dit_lora.environment.safetensors_files import read_metadata, read_tensors, write_tensors
from dit_lora.errors import CheckFailedError, format_list
from dit_lora.files import set_shared_permissions, write_folder_atomically, write_json
from dit_lora.numerics.adapter_tensors import is_zero_initialized
from dit_lora.numerics.dtensors import get_original_class

ADAPTER_FILE = "pytorch_lora_weights.safetensors"  # diffusers' LORA_WEIGHT_NAME_SAFE
BASE_FILE = "base_weights.safetensors"
RUN_METADATA_KEY = "dit_lora"
# For in-context LoRAs. Lightricks/LTX-2 (ltx_pipelines/ic_lora.py) and ComfyUI-LTXVideo (iclora.py) read this key from
# the header, as a number in text, and default to 1.
DOWNSCALE_KEY = "reference_downscale_factor"
# For whole pipelines. An adapter has its provenance in the header.
RUN_METADATA_FILE = "dit_lora.json"

Tensors = Mapping[str, torch.Tensor]


def save_adapter(
    transformer: nn.Module,
    pipeline_class: Any,
    output_folder: Path,
    run_metadata: Mapping[str, Any],
    weights: Tensors | None = None,
) -> Path:
    """Write `out/pytorch_lora_weights.safetensors`, and `base_weights.safetensors` if base weights were trained.

    Args:
        transformer: The trained model.
        pipeline_class: Its `save_lora_weights` decides names and metadata.
        output_folder: Folder; an adapter in it is replaced.
        run_metadata: Added to the header.
        weights: Full trained weights by name, if those of the model are sharded over ranks.

    Returns the adapter's path. Raises `CheckFailedError`, before anything is written, for an adapter that is not
    finite or has no effect.
    """
    # PEFT's names without the adapter's name, from `weights` if given.
    trained = peft.get_peft_model_state_dict(transformer, weights, adapter_name=ADAPTER_NAME)
    lora = build_adapter_state_for_saving(transformer, trained)
    base = get_base_weights(transformer, weights)
    require_valid_tensors(lora, base)
    output_folder.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder first, so that a failure leaves an earlier adapter intact.
    staged = output_folder / ".staged"
    # JSON has no sets. They are sorted, because equal adapters must give equal files.
    config = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in build_config_for_saving(transformer, ADAPTER_NAME).to_dict().items()
    }
    # Diffusers leaves a loaded adapter in training mode, so its dropout would act on every sample.
    config |= {key: 0.0 for key in DROPOUT_OPTIONS if key in config}
    get_lora_pipeline_class(pipeline_class).save_lora_weights(
        staged, transformer_lora_layers=lora, transformer_lora_adapter_metadata=config
    )
    # Diffusers has written rank and alpha into the metadata.
    metadata = read_metadata(staged / ADAPTER_FILE) | build_header_entries(run_metadata)
    # safetensors cannot change metadata in place, so the file is written again.
    write_tensors(read_tensors(staged / ADAPTER_FILE), staged / ADAPTER_FILE, metadata)
    if base:
        # safetensors refuses tensors that are not contiguous.
        host = {name: tensor.cpu().contiguous() for name, tensor in base.items()}
        write_tensors(host, staged / BASE_FILE, metadata)
    move_staged_files(staged, output_folder, (BASE_FILE, ADAPTER_FILE))
    return output_folder / ADAPTER_FILE


def build_header_entries(run_metadata: Mapping[str, Any]) -> dict[str, str]:
    """Entries for a safetensors header: the run's metadata as JSON, and keys that other programs look for."""
    lines = {RUN_METADATA_KEY: json.dumps(dict(run_metadata), sort_keys=True)}
    # Values in a safetensors header are strings.
    return lines | {key: str(run_metadata[key]) for key in (DOWNSCALE_KEY,) if key in run_metadata}


def move_staged_files(staging_folder: Path, output_folder: Path, names: Sequence[str]) -> None:
    """Move files from a temporary folder to `output_folder`.

    Files in `names` that were not written this time are removed from `output_folder`.
    """
    set_shared_permissions(staging_folder)
    for name in names:
        if (staging_folder / name).exists():
            (staging_folder / name).replace(output_folder / name)
        else:
            # A file of this name is from an earlier run.
            (output_folder / name).unlink(missing_ok=True)
    # Raises if the folder is not empty: then a written file is missing from `names`.
    staging_folder.rmdir()


def save_pipeline(
    transformer: Any,
    base: Path,
    output_folder: Path,
    run_metadata: Mapping[str, Any],
    index: Mapping[str, Any],
    weights: Tensors | None = None,
    part: str = "transformer",
) -> Path:
    """Write a whole pipeline to `output_folder`: the checkpoint `base` with this transformer as its `part`.

    The components that the base's index names are copied, and no other files in the folder. Entries of
    `index` replace the base's. The folder is written under a temporary name and renamed. `weights` are those of
    `save_adapter`. Raises `CheckFailedError` for values that are not finite.
    """
    if weights is not None:
        # The sharded model cannot be saved itself: a model of the same config holds `weights` without a copy of them.
        holder: Any = get_original_class(transformer).from_config(transformer.config)  # type: ignore[attr-defined]
        # `weights` has parameters only; the model's state dict also has buffers that it computes.
        tables = {name: table for name, table in transformer.named_buffers() if name in holder.state_dict()}
        holder.load_state_dict({**weights, **tables}, assign=True)
        transformer = holder
    require_valid_tensors({}, dict(transformer.named_parameters()))
    with write_folder_atomically(output_folder, replace=True) as staged:
        # Every component but the trained one, which is written below.
        copy_checkpoint_files(base, staged, lambda name: not name.startswith(f"{part}/"))
        transformer.save_pretrained(staged / part, safe_serialization=True)
        copy_index(base, staged, index)
        write_json(staged / RUN_METADATA_FILE, run_metadata)
    return output_folder


def get_base_weights(model: nn.Module, weights: Tensors | None = None) -> dict[str, torch.Tensor]:
    """The trained base weights, by their names in a model without adapters; taken from `weights` if given."""
    trained = get_base_parameters(model)
    if weights is None:
        return {name: parameter.detach() for name, parameter in trained.items()}
    # PEFT wraps an adapted layer and moves its weight to `base_layer`.
    plain_names = {name.replace(".base_layer.", "."): tensor for name, tensor in weights.items()}
    return {name: plain_names[name] for name in trained}


def require_valid_tensors(lora: Mapping[str, torch.Tensor], base: Mapping[str, torch.Tensor] | None = None) -> None:
    """Raise `CheckFailedError` if a tensor is not finite, or if the adapter has no effect because every B is zero."""
    bad = [name for name, tensor in {**lora, **(base or {})}.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise CheckFailedError(format_list("cannot save: these tensors are not finite", bad))
    idle = {name: tensor for name, tensor in lora.items() if is_zero_initialized(name)}
    # These factors are zero before the first step; if all still are, nothing was trained.
    if idle and not any(tensor.any() for tensor in idle.values()):
        factor = "B matrix" if any("lora_B" in name for name in idle) else "last factor"
        raise CheckFailedError(
            f"cannot save: every {factor} is zero, so the adapter has no effect; no gradient reached it"
        )


def read_run_metadata(file: Path) -> dict[str, Any]:
    """Read the metadata that a run wrote into the adapter's header; empty for files of other programs."""
    text = read_metadata(file).get(RUN_METADATA_KEY, "{}")
    return dict(parse_typed_json(text, RunMetadata, f"{file}: its header's {RUN_METADATA_KEY}"))
