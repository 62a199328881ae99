"""Quantize a model's frozen linear layers, one at a time. Adapters are attached afterwards and train in fp32."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from dit_lora.adapters.attach import find_tied_layers
from dit_lora.errors import DitLoraError, format_list
from dit_lora.numerics.finite import describe_nonfinite_tensors
from dit_lora.numerics.quantized_linear import Quantization, QuantizedLinear, count_quantized_weight_bytes


@dataclass(frozen=True)
class QuantizeReport:
    """Numbers of quantized layers and weights, and the size of the base before and after."""

    kind: Quantization
    num_layers: int
    num_parameters: int
    """Number of weights in the quantized layers."""
    num_total_parameters: int
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        share = self.num_parameters / self.num_total_parameters
        before, after = self.bytes_before / 2**20, self.bytes_after / 2**20
        return (
            f"quantize: {self.kind}: {self.num_layers} linear layers, {share:.0%} of the weights; the base "
            f"needs {after:.4g} MiB instead of {before:.4g}"
        )


def find_quantizable_layers(model: nn.Module, excluded_parameters: Collection[str] = ()) -> list[str]:
    """Names of the linear layers in a model's repeated blocks that have no parameter in `excluded_parameters`.

    Embeddings, heads, projections before and after the blocks, convolutions, norms and weights that two modules share
    are not quantized.
    """
    # Repeated blocks are in a ModuleList.
    lists = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    inside = [
        name
        for name, module in model.named_modules()
        # Subclasses may use their weights in other ways than in a matrix product.
        if type(module) is nn.Linear and name.startswith(tuple(lists))
    ]
    # Names of parameters: the layer's name is before the last dot.
    excluded = {*find_tied_layers(model, inside), *(parameter.rpartition(".")[0] for parameter in excluded_parameters)}
    return [name for name in inside if name not in excluded]


def quantize_base(model: nn.Module, kind: Quantization, excluded_parameters: Collection[str] = ()) -> QuantizeReport:
    """Replace the `find_quantizable_layers` layers with `QuantizedLinear`s, in place. Attach adapters afterwards.

    Layers are quantized one after another, on the GPU if there is one, and moved back; so the GPU needs memory for one
    layer. Raises `DitLoraError` if there is no such layer, and lists all weights that are not finite, which
    quantization could hide. The model must not be used after an error.
    """
    names = find_quantizable_layers(model, excluded_parameters)
    if not names:
        raise DitLoraError(
            f"model.quantize={kind}: no linear layer of {type(model).__name__} is left to quantise: its blocks have "
            "none, or optim.groups trains them"
        )
    device = next(model.parameters()).device
    before, num_parameters = count_parameter_bytes(model), sum(p.numel() for p in model.parameters())
    # All layers are checked before the error, so that it lists every one.
    count, bad = 0, list[str]()
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if torch.cuda.is_available():
            layer.weight.data = layer.weight.data.cuda()
        # A sum needs one pass over the weight; finding the bad values needs several.
        if not torch.isfinite(layer.weight.sum(dtype=torch.float32)):
            bad += describe_nonfinite_tensors([(f"{name}.weight", layer.weight)])
        count += layer.weight.numel()
        # The original weight is freed here.
        model.set_submodule(name, QuantizedLinear(layer, kind).to(device))
    if bad:
        raise DitLoraError(format_list("these base weights are not finite; download the checkpoint again", bad))
    return QuantizeReport(kind, len(names), count, num_parameters, before, count_parameter_bytes(model))


def count_quantized_bytes(
    model: nn.Module, kind: Quantization | None, excluded_parameters: Collection[str] = ()
) -> int:
    """Bytes of the model's parameters after quantization. Only shapes are read, so the model may be on `meta`."""
    if kind is None:
        return count_parameter_bytes(model)
    weights = [model.get_parameter(f"{name}.weight") for name in find_quantizable_layers(model, excluded_parameters)]
    # In the weight's current dtype minus the codes and scales.
    saved = sum(weight.nbytes - count_quantized_weight_bytes(weight.shape, kind) for weight in weights)
    return count_parameter_bytes(model) - saved


def count_parameter_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())
