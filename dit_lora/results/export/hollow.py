"""Hollow models: adapters with names, shapes and scales as PEFT gives them, without the memory of the base.

A hollow model is the base's architecture with every weight a single zero, expanded to its shape.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.attach_file import peft_config
from dit_lora.adapters.diffusers_format import BASE_FILE, Tensors, require_sound
from dit_lora.adapters.layer_names import UNKNOWN, LayerNames
from dit_lora.adapters.lora_file import LoraFile, read_lora
from dit_lora.adapters.lora_mixins import adaptable
from dit_lora.errors import DitLoraError, listed

_PREFIX = "base_model.model."
_COMBINED = "combined"

State = Mapping[str, torch.Tensor]
"""LoRA matrices as `<layer>.lora_A.weight`, `<layer>.lora_B.weight`."""


def hollowed(model: nn.Module) -> Any:
    """Return the model, frozen, on the CPU, with LoRA methods; its weights hold nothing."""
    for name, parameter in list(model.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        # An expanded scalar has the shape and takes the memory of one number.
        empty = torch.zeros((), dtype=torch.float32).expand(parameter.shape)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(empty, requires_grad=False))
    return adaptable(model.eval())


def load_lora_file(
    model: Any, file: Path, pipeline_class: Any, comfyui: LayerNames = UNKNOWN
) -> None:
    """Load a LoRA's file of any form that `read_lora` knows, and the base weights beside it, into a hollow model.

    Base weights are then what trains in it, as they did in the run. Raises `DitLoraError` with all that
    does not fit, and `CheckFailedError` if a tensor is not finite or if the adapter has no effect.
    """
    stored = read_lora(file, model, comfyui, pipeline_class)
    base = file.with_name(BASE_FILE)
    weights = read_weights(base, model) if base.is_file() else {}
    state = {
        f"{name}.lora_{part}.weight": matrix
        for name, layer in stored.layers.items()
        for part, matrix in (("A", layer.a), ("B", layer.b))
    }
    require_sound(state, weights)
    load_state(model, state, _config(stored), file, weights)


def _config(stored: LoraFile) -> dict[str, Any] | None:
    """Return PEFT's config of a file; None where alpha is the rank, as every loader takes it."""
    if "config_sha256" in stored.digests and stored.config is not None:
        # By PEFT, which passes over what other versions of it wrote. The base's name is a path of the machine that
        # trained it, or one for which PEFT would ask the Hub.
        config = peft.PeftConfig.from_pretrained(str(stored.file.parent)).to_dict()
        return {**config, "base_model_name_or_path": None}
    if stored.config is not None or all(one.alpha == one.rank for one in stored.layers.values()):
        return dict(stored.config) if stored.config else None
    return peft_config(stored.layers, list(stored.layers)).to_dict()


def load_state(
    model: Any,
    state: State,
    config: Mapping[str, Any] | None,
    source: object,
    weights: Tensors | None = None,
) -> None:
    """Attach LoRA matrices as Diffusers does, and put base weights in, as trained.

    Without `config`, alpha is the rank. Raises `DitLoraError` if the matrices do not load.
    """
    if not state:
        raise DitLoraError(f"{source} has no LoRA matrices of a transformer")
    weights = weights or {}
    put_weights(model, weights)
    try:
        model.load_lora_adapter(
            dict(state),
            prefix=None,
            metadata=dict(config) if config else None,
            adapter_name=ADAPTER_NAME,
        )
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DitLoraError(
            f"{source} does not load into {type(model).__name__}: {reason}"
        ) from error
    mark_trained(model, weights)


def put_weights(model: nn.Module, weights: Tensors) -> None:
    """Put base weights in, before an adapter, which renames the layers that it wraps."""
    for name, weight in weights.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(weight.float()))


def mark_trained(model: nn.Module, weights: Tensors) -> None:
    """Let these base weights be what trains beside the adapter: PEFT has frozen every parameter but its own."""
    for name, parameter in model.named_parameters():
        if name.replace(".base_layer.", ".") in weights:
            parameter.requires_grad_(True)


def state_of(model: Any, adapter: str = ADAPTER_NAME) -> dict[str, torch.Tensor]:
    """Return the matrices of an attached adapter."""
    state = peft.get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}


def combine(
    models: Sequence[Any], weights: Sequence[float], onto: Any
) -> tuple[State, peft.LoraConfig]:
    """Return matrices and config whose update is the weighted sum of the models' adapters, exactly; through PEFT.

    `add_weighted_adapter` with `cat` puts matrices one after another, so that ranks add up. `onto` is a
    hollow model without an adapter.
    """
    configs = [
        dataclasses.replace(model.peft_config[ADAPTER_NAME], lora_dropout=0.0) for model in models
    ]
    names = [f"adapter_{number}" for number in range(len(models))]
    wrapped: Any = peft.PeftModel(onto, configs[0], adapter_name=names[0])
    for name, config in zip(names[1:], configs[1:], strict=True):
        wrapped.add_adapter(name, config)
    for name, model in zip(names, models, strict=True):
        state = {f"{_PREFIX}{key}": tensor for key, tensor in state_of(model).items()}
        peft.set_peft_model_state_dict(wrapped, state, adapter_name=name)
    wrapped.base_model.add_weighted_adapter(names, list(weights), _COMBINED, combination_type="cat")
    return state_of(wrapped, _COMBINED), wrapped.peft_config[_COMBINED]


def folded(model: Any) -> tuple[State, peft.LoraConfig]:
    """Return matrices and config of the same update with alpha equal to rank: B takes the factor alpha over rank."""
    config, state = model.peft_config[ADAPTER_NAME], state_of(model)
    for name in [name for name in state if name.endswith(".lora_B.weight")]:
        layer = model.get_submodule(name.removesuffix(".lora_B.weight"))
        state[name] = state[name] * layer.scaling[ADAPTER_NAME]
    # Layers with ranks of their own get the same alphas, so that every scale is 1.
    ranks = dict(config.rank_pattern or {})
    return state, dataclasses.replace(
        config, lora_alpha=config.r, alpha_pattern=ranks, use_rslora=False
    )


def read_weights(file: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return base weights that a file holds; raises `DitLoraError` with all that are not this model's."""
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DitLoraError(f"{file} is not a safetensors file: {error}") from error
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    mismatches = [
        f"{name}: {list(weight.shape)} in the file, {shapes.get(name, 'none')} in the model"
        for name, weight in weights.items()
        if shapes.get(name) != list(weight.shape)
    ]
    if mismatches:
        raise DitLoraError(listed(f"{file} is of another model", mismatches))
    return weights
