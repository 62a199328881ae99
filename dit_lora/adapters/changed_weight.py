"""The weight that a layer and its adapter come to, of every kind: what a merged checkpoint holds."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.loha import LoHaLayer
from peft.tuners.lokr import LoKrLayer
from peft.tuners.lora import LoraLayer
from peft.tuners.oft import OFTLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn


@dataclass(frozen=True)
class WeightChange:
    """One layer's adapter, as it changes a weight."""

    layer: Any
    adapter: str

    def of(self, weight: Tensor) -> Tensor:
        """Return `changed_weight` of this layer."""
        return changed_weight(self.layer, self.adapter, weight)

    @property
    def is_added(self) -> bool:
        """True if the adapter adds to the weight; false if it scales or rotates it."""
        if isinstance(self.layer, LoraLayer):
            return self.adapter not in self.layer.lora_variant
        return not isinstance(self.layer, OFTLayer)


def changes_of(model: nn.Module, adapter: str) -> dict[str, WeightChange]:
    """Return the change of each adapted layer by its name; `adapter` is the one to take."""
    adapted: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
    }
    return {name: WeightChange(one, adapter) for name, one in adapted.items() if adapter in one.r}


@torch.no_grad()
def changed_weight(layer: Any, adapter: str, weight: Tensor) -> Tensor:
    """Return a layer's weight (outputs, inputs ...) with the adapter in it, computed in the weight's own dtype.

    `weight` stands in for the base layer's, which may hold nothing. The formulas are those of PEFT's layers.
    """
    if isinstance(layer, LoraLayer):
        total = weight + _product(layer, adapter, weight)
        return _decomposed(layer, adapter, total) if adapter in layer.lora_variant else total
    if isinstance(layer, LoKrLayer):
        return weight + _kronecker(layer, adapter, weight)
    if isinstance(layer, LoHaLayer):
        return weight + _hadamard(layer, adapter, weight)
    assert isinstance(layer, OFTLayer), type(layer)
    module: Any = layer.oft_R[adapter]
    rotation = copy.deepcopy(module).to(weight).get_weight()
    # Inputs are rotated before they meet the weight: x R W' = x (W R')'.
    return weight @ rotation.mT


def _product(layer: Any, adapter: str, weight: Tensor) -> Tensor:
    a, b = (one[adapter].weight.to(weight) for one in (layer.lora_A, layer.lora_B))
    return layer.scaling[adapter] * (b.flatten(1) @ a.flatten(1)).reshape(weight.shape)


def _decomposed(layer: Any, adapter: str, total: Tensor) -> Tensor:
    """Return DoRA's weight: each row of the sum at the length that was trained (arXiv 2402.09353, eq. 5)."""
    magnitude = layer.lora_magnitude_vector[adapter].weight.to(total).flatten()
    rows = total.flatten(1)
    length = torch.linalg.vector_norm(rows, dim=1)
    return (rows * (magnitude / length)[:, None]).reshape(total.shape)


def _kronecker(layer: Any, adapter: str, weight: Tensor) -> Tensor:
    first, second = (_factor(layer, adapter, f"lokr_w{n}", weight) for n in (1, 2))
    first = first.reshape(*first.shape, *[1] * (second.ndim - first.ndim))
    product = torch.kron(first, second.contiguous())
    return layer.scaling[adapter] * product.reshape(weight.shape)


def _factor(layer: Any, adapter: str, name: str, weight: Tensor) -> Tensor:
    """Return one of LoKr's factors, which may be whole or a product."""
    whole: dict[str, Tensor] = getattr(layer, name)
    if adapter in whole:
        return whole[adapter].to(weight)
    parts: list[Tensor] = [getattr(layer, f"{name}_{part}")[adapter] for part in "ab"]
    return parts[0].to(weight) @ parts[1].to(weight)


def _hadamard(layer: Any, adapter: str, weight: Tensor) -> Tensor:
    w1_a, w1_b, w2_a, w2_b = (
        getattr(layer, f"hada_{name}")[adapter].to(weight)
        for name in ("w1_a", "w1_b", "w2_a", "w2_b")
    )
    return layer.scaling[adapter] * ((w1_a @ w1_b) * (w2_a @ w2_b)).reshape(weight.shape)
