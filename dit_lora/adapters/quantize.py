"""Quantisation of a model's frozen linear layers, one at a time; what trains goes on top of them in fp32."""

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
    """Numbers of the layers and weights that were quantised, and the base's bytes before and after."""

    kind: Kind
    layers: int
    parameters: int
    """Number of weights in the quantised layers."""
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
    """Return names of the linear layers inside a model's repeated blocks that have no parameter in `kept`.

    Embeddings, heads, projections before and after the blocks, convolutions, norms and weights that two
    modules share stay as they are.
    """
    lists = [
        f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    ]
    inside = [
        name
        for name, module in model.named_modules()
        # Subclasses may use their weights in other ways than a product.
        if type(module) is nn.Linear and name.startswith(tuple(lists))
    ]
    left = {*tied_layers(model, inside), *(parameter.rpartition(".")[0] for parameter in kept)}
    return [name for name in inside if name not in left]


def quantize_base(model: nn.Module, kind: Kind, kept: Collection[str] = ()) -> QuantizeReport:
    """Replace the `quantizable` layers by `NarrowLinear`s, in place; attach adapters afterwards.

    Each wide weight goes before the next is quantised: on the GPU if there is one, which needs room for one
    layer, and back to where it was. Raises `DitLoraError` if there is no such layer, or with every weight
    that is not finite, which its codes could hide; the model is then not to be used.
    """
    names = quantizable(model, kept)
    if not names:
        raise DitLoraError(
            f"model.quantize={kind}: no linear layer of {type(model).__name__} is left to quantise: its blocks have "
            "none, or optim.groups trains them"
        )
    home = next(model.parameters()).device
    before, whole = stored_bytes(model), sum(p.numel() for p in model.parameters())
    count, bad = 0, list[str]()
    for name in names:
        wide = _on_gpu(model.get_submodule(name))
        # A sum takes one pass, where finding which values are bad takes several.
        if not torch.isfinite(wide.weight.sum(dtype=torch.float32)):
            bad += not_finite([(f"{name}.weight", wide.weight)])
        count += wide.weight.numel()
        model.set_submodule(name, NarrowLinear(wide, kind).to(home))
    if bad:
        raise DitLoraError(
            listed("these base weights are not finite; fetch the checkpoint again", bad)
        )
    return QuantizeReport(kind, len(names), count, whole, before, stored_bytes(model))


def quantized_bytes(model: nn.Module, kind: Kind | None, kept: Collection[str] = ()) -> int:
    """Return the bytes that the model's parameters would take; only shapes are read, so they may be on `meta`."""
    if kind is None:
        return stored_bytes(model)
    weights = [model.get_parameter(f"{name}.weight") for name in quantizable(model, kept)]
    saved = sum(weight.nbytes - narrowed_bytes(weight.shape, kind) for weight in weights)
    return stored_bytes(model) - saved


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def _on_gpu(wide: nn.Module) -> nn.Linear:
    assert isinstance(wide, nn.Linear)
    if torch.cuda.is_available():
        wide.weight.data = wide.weight.data.cuda()
    return wide
