"""Products with frozen weights in fp8: both operands in e4m3, one fp32 scale a row of each, sums in fp32.

    y = x W^T:  code(x)[n, i] = x[n, i] / s[n],  s[n] = max_i |x[n, i]| / 448;  W by its rows likewise
    y[n, o] = s[n] s[o] sum_i code(x)[n, i] code(W)[o, i]

A weight is rounded once, by rows for x W^T and by columns for dy W. Gradients are e4m3 too. A code of e4m3 is within
2^-4 of its value, or within 2^-10 of its row's scale if that is more; one of e5m2 is within 2^-3, and its range helps
only below 1/28672 of a row's largest value. So |error of y| is at most ERROR sum_i |x W|, and
FLOOR (s[n] sum_i |W| + s[o] sum_i |x|).

A row of x that is not finite gives a row of y that is not: an Inf makes its scale Inf and its code NaN (Inf / Inf),
before a cast could saturate it. Casts saturate in torch 2.13 on a CPU, and on a GPU.

Shape suffixes: N rows, I in, O out. Source: torch._scaled_mm with a scale a row; as torchao's rowwise recipe.
"""

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
ERROR = 2 * 2.0**-4 + 2.0**-8 + 2.0**-8
"""Error bound of a product, as a share of the sum of its terms' magnitudes: rounding of each operand, both, and y."""
FLOOR = 2.0**-10 * (1 + 2.0**-4) + 2.0**-16
"""Additional error bound for values far below their row's largest, in scales of the rows (docs/kernels.md)."""
_LARGEST = torch.finfo(E4M3).max
_SMALLEST = torch.finfo(torch.float32).tiny  # scale of a row of zeros, which it leaves zeros
_MAX_RELATIVE_ERROR = 0.08  # of a product's norm: twice what rounding random values makes
_MULTIPLE = 16  # of O and I, which torch._scaled_mm asks for


class Fp8Matrix(NamedTuple):
    """Codes (R, K) in e4m3, contiguous, and fp32 scales (R, 1)."""

    codes: Tensor
    scale: Tensor


class Fp8Weight(NamedTuple):
    """A frozen weight in fp8 twice: by rows (O, I), for x W^T; and its transpose by rows (I, O), for dy W."""

    forward: Fp8Matrix
    backward: Fp8Matrix


def can_multiply_in_fp8(weight: Tensor) -> bool:
    """True if products with this weight (O, I) can use fp8: it is bf16, and its sizes are multiples of 16."""
    return weight.dtype is torch.bfloat16 and all(size % _MULTIPLE == 0 for size in weight.shape)


def quantize_rows(x: Tensor) -> Fp8Matrix:
    """Quantise (R, K) into codes and scales; a row that is not finite keeps a non-finite code or scale."""
    # The norm hands on a NaN, as does `clamp`.
    largest = torch.linalg.vector_norm(x, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    scale = (largest / _LARGEST).clamp(min=_SMALLEST)
    return Fp8Matrix((x / scale).to(E4M3).contiguous(), scale)


def quantize_weight(weight: Tensor) -> Fp8Weight:
    """Quantise a weight (O, I) for both products; needs two bytes per element in all."""
    weight = weight.detach()
    return Fp8Weight(quantize_rows(weight), quantize_rows(weight.t().contiguous()))


def multiply(rows: Fp8Matrix, weight: Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Rows (N, K) times the transpose of weight (M, K), plus bias (M,), as bf16 (N, M).

    Without a GPU the same codes are multiplied in fp32.
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
    """Reason why this machine has no fp8 products; None if it has. Runs one small product on the current GPU."""
    if not torch.cuda.is_available():
        return "fp8 products need a GPU of compute capability 8.9 or more, and there is no GPU"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name()
        return f"fp8 products need compute capability 8.9 or more; {name} has {major}.{minor}"
    generator = torch.Generator().manual_seed(0)
    shapes = ((37, 64), (32, 64), (32,))  # any number of rows
    x, w, bias = (torch.randn(s, generator=generator).bfloat16().cuda() for s in shapes)
    try:
        y = multiply(quantize_rows(x), quantize_rows(w), bias)
    except RuntimeError as error:  # torch has no such product for every GPU with fp8
        return f"torch._scaled_mm with a scale a row: {str(error).partition(chr(10))[0]}"
    exact = x.double() @ w.double().t() + bias.double()
    if bool((y.double() - exact).norm() <= _MAX_RELATIVE_ERROR * exact.norm()):
        return None
    return "torch._scaled_mm with a scale a row is off by more than fp8's rounding on this GPU"
