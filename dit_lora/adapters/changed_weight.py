"""The weight of a layer with its adapter merged in, for adapters of every kind."""

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
    """The change that one adapter makes to the weight of one layer."""

    layer: Any
    adapter: str

    def apply_to_weight(self, weight: Tensor) -> Tensor:
        """Merge the adapter of one layer into `weight`, as `merge_into_weight` does, and return the result."""
        return merge_into_weight(self.layer, self.adapter, weight)

    @property
    def is_additive_change(self) -> bool:
        """True if an adapter adds to its layer's weight; False if it scales or rotates the weight (DoRA, OFT)."""
        if isinstance(self.layer, LoraLayer):
            return self.adapter not in self.layer.lora_variant
        return not isinstance(self.layer, OFTLayer)


def get_weight_changes(model: nn.Module, adapter: str) -> dict[str, WeightChange]:
    """The change that this adapter makes to each layer's weight, by layer name."""
    adapted: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
    }
    return {name: WeightChange(layer, adapter) for name, layer in adapted.items() if adapter in layer.r}


@torch.no_grad()
def merge_into_weight(layer: Any, adapter: str, weight: Tensor) -> Tensor:
    """Merge an adapter into a layer's weight (outputs, inputs, ...), computed in the weight's own dtype.

    `weight` is used instead of the base layer's weight, which may be on `meta`. The formulas are those of PEFT's
    layers.
    """
    if isinstance(layer, LoraLayer):
        return _merge_lora(layer, adapter, weight)
    if isinstance(layer, LoKrLayer):
        return weight + _compute_lokr_update(layer, adapter, weight)
    if isinstance(layer, LoHaLayer):
        # LoHa: the elementwise product of two LoRAs (arXiv 2309.14859).
        w1_a, w1_b, w2_a, w2_b = (
            getattr(layer, f"hada_{name}")[adapter].to(weight) for name in ("w1_a", "w1_b", "w2_a", "w2_b")
        )
        return weight + layer.scaling[adapter] * ((w1_a @ w1_b) * (w2_a @ w2_b)).reshape(weight.shape)
    assert isinstance(layer, OFTLayer), type(layer)
    # A copy in the weight's dtype: the module itself must stay in fp32.
    module: Any = layer.oft_R[adapter]
    rotation = copy.deepcopy(module).to(weight).get_weight()
    # OFT rotates the inputs: x R W' = x (W R')'.
    return weight @ rotation.mT


def _merge_lora(layer: Any, adapter: str, weight: Tensor) -> Tensor:
    a, b = (factors[adapter].weight.to(weight) for factors in (layer.lora_A, layer.lora_B))
    # A convolution's (rank, in, h, w) and (out, rank, 1, 1) are multiplied as matrices.
    total: Tensor = weight + layer.scaling[adapter] * (b.flatten(1) @ a.flatten(1)).reshape(weight.shape)
    if adapter not in layer.lora_variant:
        return total
    # DoRA: each row of the sum, scaled to its trained length (arXiv 2402.09353, eq. 5).
    # (outputs,), for a convolution from (1, outputs, 1, 1).
    magnitude = layer.lora_magnitude_vector[adapter].weight.to(total).flatten()
    rows = total.flatten(1)
    # (outputs,): one length per row.
    length = torch.linalg.vector_norm(rows, dim=1)
    return (rows * (magnitude / length)[:, None]).reshape(total.shape)


def _compute_lokr_update(layer: Any, adapter: str, weight: Tensor) -> Tensor:
    factors = []
    for name in ("lokr_w1", "lokr_w2"):
        full: dict[str, Tensor] = getattr(layer, name)
        # PEFT stores a factor either whole, for example if the rank is at least half of its side, or as a product.
        if adapter in full:
            factors.append(full[adapter].to(weight))
        else:
            a, b = (getattr(layer, f"{name}_{part}")[adapter].to(weight) for part in "ab")
            factors.append(a @ b)
    factor_1, factor_2 = factors
    # In a convolution, only the second factor has the kernel's dimensions: append sides of 1 to the first.
    factor_1 = factor_1.reshape(*factor_1.shape, *[1] * (factor_2.ndim - factor_1.ndim))
    # (a * c, b * d, ...) from (a, b) and (c, d, ...).
    product = torch.kron(factor_1, factor_2.contiguous())
    return layer.scaling[adapter] * product.reshape(weight.shape)
