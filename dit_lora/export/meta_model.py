"""Attaches adapters to models without weights, to get PEFT's names, shapes and scales without the base's memory.

A meta model has the base's architecture, and every weight is a single zero expanded to its shape.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME, PEFT_PREFIX, get_adapter_state
from dit_lora.adapters.attach_file import build_peft_config
from dit_lora.adapters.diffusers_format import BASE_FILE, Tensors, require_valid_tensors
from dit_lora.adapters.layer_names import UNKNOWN_NAMES, LayerNames
from dit_lora.adapters.lora_file import LoraFile, StoredLayer, read_lora
from dit_lora.adapters.lora_mixins import add_adapter_methods
from dit_lora.environment.safetensors_files import read_tensors
from dit_lora.errors import DitLoraError, format_list

_COMBINED_ADAPTER = "combined"

AdapterState = Mapping[str, torch.Tensor]
"""LoRA matrices as `<layer>.lora_A.weight`, `<layer>.lora_B.weight`."""


def replace_weights_with_zeros(model: nn.Module) -> Any:
    """Replace every weight of the model by an expanded zero on the CPU. Frozen, with LoRA methods."""
    # Copy the names first, because the loop replaces the parameters it walks over.
    for name, parameter in list(model.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        # An expanded scalar has the full shape and the memory of one number.
        empty = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(empty, requires_grad=False))
    return add_adapter_methods(model.eval())


def load_lora_file(model: Any, file: Path, pipeline_class: Any, comfyui_names: LayerNames = UNKNOWN_NAMES) -> None:
    """Load a LoRA file of any format that `read_lora` knows, with the base weights next to it, into a meta model.

    The base weights are then trainable, as they were in the run.

    Raises:
        DitLoraError: The file does not fit; lists all problems.
        CheckFailedError: A tensor is not finite, or the adapter has no effect.
    """
    lora_file = read_lora(file, model, comfyui_names, pipeline_class)
    # Trained base weights lie in a file of their own next to the adapter.
    base = file.with_name(BASE_FILE)
    weights = read_base_weights(base, model) if base.is_file() else {}
    state = build_adapter_state(lora_file.layers)
    # Reject NaN, Inf and adapters without effect before they reach a model.
    require_valid_tensors(state, weights)
    load_lora_state(model, state, _build_peft_config(lora_file), file, weights)


def _build_peft_config(lora_file: LoraFile) -> dict[str, Any] | None:
    """PEFT's config for a LoRA file; None if alpha is the rank, which every loader assumes."""
    if "config_sha256" in lora_file.digests and lora_file.config is not None:
        # Read with PEFT, which ignores fields of other versions. Drop the base's name: it is a path of the machine
        # that trained it, or a Hub id that PEFT would look up.
        config = peft.PeftConfig.from_pretrained(str(lora_file.file.parent)).to_dict()
        return {**config, "base_model_name_or_path": None}
    if lora_file.config is not None or all(layer.alpha == layer.rank for layer in lora_file.layers.values()):
        return dict(lora_file.config) if lora_file.config else None
    return build_peft_config(lora_file.layers, list(lora_file.layers)).to_dict()


def build_adapter_state(layers: Mapping[str, StoredLayer]) -> dict[str, torch.Tensor]:
    """The LoRA matrices of these layers, by their names in PEFT's state dict."""
    matrices = {name: (("A", layer.a), ("B", layer.b)) for name, layer in layers.items()}
    return {f"{name}.lora_{side}.weight": matrix for name, pair in matrices.items() for side, matrix in pair}


def load_lora_state(
    model: Any, state: AdapterState, config: Mapping[str, Any] | None, source: object, weights: Tensors | None = None
) -> None:
    """Attach LoRA matrices as Diffusers does, and load trained base weights.

    Without `config`, alpha is the rank. Raises `DitLoraError` if the matrices do not load.
    """
    if not state:
        raise DitLoraError(f"{source} has no LoRA matrices of a transformer")
    weights = weights or {}
    # Base weights first: PEFT renames an adapted layer's weight to `base_layer.weight`.
    load_base_weights(model, weights)
    try:
        # `prefix=None`: the keys are already relative to this transformer.
        model.load_lora_adapter(
            dict(state), prefix=None, metadata=dict(config) if config else None, adapter_name=ADAPTER_NAME
        )
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        # The first line is enough for a one-line message.
        reason = str(error).strip().splitlines()[0]
        raise DitLoraError(f"{source} does not load into {type(model).__name__}: {reason}") from error
    unfreeze_weights(model, weights)


def load_base_weights(model: nn.Module, weights: Tensors) -> None:
    """Load base weights into the model. Call it before an adapter is attached, because that renames the layers."""
    for name, weight in weights.items():
        owner, _, attribute = name.rpartition(".")
        # Trained weights are fp32, as the optimizer kept them.
        setattr(model.get_submodule(owner), attribute, nn.Parameter(weight.float()))


def unfreeze_weights(model: nn.Module, weights: Tensors) -> None:
    """Make these base weights trainable: PEFT has frozen every parameter except its own."""
    for name, parameter in model.named_parameters():
        if name.replace(".base_layer.", ".") in weights:
            parameter.requires_grad_(True)


def combine_adapters(
    models: Sequence[Any], weights: Sequence[float], empty_model: Any
) -> tuple[AdapterState, peft.LoraConfig]:
    """Matrices and config of one adapter whose update is exactly the weighted sum of the models' adapters.

    PEFT's `add_weighted_adapter` with `cat` concatenates the matrices, so the ranks add up. `empty_model` is a meta
    model without an adapter.
    """
    # Dropout has no effect on the combined matrices.
    configs = [dataclasses.replace(model.peft_config[ADAPTER_NAME], lora_dropout=0.0) for model in models]
    # PEFT needs one adapter name per adapter on the shared model.
    names = [f"adapter_{number}" for number in range(len(models))]
    wrapped: Any = peft.PeftModel(empty_model, configs[0], adapter_name=names[0])
    for name, config in zip(names[1:], configs[1:], strict=True):
        wrapped.add_adapter(name, config)
    for name, model in zip(names, models, strict=True):
        state = {f"{PEFT_PREFIX}{key}": tensor for key, tensor in get_adapter_state(model).items()}
        peft.set_peft_model_state_dict(wrapped, state, adapter_name=name)
    # `cat` is exact. PEFT's `linear` would add factors, whose product is not the sum of the products.
    wrapped.base_model.add_weighted_adapter(names, list(weights), _COMBINED_ADAPTER, combination_type="cat")
    return get_adapter_state(wrapped, _COMBINED_ADAPTER), wrapped.peft_config[_COMBINED_ADAPTER]


def fold_alpha_into_b(model: Any) -> tuple[AdapterState, peft.LoraConfig]:
    """LoRA matrices and config of the same update with alpha equal to rank: alpha / rank is folded into B."""
    # The scale of each layer goes into B only, so that B A stays the same product.
    config, state = model.peft_config[ADAPTER_NAME], get_adapter_state(model)
    for name in [name for name in state if name.endswith(".lora_B.weight")]:
        layer = model.get_submodule(name.removesuffix(".lora_B.weight"))
        state[name] = state[name] * layer.scaling[ADAPTER_NAME]
    # Layers with a different rank get the same alpha, so that every scale is 1.
    ranks = dict(config.rank_pattern or {})
    return state, dataclasses.replace(config, lora_alpha=config.r, alpha_pattern=ranks, use_rslora=False)


def read_base_weights(file: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Base weights in a file. Raises `DitLoraError` with all that do not belong to this model."""
    weights = read_tensors(file)
    # The file may only hold weights of this model, at their exact shapes.
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    mismatches = [
        f"{name}: {list(weight.shape)} in the file, {shapes.get(name, 'none')} in the model"
        for name, weight in weights.items()
        if shapes.get(name) != list(weight.shape)
    ]
    if mismatches:
        raise DitLoraError(format_list(f"{file} is of another model", mismatches))
    return weights
