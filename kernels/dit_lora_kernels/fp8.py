"""Matrix products with frozen weights in fp8: both operands in e4m3, one fp32 scale for each row, sums in fp32.

    y = x W^T:  code(x)[n, i] = x[n, i] / s[n],  s[n] = max_i |x[n, i]| / 448;  W by its rows likewise
    y[n, o] = s[n] s[o] sum_i code(x)[n, i] code(W)[o, i]

Shapes: x (N, I) has N rows of I inputs, W (O, I) has O outputs. A code is an element divided by its row's scale and
rounded to e4m3, the fp8 format with 4 exponent and 3 mantissa bits, whose largest value is 448.

The forward computes x W^T, and the backward dy W for the gradient dy of y. The weight is therefore quantised twice: by
rows for x W^T and by columns for dy W, each time from the original. Gradients are quantised to e4m3 too. A code of
e4m3 is within 2^-4 of its value, or within 2^-10 of its row's scale if that is more. A code of e5m2 is within 2^-3,
and its larger range helps only for elements below 1/28672 of a row's largest. So |error of y| is at most the sum of
ERROR sum_i |x W| and FLOOR (s[n] sum_i |W| + s[o] sum_i |x|).

A row of x that is not finite gives a row of y that is not: an Inf makes its scale Inf and its code NaN (Inf / Inf),
before a cast could saturate it. Casts saturate in torch 2.13 on a CPU, and on a GPU.

Source: torch._scaled_mm with a scale for each row, as in torchao's rowwise recipe.
"""

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
ERROR = 2 * 2.0**-4 + 2.0**-8 + 2.0**-8
"""Error bound of a product, relative to the sum of its terms' magnitudes: rounding of either operand, both, and y."""
FLOOR = 2.0**-10 * (1 + 2.0**-4) + 2.0**-16
"""Additional error bound for elements far below the largest of their row, in units of its scale (docs/kernels.md)."""
_LARGEST = torch.finfo(E4M3).max
_SMALLEST = torch.finfo(torch.float32).tiny  # the scale of a row of zeros, whose codes are then zeros
_MAX_RELATIVE_ERROR = 0.08  # of a product's norm: twice what rounding random values makes
_MULTIPLE = 16  # torch._scaled_mm requires that O and I are multiples of it


class Fp8Matrix(NamedTuple):
    """A matrix quantised by rows: contiguous codes (R, K) in e4m3, and fp32 scales (R, 1) that multiply them."""

    codes: Tensor
    scale: Tensor


class Fp8Weight(NamedTuple):
    """A frozen weight in fp8, quantised for both of its matrix products.

    `forward` is the weight (O, I), with a scale for each of its rows, for x W^T. `backward` is its transpose (I, O),
    with a scale for each row of that, for the gradient dy W.
    """

    forward: Fp8Matrix
    backward: Fp8Matrix


def can_multiply_in_fp8(weight: Tensor) -> bool:
    """True if products with this weight (O, I) can use fp8: it is bf16, and its sizes are multiples of 16."""
    return weight.dtype is torch.bfloat16 and all(size % _MULTIPLE == 0 for size in weight.shape)


def quantize_rows(x: Tensor) -> Fp8Matrix:
    """Quantise a matrix (R, K) to e4m3 with a scale per row; a non-finite row gets a non-finite code or scale."""
    # The norm of a row with a NaN is NaN, and `clamp` keeps it.
    largest = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    scale = (largest / _LARGEST).clamp(min=_SMALLEST)
    return Fp8Matrix((x / scale).to(E4M3).contiguous(), scale)


def quantize_weight(weight: Tensor) -> Fp8Weight:
    """Quantise a weight (O, I) for the forward x W^T and, transposed, for the backward dy W; 2 bytes per element."""
    weight = weight.detach()
    return Fp8Weight(quantize_rows(weight), quantize_rows(weight.t().contiguous()))


def multiply_fp8(rows: Fp8Matrix, weight: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Multiply quantised rows (N, K) by the transpose of a quantised weight (M, K), and add bias (M,); bf16 (N, M).

    On a GPU this is an fp8 product with fp32 sums. On a CPU the same codes are multiplied in fp32.
    """
    if rows.codes.is_cuda:
        # Without fast accumulation: it keeps 14 bits of a sum, and the bounds above are of fp32 sums.
        return torch._scaled_mm(
            rows.codes,
            weight.codes.t(),
            scale_a=rows.scale,
            scale_b=weight.scale.t(),
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=False,
        )
    y = rows.codes.float() @ weight.codes.float().t()
    y = y * rows.scale * weight.scale.t()
    return (y if bias is None else y + bias.float()).to(torch.bfloat16)


def find_unavailable_reason() -> str | None:
    """Find out why this machine cannot compute fp8 products. Returns the reason as text, or None if it can.

    Runs one small product on the current GPU, and compares it with the exact result.
    """
    if not torch.cuda.is_available():
        return "fp8 products need a GPU of compute capability 8.9 or more; torch finds no GPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name()
        return f"fp8 products need compute capability 8.9 or more; {name} has {major}.{minor}"
    generator = torch.Generator().manual_seed(0)
    shapes = ((37, 64), (32, 64), (32,))  # any number of rows
    x, w, bias = (torch.randn(s, generator=generator).bfloat16().cuda() for s in shapes)
    try:
        y = multiply_fp8(quantize_rows(x), quantize_rows(w), bias)
    except RuntimeError as error:  # torch has no such product for every GPU with fp8
        return f"torch._scaled_mm fails with one scale per row: {str(error).partition(chr(10))[0]}"
    exact = x.double() @ w.double().t() + bias.double()
    if bool((y.double() - exact).norm() <= _MAX_RELATIVE_ERROR * exact.norm()):
        return None
    return "on this GPU the error of torch._scaled_mm with one scale per row is larger than fp8's rounding"
