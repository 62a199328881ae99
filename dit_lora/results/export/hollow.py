"""Hollow models: adapters with names, shapes and scales as PEFT gives them, without the memory of the base.

A hollow model is the base's architecture with every weight a single zero, expanded to its shape.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.diffusers_format import BASE_FILE, Tensors, require_sound
from dit_lora.adapters.lora_mixins import adaptable, lora_pipeline_class
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


def load_lora_file(model: Any, file: Path, pipeline_class: Any) -> None:
    """Load Diffusers' LoRA file, or the one of a PEFT folder, and the base weights beside it, into a hollow model.

    Base weights are then what trains in it, as they did in the run. Raises `DitLoraError` with all that
    does not fit, and `CheckFailedError` if a tensor is not finite or if the adapter has no effect.
    """
    state, config = _read(file, pipeline_class)
    base = file.with_name(BASE_FILE)
    weights = _read_weights(base, model) if base.is_file() else {}
    _require_fit(file, state, model)
    require_sound(state, weights)
    load_state(model, state, config, file, weights)


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
    for name, weight in weights.items():
        owner, _, attribute = name.rpartition(".")
        # Put in before the adapter, which renames the layers that it wraps.
        setattr(model.get_submodule(owner), attribute, nn.Parameter(weight.float()))
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
    # PEFT has frozen every parameter but its own.
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


def _read(file: Path, pipeline_class: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
    try:
        if file.name == SAFETENSORS_WEIGHTS_NAME and file.with_name(CONFIG_NAME).is_file():
            config = peft.PeftConfig.from_pretrained(str(file.parent))
            tensors = {name.removeprefix(_PREFIX): t for name, t in load_file(file).items()}
            # The base's name is a path of the machine that trained it, or one for which PEFT would ask the Hub.
            return _only_lora(file, tensors), {**config.to_dict(), "base_model_name_or_path": None}
        stored, metadata = lora_pipeline_class(pipeline_class).lora_state_dict(
            file.parent, weight_name=file.name, return_lora_metadata=True, local_files_only=True
        )
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DitLoraError(
            f"{file} is no LoRA file that Diffusers or PEFT reads: {reason}"
        ) from error
    prefix = "transformer."
    tensors = {name.removeprefix(prefix): tensor for name, tensor in stored.items()}
    lora_config = {
        k.removeprefix(prefix): v for k, v in (metadata or {}).items() if k.startswith(prefix)
    }
    return _only_lora(file, tensors), lora_config or None


def _only_lora(file: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    other = [n for n in tensors if not n.endswith((".lora_A.weight", ".lora_B.weight"))]
    if other:
        raise DitLoraError(
            listed(f"{file}: export takes LoRA matrices (lora_A, lora_B) alone; it has", other)
        )
    return {name: tensor.float() for name, tensor in tensors.items()}


def _require_fit(file: Path, state: State, model: nn.Module) -> None:
    layers = dict(model.named_modules())
    mismatches = []
    for name, tensor in state.items():
        layer, which = name.removesuffix(".weight").rsplit(".", 1)
        weight = getattr(layers.get(layer), "weight", None)
        if weight is None:
            mismatches.append(f"{layer}: not in the model")
            continue
        # A is (rank, inputs ...) and B (outputs, rank ...): these are the sides that the layer shares.
        sides = slice(1, None) if which == "lora_A" else slice(0, 1)
        shape, wanted = list(tensor.shape[sides]), list(weight.shape[sides])
        if shape != wanted:
            mismatches.append(f"{name}: made for {shape}, the model's layer has {wanted}")
    if mismatches:
        raise DitLoraError(
            listed(
                f"{file} was trained on another model than this {type(model).__name__}", mismatches
            )
        )


def _read_weights(file: Path, model: nn.Module) -> dict[str, torch.Tensor]:
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
