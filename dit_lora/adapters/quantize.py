"""Quantize a model's frozen linear layers, one at a time. Adapters are attached afterwards and train in fp32."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from dit_lora.adapters.attach import tied_layers
from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.finite import not_finite
from dit_lora.numerics.quantized_linear import Kind, NarrowLinear, narrowed_bytes


@dataclass(frozen=True)
class QuantizeReport:
    """Numbers of quantized layers and weights, and the size of the base before and after."""

    kind: Kind
    layers: int
    parameters: int
    """Number of weights in the quantized layers."""
    of_parameters: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        share = self.parameters / self.of_parameters
        before, after = self.bytes_before / 2**20, self.bytes_after / 2**20
        return (
            f"quantize: {self.kind}: {self.layers} linear layers, {share:.0%} of the weights; "
            f"the base takes {after:.4g} MiB in place of {before:.4g}"
        )


def quantizable(model: nn.Module, kept: Collection[str] = ()) -> list[str]:
    """Names of the linear layers in a model's repeated blocks that have no parameter in `kept`.

    Embeddings, heads, projections before and after the blocks, convolutions, norms and weights that two modules share
    are not quantized.
    """
    # Repeated blocks are in a ModuleList.
    lists = [
        f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    ]
    inside = [
        name
        for name, module in model.named_modules()
        # Subclasses may use their weights in other ways than in a matrix product.
        if type(module) is nn.Linear and name.startswith(tuple(lists))
    ]
    # Names of parameters: the layer's name is before the last dot.
    excluded = {*tied_layers(model, inside), *(parameter.rpartition(".")[0] for parameter in kept)}
    return [name for name in inside if name not in excluded]


def quantize_base(model: nn.Module, kind: Kind, kept: Collection[str] = ()) -> QuantizeReport:
    """Replace the `quantizable` layers with `NarrowLinear`s, in place. Attach adapters afterwards.

    Layers are quantized one after another, on the GPU if there is one, and moved back; so the GPU needs memory for one
    layer. Raises `DitLoraError` if there is no such layer, and lists all weights that are not finite, which
    quantization could hide. The model must not be used after an error.
    """
    names = quantizable(model, kept)
    if not names:
        raise DitLoraError(
            f"model.quantize={kind}: no linear layer of {type(model).__name__} is left to quantise: its blocks have "
            "none, or optim.groups trains them"
        )
    device = next(model.parameters()).device
    before, num_parameters = stored_bytes(model), sum(p.numel() for p in model.parameters())
    # All layers are checked before the error, so that it lists every one.
    count, bad = 0, list[str]()
    for name in names:
        layer = _on_gpu(model.get_submodule(name))
        # A sum needs one pass over the weight; finding the bad values needs several.
        if not torch.isfinite(layer.weight.sum(dtype=torch.float32)):
            bad += not_finite([(f"{name}.weight", layer.weight)])
        count += layer.weight.numel()
        # The original weight is freed here.
        model.set_submodule(name, NarrowLinear(layer, kind).to(device))
    if bad:
        raise DitLoraError(
            listed("these base weights are not finite; fetch the checkpoint again", bad)
        )
    return QuantizeReport(kind, len(names), count, num_parameters, before, stored_bytes(model))


def quantized_bytes(model: nn.Module, kind: Kind | None, kept: Collection[str] = ()) -> int:
    """Bytes of the model's parameters after quantization. Only shapes are read, so the model may be on `meta`."""
    if kind is None:
        return stored_bytes(model)
    weights = [model.get_parameter(f"{name}.weight") for name in quantizable(model, kept)]
    # In the weight's current dtype minus the codes and scales.
    saved = sum(weight.nbytes - narrowed_bytes(weight.shape, kind) for weight in weights)
    return stored_bytes(model) - saved


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def _on_gpu(wide: nn.Module) -> nn.Linear:
    assert isinstance(wide, nn.Linear)
    if torch.cuda.is_available():
        wide.weight.data = wide.weight.data.cuda()
    return wide
