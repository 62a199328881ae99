"""Size of an adapter's change to each layer: the norm of the update relative to the norm of the layer's weight."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.oft import OFTLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from dit_lora.adapters.changed_weight import merge_into_weight
from dit_lora.environment.safetensors_files import open_safetensors
from dit_lora.numerics.quantized_linear import QuantizedLinear

STRONG_UPDATE_RATIO = 1.0
"""Ratio of an update's norm to its weight's norm above which a layer is more adapter than base."""
EXTREME_UPDATE_RATIO = 10.0
"""Ratio above which the base is less than a tenth of a layer: the run has diverged."""

LOST_UPDATE_RATIO = 2.0**-24
"""Half a unit in the last place of fp32: adding a smaller update does not change the weight's bits."""


@dataclass(frozen=True)
class LoadedLayer:
    """Rank, alpha and scaling of one adapted layer in a loaded model."""

    rank: int
    alpha: float
    scaling: float
    """Factor of the update; 1 for OFT, which is a rotation and has none."""


@dataclass(frozen=True)
class ModuleUpdate:
    """Size of the change that an adapter makes to the weight of one layer."""

    name: str
    norm: float
    """Frobenius norm of the change of the layer's weight; for LoRA the change is scaling * B @ A."""
    relative_norm: float | None
    """Ratio of `norm` to the norm of the layer's weight; None if the weight is unknown."""
    relative_to_typical: float | None = None
    """Like `relative_norm`, but compared with a typical adapted weight if the layer's own weight is smaller.

    So a layer that is initialized with zeros, such as a modulation or a last layer, raises no alarm.
    """

    @property
    def is_lost_to_rounding(self) -> bool:
        """True if an adapter's change of a weight is zero, or so small that adding it in fp32 has no effect."""
        return self.norm == 0 or (self.relative_norm is not None and self.relative_norm < LOST_UPDATE_RATIO)

    def to_json_record(self) -> dict[str, Any]:
        return {"name": self.name, "norm": self.norm, "relative": self.relative_norm}


def compute_product_norm(b: torch.Tensor, a: torch.Tensor) -> float:
    """Frobenius norm of B @ A in fp64 without computing the product: the square root of tr(B'B AA').

    `a` is (rank, in), for a convolution (rank, in, height, width); `b` is (out, rank), or (out, rank, 1, 1).
    """
    b_matrix, a_matrix = b.flatten(1).double(), a.flatten(1).double()
    # The trace of the product of two symmetric (rank, rank) matrices is the sum of their elementwise product.
    square = ((b_matrix.T @ b_matrix) * (a_matrix @ a_matrix.T)).sum().item()
    # For an update of zero, rounding may give a small negative number.
    return math.sqrt(square) if square > 0 or math.isnan(square) else 0.0


def list_loaded_layers(model: nn.Module) -> dict[str, LoadedLayer]:
    """The adapted layers of a model with one adapter, by their names in the model without it."""
    layers = {}
    for name, layer in _iterate_adapted_layers(model):
        # The model has one adapter, whatever its name is.
        adapter = next(iter(layer.r))
        rank = layer.r[adapter]
        if isinstance(layer, OFTLayer):
            # OFT has no alpha.
            layers[name] = LoadedLayer(rank, rank, 1.0)
            continue
        # LoRA and LoKr name this attribute differently.
        alphas = layer.lora_alpha if isinstance(layer, LoraLayer) else layer.alpha
        layers[name] = LoadedLayer(rank, alphas[adapter], layer.scaling[adapter])
    return layers


def compute_weight_norms(model: nn.Module, files: Sequence[Path]) -> dict[str, float]:
    """Norms of the adapted layers' own weights in fp32, computed one layer at a time; quantized weights are
    dequantized.

    Weights of a model without values (meta) are read from the checkpoint's `files`, tensor by tensor, if the files use
    the same names.
    """
    # Names of layers whose weight has no values here.
    norms, absent = {}, set()
    for name, layer in _iterate_adapted_layers(model):
        base = layer.get_base_layer()
        if base.weight.is_meta:
            absent.add(name)
            continue
        norms[name] = _compute_norm(_get_weight(base))
    return norms | (_read_weight_norms_from_files(absent, files) if absent else {})


def compute_module_updates(
    tensors: Mapping[str, torch.Tensor], layers: Mapping[str, LoadedLayer], norms: Mapping[str, float]
) -> list[ModuleUpdate]:
    """Size of the weight change of each LoRA layer whose A and B are both in `tensors`, sorted by layer name."""
    # A (rank, inputs, ...) and B (outputs, rank, ...) by layer.
    pairs = {
        name: (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
        for name in sorted(layers)
        if {f"{name}.lora_A.weight", f"{name}.lora_B.weight"} <= tensors.keys()
    }
    # Square root of each weight's number of values, from the shapes of its matrices.
    roots = {name: math.sqrt(len(b) * a[0].numel()) for name, (a, b) in pairs.items()}
    changes = {name: abs(layers[name].scaling) * compute_product_norm(b, a) for name, (a, b) in pairs.items()}
    return _build_updates(changes, norms, roots)


@torch.no_grad()
def measure_adapter_updates(model: nn.Module, norms: Mapping[str, float]) -> list[ModuleUpdate]:
    """Size of each adapted layer's weight change in a loaded model, from its weight with the adapter merged in.

    Works for every kind of adapter, and needs an fp64 copy of one weight at a time.
    """
    changes, roots = {}, {}
    for name, layer in sorted(_iterate_adapted_layers(model)):
        # fp64: the difference of two nearly equal weights loses digits.
        before = _get_weight(layer.get_base_layer()).double()
        changed = merge_into_weight(layer, next(iter(layer.r)), before)
        changes[name] = torch.linalg.vector_norm(changed - before).item()
        roots[name] = math.sqrt(before.numel())
    return _build_updates(changes, norms, roots)


def measure_base_weight_changes(tensors: Mapping[str, torch.Tensor], files: Sequence[Path]) -> list[ModuleUpdate]:
    """Sizes of the changes of trained base weights, relative to the tensors of the same name and shape in `files`."""
    changes, norms, roots = {}, {}, {}
    for file in files:
        with open_safetensors(file) as opened:
            for name in tensors.keys() & set(opened.keys()):
                # One tensor at a time, so that the checkpoint is never in memory as a whole.
                original, current = opened.get_tensor(name).double(), tensors[name].double()
                if original.shape == current.shape:
                    changes[name] = torch.linalg.vector_norm(current.cpu() - original).item()
                    norms[name] = torch.linalg.vector_norm(original).item()
                    roots[name] = math.sqrt(original.numel())
    return _build_updates(dict(sorted(changes.items())), norms, roots)


def _build_updates(
    changes: Mapping[str, float], norms: Mapping[str, float], roots: Mapping[str, float]
) -> list[ModuleUpdate]:
    """Build the sizes of weight changes from norms; `roots` are square roots of the weights' numbers of elements."""
    # For weights near zero, use the typical root mean square of this model's weights.
    typical_rms = median([norms[name] / roots[name] for name in changes if name in norms] or [0.0])
    updates = []
    for name, norm in changes.items():
        own_norm = norms.get(name)
        reference = max(own_norm, typical_rms * roots[name]) if own_norm is not None else 0.0
        # None for a weight of zeros, or one whose norm is unknown.
        relative, share = (norm / weight if weight else None for weight in (own_norm, reference))
        updates.append(ModuleUpdate(name, norm, relative, share))
    return updates


def _iterate_adapted_layers(model: nn.Module) -> Iterable[tuple[str, Any]]:
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    return ((name.removeprefix("base_model.model."), module) for name, module in named)


def _get_weight(base: Any) -> torch.Tensor:
    weight: torch.Tensor = base.weight
    return (base.dequantize(torch.float32) if isinstance(base, QuantizedLinear) else weight).detach()


def _compute_norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).item()


def _read_weight_norms_from_files(names: set[str], files: Sequence[Path]) -> dict[str, float]:
    norms = {}
    for file in files:
        with open_safetensors(file) as opened:
            for key in opened.keys():  # noqa: SIM118
                name = key.removesuffix(".weight")
                if name in names and name != key:
                    norms[name] = _compute_norm(opened.get_tensor(key))
    return norms
