"""Frozen adapters under the one that trains: beside its matrices in PEFT's layers, by names of their own.

They are not merged into the base. A bf16 weight would round part of the sum away and could not give it back, and a
quantised weight could not take it. The base in comparisons and results stays the published one.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME, UNDER, adaptable_layers
from dit_lora.adapters.attach_file import exact_targets, peft_config, put_matrices
from dit_lora.adapters.lora_file import StoredLayer
from dit_lora.adapters.lora_mixins import adaptable
from dit_lora.adapters.start import START

Layers = Mapping[str, StoredLayer]


def under_name(number: int) -> str:
    """Return the name of the frozen adapter of that number, as the recipe counts them."""
    return f"{UNDER}{number}"


def configs_under(model: nn.Module, under: Sequence[Layers]) -> list[peft.LoraConfig]:
    """Return PEFT's config of each, for a model that has no adapter yet: afterwards its layers have other names."""
    every = adaptable_layers(model)
    return [peft_config(layers, exact_targets(list(layers), every)) for layers in under]


def put_under(model: Any, under: Mapping[str, tuple[peft.LoraConfig, Layers, float]]) -> None:
    """Add frozen adapters by name, each a config, layers and a factor; all are on. What trains does not change."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for name, (config, layers, factor) in under.items():
        # PEFT draws an A, which is replaced, and warns of a second adapter, which is meant.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            peft.inject_adapter_in_model(config, adaptable(model), adapter_name=name)
        adapted = [model.get_submodule(layer) for layer in layers]
        # As those that train: PEFT has given them the base's dtype.
        for matrix in (one[name] for layer in adapted for one in (layer.lora_A, layer.lora_B)):
            matrix.float()
        put_matrices(model, layers, name)
        for layer in adapted:
            layer.scaling[name] *= factor
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    _activate(_tuner_layers(model), [ADAPTER_NAME, START, *under])


@contextmanager
def under_off(model: nn.Module, but: Iterable[str] = ()) -> Iterator[None]:
    """Leave the frozen adapters out within, all but these; nothing else of the model changes."""
    layers = [layer for layer in _tuner_layers(model) if _has_under(layer)]
    before = [list(layer.active_adapters) for layer in layers]
    kept = {ADAPTER_NAME, START, *but}
    for layer, names in zip(layers, before, strict=True):
        _activate([layer], [name for name in names if name in kept])
    try:
        yield
    finally:
        for layer, names in zip(layers, before, strict=True):
            _activate([layer], names)


@contextmanager
def trained_off(model: nn.Module) -> Iterator[None]:
    """Leave the adapter that trains out within: the base is left, with the frozen adapters that are on."""
    layers = _tuner_layers(model)
    before = [list(layer.active_adapters) for layer in layers]
    for layer, names in zip(layers, before, strict=True):
        frozen = [name for name in names if name.startswith(UNDER) and name != START]
        _activate([layer], frozen or names)
        # Not by `enable_adapters`, which freezes them as well.
        layer._disable_adapters = not frozen
    try:
        yield
    finally:
        for layer, names in zip(layers, before, strict=True):
            _activate([layer], names)
            layer._disable_adapters = False


def _tuner_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def _has_under(layer: Any) -> bool:
    return any(name.startswith(UNDER) for name in layer.r)


def _activate(layers: Iterable[Any], names: list[str]) -> None:
    for layer in layers:
        # Not by `set_adapter`, which makes every active adapter trainable.
        layer._active_adapter = list(names)
