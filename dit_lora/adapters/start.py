"""Starts of a LoRA from the weight that it adapts: PiSSA (arXiv 2404.02948) and OLoRA (arXiv 2406.01775).

Both put a part of the weight into A and B and train on the rest. Here the rest is never stored: the base stays
unchanged, and a frozen adapter with the first A and B subtracts their product. Training is the same, and the base that
is checked, compared and shown is the published one, in which quantised or half-precision weights lose nothing. The
saved file has both as one LoRA of twice the rank, over that same base.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from dit_lora.adapters.attach import ADAPTER_NAME, AttachReport, attach_lora
from dit_lora.adapters.attach_file import peft_config
from dit_lora.adapters.lora_file import StoredLayer
from dit_lora.config.lora import FROM_WEIGHT, LoraConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.quantized_linear import NarrowLinear
from dit_lora.numerics.streams import fold

START = "under_start"
"""The frozen adapter's name: one of those under the trained one, and on wherever that is."""
_KEPT = "dit_lora_start"
# Of `svd_lowrank`: vectors beyond the rank, and power iterations, after which PEFT's own fast PiSSA stops too.
_MORE, _ITERATIONS = 8, 16


def attach_started(
    model: Any,
    lora: LoraConfig,
    default_targets: Sequence[str],
    *,
    seed: int,
    within: Sequence[str] = (),
) -> AttachReport:
    """Attach a new adapter as `attach_lora` does, with the start that `lora.init` asks for."""
    report = attach_lora(model, lora, default_targets, seed=seed, within=within)
    if lora.init in FROM_WEIGHT:
        start_from_weights(model, ADAPTER_NAME, lora.init, seed=seed)
    return report


def start_from_weights(model: Any, adapter: str, init: str, *, seed: int) -> None:
    """Put the start into an attached LoRA, and the frozen adapter beside it that takes it back; both are active.

    The start depends on weights and `seed` alone. Weights without values (meta) leave both as they are. Raises
    `DitLoraError` with every layer that has no such rank.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}
    small = [
        f"{name}: rank {layer.r[adapter]}, and its weight has {min(_sides(layer))}"
        for name, layer in layers.items()
        if layer.r[adapter] > min(_sides(layer))
    ]
    if small:
        raise DitLoraError(listed(f"lora.init: {init} needs a rank that each weight has", small))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "lora_start"))
        first = {name: _first(layer, adapter, init) for name, layer in layers.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            # What is taken back is taken back whole: dropout is for what trains.
            config = replace(model.peft_config[adapter], lora_dropout=0.0)
            peft.inject_adapter_in_model(config, model, adapter_name=START)
    for name, layer in layers.items():
        _put(layer, adapter, first[name])
        layer.scaling[START] = -layer.scaling[adapter]
        for part in (layer.lora_A, layer.lora_B):
            part[START].float().requires_grad_(False)
            part[adapter].requires_grad_(True)
        layer._active_adapter = [adapter, START]
    # Whole and on the host: in the model they may be spread over ranks when the result is written.
    setattr(model, _KEPT, first)


def has_start(model: nn.Module) -> bool:
    """Return true if a model's adapter began from its weights."""
    return hasattr(model, _KEPT)


def saved_config(model: Any, adapter: str) -> Any:
    """Return PEFT's config of an adapter as it is saved: with a start, of twice the rank at the same scale."""
    config, first = model.peft_config[adapter], getattr(model, _KEPT, None)
    if first is None:
        return config
    layers = {}
    for name, start in first.items():
        rank = 2 * start.rank
        alpha = model.get_submodule(name).scaling[adapter] * rank
        # The config depends on the ranks alone.
        layers[name] = StoredLayer(torch.empty(rank, 0), torch.empty(0, rank), alpha)
    return peft_config(layers, config.target_modules)


def saved_state(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors as they are saved, with PEFT's names; further ranks subtract its start."""
    whole = dict(state)
    for name, start in getattr(model, _KEPT, {}).items():
        a, b = (state[f"{name}.lora_{part}.weight"] for part in "AB")
        whole[f"{name}.lora_A.weight"] = torch.cat([a, start.a.to(a)])
        whole[f"{name}.lora_B.weight"] = torch.cat([b, -start.b.to(b)], dim=1)
    return whole


def _sides(layer: Any) -> tuple[int, int]:
    """Return the sides of a layer's weight as a matrix."""
    a, b = next(iter(layer.lora_A.values())).weight, next(iter(layer.lora_B.values())).weight
    return b.shape[0], a[0].numel()


def _first(layer: Any, adapter: str, init: str) -> StoredLayer:
    """Return A and B of a start, in fp32 on the host; those that are there where the weight has no values."""
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    base: Any = layer.get_base_layer()
    rank, scaling = len(a), layer.scaling[adapter]
    if base.weight.is_meta:
        return StoredLayer(a.detach(), b.detach(), scaling * rank)
    wide = base.widened(torch.float32) if isinstance(base, NarrowLinear) else base.weight
    weight = wide.detach().float().flatten(1)
    left, right = (
        _principal(weight, rank, scaling) if init == "pissa" else _orthonormal(weight, rank)
    )
    return StoredLayer(
        right.reshape(a.shape).cpu().contiguous(),
        left.reshape(b.shape).cpu().contiguous(),
        scaling * rank,
    )


def _principal(
    weight: torch.Tensor, rank: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B (outputs, rank) and A (rank, inputs) with the weight's largest singular values in scaling * B A."""
    most = min(rank + _MORE, *weight.shape)
    u, s, v = torch.svd_lowrank(weight, q=most, niter=_ITERATIONS)
    root = (s[:rank] / scaling).sqrt()
    return u[:, :rank] * root, root[:, None] * v[:, :rank].T


def _orthonormal(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B and A of the weight's QR decomposition: B's columns are orthonormal."""
    q, r = torch.linalg.qr(weight)
    return q[:, :rank], r[:rank]


@torch.no_grad()
def _put(layer: Any, adapter: str, first: StoredLayer) -> None:
    for name in (adapter, START):
        for part, matrix in ((layer.lora_A, first.a), (layer.lora_B, first.b)):
            weight = part[name].weight
            if not weight.is_meta:
                weight.copy_(matrix)
