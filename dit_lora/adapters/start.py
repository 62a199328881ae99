"""Initialize a LoRA from the weight that it adapts: PiSSA (arXiv 2404.02948) and OLoRA (arXiv 2406.01775).

Both put a part of the weight into A and B and train on the rest. Here the rest is not stored: the base stays
unchanged, and a frozen adapter subtracts the product of the initial A and B. Training is the same, and checks,
comparisons and results use the published base, so quantized or half-precision weights lose nothing. The saved file has
both adapters as one LoRA of twice the rank over that base.
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
from dit_lora.adapters.attach_file import build_peft_config
from dit_lora.adapters.lora_file import StoredLayer
from dit_lora.config.lora import WEIGHT_INITS, LoraConfig
from dit_lora.errors import DitLoraError, format_list
from dit_lora.numerics.quantized_linear import QuantizedLinear
from dit_lora.numerics.streams import derive_seed

START_ADAPTER = "under_start"
"""Name of the frozen adapter that subtracts the start. It is active wherever the trained one is."""
_STARTS_ATTRIBUTE = "dit_lora_start"
# Arguments of `svd_lowrank`: vectors beyond the rank, and power iterations (16 as in PEFT's fast PiSSA).
_MORE, _ITERATIONS = 8, 16


def attach_initialized_lora(
    model: Any, lora: LoraConfig, default_targets: Sequence[str], *, seed: int, submodules: Sequence[str] = ()
) -> AttachReport:
    """Attach a new adapter to a model, with the initialization that `lora.init` asks for."""
    report = attach_lora(model, lora, default_targets, seed=seed, submodules=submodules)
    if lora.init in WEIGHT_INITS:
        initialize_from_weights(model, ADAPTER_NAME, lora.init, seed=seed)
    return report


def initialize_from_weights(model: Any, adapter: str, init: str, *, seed: int) -> None:
    """Initialize an attached LoRA from its layers' weights, and add a frozen adapter that subtracts its effect.

    Both adapters are active. The start depends only on the weights and `seed`. For weights without values (meta) both
    adapters keep PEFT's initial values. Raises `DitLoraError` that lists all layers whose rank is larger than their
    weight allows.
    """
    # By name, in a fixed order: random draws below follow it.
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LoraLayer)}
    small = [
        f"{name}: rank {layer.r[adapter]}, and its weight has {min(_get_weight_shape(layer))}"
        for name, layer in layers.items()
        if layer.r[adapter] > min(_get_weight_shape(layer))
    ]
    if small:
        raise DitLoraError(
            format_list(f"lora.init: {init} needs a rank of at most the smaller side of each weight", small)
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "lora_start"))
        starts = {name: _compute_initial_lora(layer, adapter, init) for name, layer in layers.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            # No dropout: the start must be subtracted completely.
            config = replace(model.peft_config[adapter], lora_dropout=0.0)
            peft.inject_adapter_in_model(config, model, adapter_name=START_ADAPTER)
    for name, layer in layers.items():
        _copy_initial_lora(layer, adapter, starts[name])
        # With the negative scale, this adapter subtracts the start.
        layer.scaling[START_ADAPTER] = -layer.scaling[adapter]
        for part in (layer.lora_A, layer.lora_B):
            # PEFT creates the new adapter trainable, and in the dtype of the base.
            part[START_ADAPTER].float().requires_grad_(False)
            part[adapter].requires_grad_(True)
        # `set_adapter` would make both trainable.
        layer._active_adapter = [adapter, START_ADAPTER]
    # Full tensors on the host: those in the model may be sharded when the result is saved.
    setattr(model, _STARTS_ATTRIBUTE, starts)


def has_weight_initialized_adapter(model: nn.Module) -> bool:
    """True if a model's adapter was initialized from the model's weights."""
    return hasattr(model, _STARTS_ATTRIBUTE)


def build_config_for_saving(model: Any, adapter: str) -> Any:
    """PEFT's config for saving an adapter.

    If initialized from the weights, it has twice the rank at the same scale.
    """
    config, starts = model.peft_config[adapter], getattr(model, _STARTS_ATTRIBUTE, None)
    if starts is None:
        return config
    layers = {}
    for name, start in starts.items():
        rank = 2 * start.rank
        alpha = model.get_submodule(name).scaling[adapter] * rank
        # The config depends on ranks only, so the matrices may be empty.
        layers[name] = StoredLayer(torch.empty(rank, 0), torch.empty(0, rank), alpha)
    return build_peft_config(layers, config.target_modules)


def build_adapter_state_for_saving(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter's tensors for saving, by PEFT's names.

    If the adapter was initialized from the weights, additional ranks subtract its initial effect.
    """
    tensors = dict(state)
    for name, start in getattr(model, _STARTS_ATTRIBUTE, {}).items():
        # [A; A_start] and [B, -B_start]: one LoRA with the product B A - B_start A_start.
        a, b = (state[f"{name}.lora_{part}.weight"] for part in "AB")
        tensors[f"{name}.lora_A.weight"] = torch.cat([a, start.a.to(a)])
        tensors[f"{name}.lora_B.weight"] = torch.cat([b, -start.b.to(b)], dim=1)
    return tensors


def _get_weight_shape(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a layer's weight as a matrix."""
    # A is (rank, inputs, ...), B is (outputs, rank, ...).
    a, b = next(iter(layer.lora_A.values())).weight, next(iter(layer.lora_B.values())).weight
    return b.shape[0], a[0].numel()


def _compute_initial_lora(layer: Any, adapter: str, init: str) -> StoredLayer:
    """Compute a LoRA's initial A and B from its layer's weight, in fp32 on the CPU.

    Returns the current ones if the weight has no values (meta).
    """
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    base: Any = layer.get_base_layer()
    rank, scaling = len(a), layer.scaling[adapter]
    if base.weight.is_meta:
        return StoredLayer(a.detach(), b.detach(), scaling * rank)
    base_weight = base.dequantize(torch.float32) if isinstance(base, QuantizedLinear) else base.weight
    # (outputs, inputs * height * width).
    weight = base_weight.detach().float().flatten(1)
    if init == "pissa":
        # scaling * B @ A has the weight's largest singular values. Randomized; u is (outputs, q), v is (inputs, q).
        u, s, v = torch.svd_lowrank(weight, q=min(rank + _MORE, *weight.shape), niter=_ITERATIONS)
        # B and A each get the root of the singular values.
        root = (s[:rank] / scaling).sqrt()
        b_start, a_start = u[:, :rank] * root, root[:, None] * v[:, :rank].T
    else:
        # q is (outputs, k), with orthonormal columns, and r is (k, inputs); k is the smaller side.
        q, r = torch.linalg.qr(weight)
        b_start, a_start = q[:, :rank], r[:rank]
    return StoredLayer(
        a_start.reshape(a.shape).cpu().contiguous(), b_start.reshape(b.shape).cpu().contiguous(), scaling * rank
    )


@torch.no_grad()
def _copy_initial_lora(layer: Any, adapter: str, start: StoredLayer) -> None:
    for name in (adapter, START_ADAPTER):
        for part, matrix in ((layer.lora_A, start.a), (layer.lora_B, start.b)):
            weight = part[name].weight
            if not weight.is_meta:
                weight.copy_(matrix)
