"""Size of an adapter's change to each of its layers: the norm of the update against that of the layer's weight."""

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
from safetensors import safe_open
from torch import nn

from dit_lora.adapters.changed_weight import changed_weight
from dit_lora.numerics.quantized_linear import NarrowLinear

STRONG = 1.0
"""Ratio of an update's norm to its weight's above which a layer is more adapter than base."""
EXTREME = 10.0
"""Ratio above which less than a tenth of what a layer computes is its base: a run that blew up, no fine-tune."""

LOST = 2.0**-24
"""Half of fp32's last place: a weight keeps its bits if an update so small is added to it."""


@dataclass(frozen=True)
class LoadedLayer:
    """One adapted layer of a model with an adapter in it."""

    rank: int
    alpha: float
    scaling: float
    """Factor of the update; 1 of OFT, which rotates and has none."""


@dataclass(frozen=True)
class ModuleUpdate:
    """Size of one layer's update."""

    name: str
    norm: float
    """Frobenius norm of what the adapter changes the layer's weight by; of a LoRA that is scaling * B @ A."""
    relative: float | None
    """Ratio of `norm` to that of the layer's own weight; None where the weight is not known."""
    share: float | None = None
    """Ratio of `norm` to that of a weight of the usual size of this adapter's layers, if the layer's own is smaller.

    A layer that begins at zero, as modulations and last layers do, is no reason for an alarm.
    """

    @property
    def is_lost(self) -> bool:
        """True if the update is zero, or so small beside its weight that nothing of it is left in fp32."""
        return self.norm == 0 or (self.relative is not None and self.relative < LOST)

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "norm": self.norm, "relative": self.relative}


def product_norm(b: torch.Tensor, a: torch.Tensor) -> float:
    """Return the Frobenius norm of B @ A in fp64 without the product: the square root of tr(B'B AA').

    `a` is (rank, in), of a convolution (rank, in, height, width); `b` (out, rank), or (out, rank, 1, 1).
    """
    left, right = b.flatten(1).double(), a.flatten(1).double()
    square = ((left.T @ left) * (right @ right.T)).sum().item()
    # Rounding may leave a small negative number for an update of zero.
    return math.sqrt(square) if square > 0 or math.isnan(square) else 0.0


def loaded_layers(model: nn.Module) -> dict[str, LoadedLayer]:
    """Return the adapted layers by their names in the model without an adapter; the model has one adapter."""
    layers = {}
    for name, layer in _adapted(model):
        adapter = next(iter(layer.r))
        rank = layer.r[adapter]
        if isinstance(layer, OFTLayer):
            layers[name] = LoadedLayer(rank, rank, 1.0)
            continue
        alphas = layer.lora_alpha if isinstance(layer, LoraLayer) else layer.alpha
        layers[name] = LoadedLayer(rank, alphas[adapter], layer.scaling[adapter])
    return layers


def weight_norms(model: nn.Module, files: Sequence[Path]) -> dict[str, float]:
    """Return norms of the adapted layers' own weights, in fp32, one layer at a time; quantised ones as they compute.

    Weights of a model without values (meta) are read from the checkpoint's `files`, tensor by tensor, where
    these have its names.
    """
    norms, absent = {}, set()
    for name, layer in _adapted(model):
        base = layer.get_base_layer()
        if base.weight.is_meta:
            absent.add(name)
            continue
        norms[name] = _norm(_weight(base))
    return norms | (_stored_norms(absent, files) if absent else {})


def module_updates(
    tensors: Mapping[str, torch.Tensor],
    layers: Mapping[str, LoadedLayer],
    norms: Mapping[str, float],
) -> list[ModuleUpdate]:
    """Return one update for each LoRA layer whose two matrices are among `tensors`, in the order of names."""
    pairs = {
        name: (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
        for name in sorted(layers)
        if {f"{name}.lora_A.weight", f"{name}.lora_B.weight"} <= tensors.keys()
    }
    # Roots of the weights' numbers of values, which the sides of their matrices tell.
    roots = {name: math.sqrt(len(b) * a[0].numel()) for name, (a, b) in pairs.items()}
    changes = {
        name: abs(layers[name].scaling) * product_norm(b, a) for name, (a, b) in pairs.items()
    }
    return _compared(changes, norms, roots)


@torch.no_grad()
def measured_updates(model: nn.Module, norms: Mapping[str, float]) -> list[ModuleUpdate]:
    """Return one update for each adapted layer of a loaded model, by the weight that layer and adapter come to.

    This takes an fp64 copy of one weight at a time, and goes for every kind.
    """
    changes, roots = {}, {}
    for name, layer in sorted(_adapted(model)):
        before = _weight(layer.get_base_layer()).double()
        changed = changed_weight(layer, next(iter(layer.r)), before)
        changes[name] = torch.linalg.vector_norm(changed - before).item()
        roots[name] = math.sqrt(before.numel())
    return _compared(changes, norms, roots)


def base_updates(tensors: Mapping[str, torch.Tensor], files: Sequence[Path]) -> list[ModuleUpdate]:
    """Return distances of trained base weights from those of the same name and shape in the checkpoint's `files`."""
    changes, norms, roots = {}, {}, {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in tensors.keys() & set(opened.keys()):
                before, now = opened.get_tensor(name).double(), tensors[name].double()
                if before.shape == now.shape:
                    changes[name] = torch.linalg.vector_norm(now.cpu() - before).item()
                    norms[name] = torch.linalg.vector_norm(before).item()
                    roots[name] = math.sqrt(before.numel())
    return _compared(dict(sorted(changes.items())), norms, roots)


def _compared(
    changes: Mapping[str, float], norms: Mapping[str, float], roots: Mapping[str, float]
) -> list[ModuleUpdate]:
    """Return updates from norms of changes and of what they change; `roots` are the square roots of the sizes."""
    # The usual root mean square of this model's weights stands in for weights that begin near zero.
    usual = median([norms[name] / roots[name] for name in changes if name in norms] or [0.0])
    updates = []
    for name, norm in changes.items():
        own_norm = norms.get(name)
        base = max(own_norm, usual * roots[name]) if own_norm is not None else 0.0
        relative, share = (norm / weight if weight else None for weight in (own_norm, base))
        updates.append(ModuleUpdate(name, norm, relative, share))
    return updates


def _adapted(model: nn.Module) -> Iterable[tuple[str, Any]]:
    named = (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    )
    return ((name.removeprefix("base_model.model."), module) for name, module in named)


def _weight(base: Any) -> torch.Tensor:
    weight: torch.Tensor = base.weight
    return (base.widened(torch.float32) if isinstance(base, NarrowLinear) else weight).detach()


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).item()


def _stored_norms(names: set[str], files: Sequence[Path]) -> dict[str, float]:
    norms = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                name = key.removesuffix(".weight")
                if name in names and name != key:
                    norms[name] = _norm(opened.get_tensor(key))
    return norms
