"""Frozen weights stored in fewer bits than they are computed with, and what a guard must see of them.

The product with such a weight keeps nothing wide for its backward pass: Diffusers' layerwise casting and torchao's
weight-only int8 save the wide copy that they compute with, so that without checkpointing all of them are in memory
at once. Inputs stay as they are: LLM.int8() (arXiv 2208.07339) rounds them too, and its integers hide a NaN.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dit_lora.numerics.dtensors import local

Kind = Literal["nf4", "int8", "fp8"]
_FP8 = torch.float8_e4m3fn
_LARGEST = {"int8": 127.0, "fp8": torch.finfo(_FP8).max}
_BLOCK = 64  # weights that share a scale in NF4, as QLoRA has it (arXiv 2305.14314)


class NarrowLinear(nn.Linear):
    """A frozen linear layer with 4 or 8 bits a weight and fp32 scales; computes in its input's dtype.

    `weight` holds codes. `nf4`: two of bitsandbytes' codes a byte, (out * in / 2, 1), and a scale for each 64 weights.
    `int8`, and `fp8` (e4m3): (out, in), and a scale a row that makes its largest weight the largest code; of `fp8` the
    bits as uint8, which every backend of torch.distributed can send.
    """

    def __init__(self, wide: nn.Linear, kind: Kind) -> None:
        # The constructor of nn.Linear would allocate the wide weight again.
        nn.Module.__init__(self)
        self.in_features, self.out_features = wide.in_features, wide.out_features
        self.kind: Kind = kind
        codes, scale = narrowed(wide.weight.data, kind)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = wide.bias
        self.train(wide.training)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        # Autocast casts the inputs of torch's own ops, not those of a custom function.
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        shape = (self.out_features, self.in_features)
        product: Tensor = _Product.apply(x, self.weight, self.scale, bias, self.kind, shape)
        return product

    def widened(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (out, in), as the product takes it."""
        shape = (self.out_features, self.in_features)
        return widened(self.weight, self.scale, dtype, self.kind, shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind}"


def narrowed(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Return codes and fp32 scales of a finite weight (out, in), as `NarrowLinear` keeps them; rounded to the
    nearest.
    """
    if kind == "nf4":
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(weight.contiguous(), blocksize=_BLOCK, quant_type="nf4")
        return codes, state.absmax
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / _LARGEST[kind]
    # A row of zeros has the scale 0, and codes 0 whatever they are divided by.
    codes = wide / torch.where(scale == 0, 1.0, scale)[:, None]
    if kind == "int8":
        return codes.round_().to(torch.int8), scale
    return codes.to(_FP8).view(torch.uint8), scale


def narrowed_bytes(shape: torch.Size, kind: Kind) -> int:
    """Return bytes of a weight's codes and scales."""
    count = shape.numel()
    if kind == "nf4":
        return -(-count // 2) + 4 * -(-count // _BLOCK)
    return count + 4 * shape[0]


def widened(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, kind: Kind, shape: tuple[int, int]
) -> Tensor:
    """Return the inverse of `narrowed`, in `dtype`, with one rounding."""
    if kind == "nf4":
        from bitsandbytes.functional import QuantState, dequantize_4bit

        made = torch.Size(shape)
        state = QuantState(scale, shape=made, dtype=dtype, blocksize=_BLOCK, quant_type="nf4")
        wide: Tensor = dequantize_4bit(codes, state)
        return wide
    # Both kinds of codes are exact in bf16.
    values = codes.view(_FP8) if kind == "fp8" else codes
    return values.to(dtype).mul_(scale[:, None])


class _Product(torch.autograd.Function):
    """Computes x @ weight.T + bias, saving the codes alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        kind: Kind,
        shape: tuple[int, int],
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.kind, ctx.shape = kind, shape
        return linear(x, widened(codes, scale, x.dtype, kind, shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        (grad,) = gradients
        return grad @ widened(codes, scale, grad.dtype, ctx.kind, ctx.shape), *[None] * 5


def weight_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by name, this rank's part of it, and what bitsandbytes' own layers keep beside theirs.

    fp8 codes come as floats; of a 4-bit weight also `absmax`, the scales of its blocks, of an 8-bit one `SCB`.
    """
    seen = set()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for key, parameter in module.named_parameters(recurse=False):
            # Parameters that modules share come once.
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            values = local(parameter.detach())
            is_fp8 = isinstance(module, NarrowLinear) and module.kind == "fp8" and key == "weight"
            yield prefix + key, values.view(_FP8) if is_fp8 else values
            for constant, tensor in _constants(module, parameter).items():
                yield prefix + constant, tensor


def _constants(module: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return what bitsandbytes' Linear4bit and Linear8bitLt keep beside a parameter; empty if it is not theirs."""
    constants, four_bits = {}, getattr(parameter, "quant_state", None)
    if four_bits is not None:
        constants["absmax"] = four_bits.absmax
        if four_bits.nested:
            constants |= {
                "absmax_offset": four_bits.offset,
                "absmax_absmax": four_bits.state2.absmax,
            }
    if hasattr(parameter, "SCB"):
        # The layer's first forward takes it from the parameter.
        scales = parameter.SCB if parameter.SCB is not None else module.state.SCB
        constants |= {} if scales is None else {"SCB": scales}
    return constants
