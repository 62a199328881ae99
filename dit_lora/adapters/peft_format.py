"""Save and load chat models' adapters in PEFT's folder format, with base weights that were trained too."""

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from torch import nn
from transformers import PreTrainedModel

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.diffusers_format import (
    BASE_FILE,
    RUN_METADATA_KEY,
    Tensors,
    get_base_weights,
    move_staged_files,
    require_valid_tensors,
)
from dit_lora.adapters.kinds import DROPOUT_OPTIONS
from dit_lora.adapters.patterns import read_peft_config
from dit_lora.adapters.start import build_adapter_state_for_saving, build_config_for_saving
from dit_lora.environment.safetensors_files import read_tensors, write_tensors
from dit_lora.errors import CheckFailedError, DitLoraError, format_list
from dit_lora.numerics.adapter_tensors import is_adapter_tensor
from dit_lora.numerics.dtensors import get_original_class

CHAT_ADAPTER_FILE = SAFETENSORS_WEIGHTS_NAME  # adapter_model.safetensors
# Prefix that PeftModel.save_pretrained puts before every name.
_PREFIX = "base_model.model."


def save_chat_adapter(
    model: nn.Module, output_folder: Path, run_metadata: Mapping[str, Any], weights: Tensors | None = None
) -> Path:
    """Write `output_folder` so that `PeftModel.from_pretrained(base, out)` and `base.load_adapter(out)` can load it.

    Trained base weights are written to `base_weights.safetensors`; if only they were trained, there is no
    `adapter_config.json`. Provenance is in the headers, and its `base_model` and `revision` become those of PEFT's
    config. `weights` are the full trained weights by name, if those of the model are sharded over ranks.

    Returns the adapter's file, or the base weights' if there is no adapter. Raises `CheckFailedError`, before anything
    is written, for values that are not finite or an adapter that has no effect.
    """
    lora, base = _get_adapter_tensors(model, weights), get_base_weights(model, weights)
    if not lora and not base:
        raise CheckFailedError("cannot save: the model has no adapter and no trained weights")
    require_valid_tensors(lora, base)
    # Written to a temporary folder first, so that a failure leaves an earlier adapter intact.
    staged = output_folder / ".staged"
    # A killed process may have left it.
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    metadata = {"format": "pt", RUN_METADATA_KEY: json.dumps(dict(run_metadata), sort_keys=True)}
    if lora:
        _build_folder_config(model, run_metadata).save_pretrained(str(staged))
    for file, tensors in ((CHAT_ADAPTER_FILE, lora), (BASE_FILE, base)):
        if tensors:
            on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
            write_tensors(on_host, staged / file, metadata)
    move_staged_files(staged, output_folder, (BASE_FILE, CHAT_ADAPTER_FILE, CONFIG_NAME))
    return find_chat_adapter_file(output_folder)


def load_chat_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Load a saved adapter and base weights into a newly loaded model, and freeze it in inference mode.

    The adapter stays fp32; base weights are rounded to the model's dtype. Raises `DitLoraError` that lists all tensors
    that do not fit; the model must not be used afterwards.
    """
    find_chat_adapter_file(folder)
    # Either may be empty: a run may train only base weights, or only an adapter.
    weights, tensors = (read_tensors(folder / name, missing_ok=True) for name in (BASE_FILE, CHAT_ADAPTER_FILE))
    # Read the names now: PEFT renames the parameters of layers that it wraps.
    parameters = dict(model.named_parameters())
    trained = {name: parameters[name] for name in weights if name in parameters}
    _require_matching_tensors(folder / BASE_FILE, weights, trained)
    if tensors:
        _add_adapter(model, folder)
        added = _get_adapter_tensors(model)
        _require_matching_tensors(folder / CHAT_ADAPTER_FILE, tensors, added)
    # Everything fits now: copy into the model's own parameters.
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
        for name, tensor in tensors.items():
            added[name].copy_(tensor)
    # PEFT has made the adapter trainable.
    model.requires_grad_(False).eval()


def find_chat_adapter_file(folder: Path) -> Path:
    """The adapter's file in a folder, or the base weights' file if there is no adapter.

    Raises `DitLoraError` if the folder has neither.
    """
    for name in (CHAT_ADAPTER_FILE, BASE_FILE):
        if (folder / name).is_file():
            return folder / name
    raise DitLoraError(f"no adapter in {folder}: neither {CHAT_ADAPTER_FILE} nor {BASE_FILE}")


def _get_adapter_tensors(model: nn.Module, weights: Tensors | None = None) -> dict[str, torch.Tensor]:
    """The adapter's tensors by PEFT's names, sharing memory with the model or `weights`; empty without an adapter."""
    if not any(is_adapter_tensor(name) for name, _ in model.named_parameters()):
        return {}
    # By default, PEFT asks the Hub whether the frozen weight of an adapted head should be saved.
    state = peft.get_peft_model_state_dict(model, weights, adapter_name=ADAPTER_NAME, save_embedding_layers=False)
    tensors = build_adapter_state_for_saving(model, state)
    return {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}


def _build_folder_config(model: Any, run_metadata: Mapping[str, Any]) -> peft.PeftConfig:
    # A copy: the model's own config keeps dropout for training.
    config: Any = copy.deepcopy(build_config_for_saving(model, ADAPTER_NAME))
    # The model's own name is a local path.
    config.base_model_name_or_path = run_metadata.get("base_model")
    config.revision = run_metadata.get("revision")
    config.inference_mode = True
    # Not every version of Transformers leaves training mode when it loads an adapter.
    for name in DROPOUT_OPTIONS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    # PeftModel.save_pretrained writes this where the task has no type.
    config.auto_mapping = {
        "base_model_class": get_original_class(model).__name__,
        "parent_library": get_original_class(model).__module__,
    }
    # Sets have no fixed order, and equal adapters must give equal files.
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    return config


def _add_adapter(model: PreTrainedModel, folder: Path) -> None:
    read_peft_config(folder / CONFIG_NAME)
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        model.add_adapter(config, adapter_name=ADAPTER_NAME)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise DitLoraError(f"{folder / CONFIG_NAME} does not fit {type(model).__name__}: {error}") from error
    # PEFT's matrices follow the base's dtype.
    for name, parameter in model.named_parameters():
        if is_adapter_tensor(name):
            parameter.data = parameter.data.float()


def _require_matching_tensors(
    file: Path, stored: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    """Raise `DitLoraError` unless a file's tensors and those of the model have the same names and shapes."""
    # In both directions, then shapes.
    faults = [f"{name}: not in the model" for name in stored if name not in expected]
    faults += [f"{name}: not in the file" for name in expected if name not in stored]
    faults += [
        f"{name}: {list(stored[name].shape)} in the file, {list(expected[name].shape)} in the model"
        for name in stored
        if name in expected and stored[name].shape != expected[name].shape
    ]
    if faults:
        raise DitLoraError(format_list(f"{file} belongs to a different model", faults))
