"""Linear layers with quantized frozen weights (NF4, int8, fp8), and iteration over the values that a guard checks.

The matrix product saves only the quantized weight for backward. Diffusers' layerwise casting and torchao's weight-only
int8 save the dequantized copy, so that without checkpointing all copies are in memory at once. Inputs are not
quantized: LLM.int8() (arXiv 2208.07339) quantizes them too, and its integers hide a NaN.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dit_lora.numerics.dtensors import get_local_tensor

Quantization = Literal["nf4", "int8", "fp8"]
_FP8 = torch.float8_e4m3fn
_MAX_CODE = {"int8": 127.0, "fp8": torch.finfo(_FP8).max}
_BLOCK_SIZE = 64  # weights that share a scale in NF4, as QLoRA has it (arXiv 2305.14314)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with 4 or 8 bits per weight and fp32 scales; computes in its input's dtype.

    `weight` holds codes. `nf4`: two of bitsandbytes' codes per byte, (out * in / 2, 1), and a scale for each 64
    weights. `int8` and `fp8` (e4m3): (out, in), and a scale per row that maps the row's largest weight to the largest
    code. fp8 codes are stored as uint8 bits, which every backend of torch.distributed can send.
    """

    def __init__(self, layer: nn.Linear, kind: Quantization) -> None:
        # The constructor of nn.Linear would allocate a full-precision weight again.
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.kind: Quantization = kind
        codes, scale = quantize_weight(layer.weight.data, kind)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        # Biases are small and stay as they are.
        self.bias = layer.bias
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        # Autocast casts the inputs of torch's own ops, not those of a custom function.
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        # Codes of nf4 are flat, so the shape is passed separately.
        shape = (self.out_features, self.in_features)
        return _QuantizedMatmul.apply(x, self.weight, self.scale, bias, self.kind, shape)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Dequantized weight of a quantized layer, (out, in), with the values that its matrix product uses."""
        shape = (self.out_features, self.in_features)
        return dequantize_weight(self.weight, self.scale, dtype, self.kind, shape)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kind={self.kind}"


def quantize_weight(weight: Tensor, kind: Quantization) -> tuple[Tensor, Tensor]:
    """Quantize a finite weight (out, in) to codes and fp32 scales in the layout of `QuantizedLinear`.

    Rounds to the nearest code.
    """
    if kind == "nf4":
        from bitsandbytes.functional import quantize_4bit

        # Two codes per byte, and the largest magnitude of each block.
        codes, state = quantize_4bit(weight.contiguous(), blocksize=_BLOCK_SIZE, quant_type="nf4")
        return codes, state.absmax
    # (out, in); scale and codes by row.
    values = weight.float()
    scale = values.abs().amax(dim=1) / _MAX_CODE[kind]
    # A row of zeros has scale 0 and codes 0: divide by 1 instead of 0.
    codes = values / torch.where(scale == 0, 1.0, scale)[:, None]
    if kind == "int8":
        return codes.round_().to(torch.int8), scale
    # The cast rounds to the nearest e4m3 number; the view stores its bits.
    return codes.to(_FP8).view(torch.uint8), scale


def count_quantized_weight_bytes(shape: torch.Size, kind: Quantization) -> int:
    """Bytes of a quantized weight: its codes and scales."""
    count = shape.numel()
    if kind == "nf4":
        # Half a byte per weight, and an fp32 scale per block.
        return -(-count // 2) + 4 * -(-count // _BLOCK_SIZE)
    # One byte per weight, and an fp32 scale per row.
    return count + 4 * shape[0]


def dequantize_weight(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, kind: Quantization, shape: tuple[int, int]
) -> Tensor:
    """Convert codes and scales from `quantize_weight` back to a weight in `dtype`, with one rounding."""
    if kind == "nf4":
        from bitsandbytes.functional import QuantState, dequantize_4bit

        size = torch.Size(shape)
        state = QuantState(scale, shape=size, dtype=dtype, blocksize=_BLOCK_SIZE, quant_type="nf4")
        return dequantize_4bit(codes, state)
    # Both kinds of codes are exact in bf16.
    values = codes.view(_FP8) if kind == "fp8" else codes
    # In place on the copy that the cast made: (out, in) times (out, 1).
    return values.to(dtype).mul_(scale[:, None])


class _QuantizedMatmul(torch.autograd.Function):
    """Computes x @ weight.T + bias and saves only the quantized weight for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        kind: Quantization,
        shape: tuple[int, int],
    ) -> Tensor:
        # x is not saved: the weight is frozen, and the gradient of x does not depend on x.
        ctx.save_for_backward(codes, scale)
        ctx.kind, ctx.shape = kind, shape
        return linear(x, dequantize_weight(codes, scale, x.dtype, kind, shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        (grad,) = gradients
        # Only x gets a gradient: the weight and the bias are frozen.
        return grad @ dequantize_weight(codes, scale, grad.dtype, ctx.kind, ctx.shape), *[None] * 5


def iterate_weight_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter by name (this rank's shard), plus the quantization constants of bitsandbytes' layers.

    fp8 codes come as floats. A 4-bit weight comes with `absmax`, the scales of its blocks, an 8-bit one with `SCB`.
    """
    # Ids of parameters, because tied weights have several names.
    yielded = set()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for key, parameter in module.named_parameters(recurse=False):
            # Yield parameters that modules share only once.
            if id(parameter) in yielded:
                continue
            yielded.add(id(parameter))
            values = get_local_tensor(parameter.detach())
            is_fp8 = isinstance(module, QuantizedLinear) and module.kind == "fp8" and key == "weight"
            yield prefix + key, values.view(_FP8) if is_fp8 else values
            for constant, tensor in _get_quantization_constants(module, parameter).items():
                yield prefix + constant, tensor


def _get_quantization_constants(module: Any, parameter: Tensor) -> dict[str, Tensor]:
    """The quantization constants that bitsandbytes' Linear4bit and Linear8bitLt keep; empty for other parameters."""
    # Only bitsandbytes' 4-bit parameters have this attribute.
    constants, four_bits = {}, getattr(parameter, "quant_state", None)
    if four_bits is not None:
        constants["absmax"] = four_bits.absmax
        # With double quantization the scales are quantized too, and have an offset and scales of their own.
        if four_bits.nested:
            constants |= {"absmax_offset": four_bits.offset, "absmax_absmax": four_bits.state2.absmax}
    if hasattr(parameter, "SCB"):
        # The layer's first forward takes it from the parameter.
        scales = parameter.SCB if parameter.SCB is not None else module.state.SCB
        constants |= {} if scales is None else {"SCB": scales}
    return constants
