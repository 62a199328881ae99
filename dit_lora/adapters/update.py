"""How much an adapter changes each layer that it is on: its update's norm against that of the layer's weight."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import nn

from dit_lora.numerics.narrow import NarrowLinear

STRONG = 1.0
"""An update as large as its weight: beyond it a layer is more adapter than base."""
EXTREME = 10.0
"""Beyond it less than a tenth of what a layer computes is its base: no fine-tune of it, but a run that blew up."""

LOST = 2.0**-24
"""Half of fp32's last place: a weight that an update so small is added to keeps its bits."""


@dataclass(frozen=True)
class LoadedLayer:
    """One adapted layer of a model with an adapter in it."""

    rank: int
    alpha: float
    scaling: float
    """What B @ A is multiplied by."""


@dataclass(frozen=True)
class ModuleUpdate:
    """The update of one layer."""

    name: str
    norm: float
    """Frobenius norm of scaling * B @ A."""
    relative: float | None
    """Over that of the layer's own weight; None where the weight is not known."""
    share: float | None = None
    """Likewise, but over a weight of the usual size of this adapter's layers where the layer's own is smaller: a layer
    that begins at zero, as modulations and last layers do, is no reason for an alarm."""

    @property
    def is_lost(self) -> bool:
        """Whether it is zero, or so small beside its weight that nothing of it is left in fp32."""
        return self.norm == 0 or (self.relative is not None and self.relative < LOST)

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "norm": self.norm, "relative": self.relative}


def product_norm(b: torch.Tensor, a: torch.Tensor) -> float:
    """Frobenius norm of B @ A in fp64, without the product: the square root of tr(B'B AA').

    `a` is (rank, in), of a convolution (rank, in, height, width); `b` (out, rank), or (out, rank, 1, 1).
    """
    left, right = b.flatten(1).double(), a.flatten(1).double()
    square = ((left.T @ left) * (right @ right.T)).sum().item()
    return math.sqrt(square) if square > 0 or math.isnan(square) else 0.0


def loaded_layers(model: nn.Module) -> dict[str, LoadedLayer]:
    """The adapted layers by their names in the model without an adapter; of one adapter."""
    found = {}
    for name, layer in _adapted(model):
        adapter = next(iter(layer.r))
        found[name] = LoadedLayer(
            layer.r[adapter], layer.lora_alpha[adapter], layer.scaling[adapter]
        )
    return found


def weight_norms(model: nn.Module, files: Sequence[Path]) -> dict[str, float]:
    """Norms of the adapted layers' own weights, fp32, one layer at a time; quantised ones as they compute.

    Of a model without values (meta) they are read from the checkpoint's `files`, tensor by tensor, where these
    have its names.
    """
    found, absent = {}, set()
    for name, layer in _adapted(model):
        base = layer.get_base_layer()
        if base.weight.is_meta:
            absent.add(name)
            continue
        weight = base.widened(torch.float32) if isinstance(base, NarrowLinear) else base.weight
        found[name] = _norm(weight.detach())
    return found | (_stored_norms(absent, files) if absent else {})


def module_updates(
    tensors: Mapping[str, torch.Tensor],
    layers: Mapping[str, LoadedLayer],
    norms: Mapping[str, float],
) -> list[ModuleUpdate]:
    """One for each layer whose two matrices are among `tensors`, in the order of names."""
    pairs = {
        name: (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
        for name in sorted(layers)
        if {f"{name}.lora_A.weight", f"{name}.lora_B.weight"} <= tensors.keys()
    }
    roots = {name: math.sqrt(len(b) * a[0].numel()) for name, (a, b) in pairs.items()}
    changes = {
        name: abs(layers[name].scaling) * product_norm(b, a) for name, (a, b) in pairs.items()
    }
    return _compared(changes, norms, roots)


def base_updates(tensors: Mapping[str, torch.Tensor], files: Sequence[Path]) -> list[ModuleUpdate]:
    """How far base weights that trained are from those of the same name and shape in the checkpoint's `files`."""
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
    """Norms of changes against those of what they change, of which `roots` are the roots of the sizes."""
    usual = median([norms[name] / roots[name] for name in changes if name in norms] or [0.0])
    found = []
    for name, norm in changes.items():
        own = norms.get(name)
        base = max(own, usual * roots[name]) if own is not None else 0.0
        relative, share = (norm / weight if weight else None for weight in (own, base))
        found.append(ModuleUpdate(name, norm, relative, share))
    return found


def _adapted(model: nn.Module) -> Iterable[tuple[str, Any]]:
    named = ((name, one) for name, one in model.named_modules() if isinstance(one, LoraLayer))
    return ((name.removeprefix("base_model.model."), one) for name, one in named)


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).item()


def _stored_norms(names: set[str], files: Sequence[Path]) -> dict[str, float]:
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                name = key.removesuffix(".weight")
                if name in names and name != key:
                    found[name] = _norm(opened.get_tensor(key))
    return found
