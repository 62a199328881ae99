"""Frozen adapters that are active while another one trains (`lora.under`); PEFT's layers hold both.

They are not merged into the base. A bf16 weight would round part of the sum away irreversibly, and a quantized weight
cannot be changed. Comparisons and results keep using the published base.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import peft
import torch
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME, FROZEN_ADAPTER_PREFIX, find_adaptable_layers, find_tuner_layers
from dit_lora.adapters.attach_file import build_exact_targets, build_peft_config, copy_matrices
from dit_lora.adapters.lora_file import StoredLayer
from dit_lora.adapters.lora_mixins import add_adapter_methods
from dit_lora.adapters.start import START_ADAPTER

StoredLayers = Mapping[str, StoredLayer]


def get_frozen_adapter_name(number: int) -> str:
    """Name under which a frozen adapter is attached; `number` is its position in the recipe."""
    return f"{FROZEN_ADAPTER_PREFIX}{number}"


def build_frozen_configs(model: nn.Module, layers_per_adapter: Sequence[StoredLayers]) -> list[peft.LoraConfig]:
    """Build PEFT's config for each of several LoRA files that are attached as frozen adapters.

    The model must have no adapter yet, since attaching one renames layers.
    """
    all_layers = find_adaptable_layers(model)
    return [build_peft_config(layers, build_exact_targets(list(layers), all_layers)) for layers in layers_per_adapter]


def attach_frozen_adapters(
    model: Any, frozen_adapters: Mapping[str, tuple[peft.LoraConfig, StoredLayers, float]]
) -> None:
    """Attach frozen adapters, given by name: PEFT's config, matrices by layer, and scale factor.

    All are active; trainable parameters stay the same.
    """
    # PEFT makes new adapters trainable and may freeze others.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for name, (config, layers, factor) in frozen_adapters.items():
        # PEFT initializes A at random, which is overwritten, and warns about a second adapter, which is intended.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            peft.inject_adapter_in_model(config, add_adapter_methods(model), adapter_name=name)
        # PEFT's wrappers have the names of the layers that they replaced.
        adapted = [model.get_submodule(layer) for layer in layers]
        # fp32, as the trained adapter: PEFT has created them in the base's dtype.
        for matrix in (part[name] for layer in adapted for part in (layer.lora_A, layer.lora_B)):
            matrix.float()
        copy_matrices(model, layers, name)
        for layer in adapted:
            # The file's alpha / rank, times the recipe's factor.
            layer.scaling[name] *= factor
    # PEFT has changed what is trainable: restore it.
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    _set_active_adapters(find_tuner_layers(model), [ADAPTER_NAME, START_ADAPTER, *frozen_adapters])


@contextmanager
def disable_frozen_adapters(model: nn.Module, keep_active: Iterable[str] = ()) -> Iterator[None]:
    """Disable the frozen adapters of a model inside the context, except those in `keep_active`.

    Nothing else changes.
    """
    layers = [
        layer for layer in find_tuner_layers(model) if any(name.startswith(FROZEN_ADAPTER_PREFIX) for name in layer.r)
    ]
    before = [list(layer.active_adapters) for layer in layers]
    # The start belongs to the trained adapter, so it stays on.
    active = {ADAPTER_NAME, START_ADAPTER, *keep_active}
    for layer, names in zip(layers, before, strict=True):
        _set_active_adapters([layer], [name for name in names if name in active])
    try:
        yield
    finally:
        for layer, names in zip(layers, before, strict=True):
            _set_active_adapters([layer], names)


@contextmanager
def disable_trained_adapter(model: nn.Module) -> Iterator[None]:
    """Disable the trained adapter inside the context. The frozen adapters stay as they are."""
    layers = find_tuner_layers(model)
    before = [list(layer.active_adapters) for layer in layers]
    for layer, names in zip(layers, before, strict=True):
        # The start's name has the same prefix, but it goes with the trained adapter.
        frozen = [name for name in names if name.startswith(FROZEN_ADAPTER_PREFIX) and name != START_ADAPTER]
        _set_active_adapters([layer], frozen or names)
        # `enable_adapters` would also freeze them.
        layer._disable_adapters = not frozen
    try:
        yield
    finally:
        for layer, names in zip(layers, before, strict=True):
            _set_active_adapters([layer], names)
            layer._disable_adapters = False


def _set_active_adapters(layers: Iterable[Any], names: list[str]) -> None:
    for layer in layers:
        # `set_adapter` would make every active adapter trainable.
        layer._active_adapter = list(names)
