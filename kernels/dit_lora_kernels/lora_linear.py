"""Linear layers with a LoRA adapter on a frozen base, for one layer or several that share an input.

    y = x W^T + bias + s dropout(x) A^T B^T        frozen: W, bias; trained: A, B

Shapes: N rows (batch x tokens), I in, O out, R rank. Terms:

- Projection: one linear layer with its adapter. The layers for q, k and v are three projections of one input.
- Base: the frozen weight W (O, I) and bias (O,), or a base that another library quantised.
- A (R, I) and B (O, R) are the LoRA factors, and s is the scaling (alpha / rank, `scaling`).
- Compute dtype: that of all products but fp8 ones: autocast's, or the base's. Lowered factors are A and s*B in it.
- Inner products: x A^T (N, R), which B then multiplies. They are saved for dB.
- dy, dx, dA and dB are gradients. The two products of the base are x W^T in the forward and dy W in the backward.
- `narrow` holds the base in fp8 (see fp8.py), where a projection has one.

Source: LoRA, https://arxiv.org/abs/2106.09685, section 4.1; PEFT's `tuners/lora/layer.py` computes the same.

All products are cuBLAS GEMMs; this module has no Triton kernel. `addmm` adds each product into its sum, and s is
folded into B.

Memory traffic in addition to that of the base products, with e bytes per element: the forward reads x (N*I*e) once for
all projections and reads and writes each y (2*N*O*e). The backward reads x once, reads each dy twice, and reads and
writes dx once for all adapters. Saved: x once, the inner products without s (N*R*e), and with dropout a mask of N*I
bytes for each projection.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from dit_lora_kernels import fp8
from dit_lora_kernels.fp8 import Fp8Matrix, Fp8Weight
from dit_lora_kernels.support import accumulation_dtype, apply_plainly, is_eager_without_transforms

COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Adapter(NamedTuple):
    """A LoRA adapter: factors A (R, I) and B (O, R), and the scaling of their product.

    A and B may have any floating dtypes, in which their gradients are returned. `lowered` is the result of
    `cast_lora_factors`, A and scaling*B in the compute dtype, if the caller keeps it for several calls; else None.
    """

    a: Tensor
    b: Tensor
    scaling: float
    lowered: tuple[Tensor, Tensor] | None = None


class Quantized(NamedTuple):
    """A frozen linear layer that another library quantised, as two functions.

    `product` takes rows (N, I) and returns the layer's output (N, O), bias included. `dequantize` takes a dtype and
    returns the weight (O, I) in that dtype.
    """

    product: Callable[[Tensor], Tensor]
    dequantize: Callable[[torch.dtype], Tensor]


class Projection(NamedTuple):
    """One linear layer and its adapter.

    The base is either a frozen `weight` (O, I) and `bias` (O,) or None, or a `quantized` layer of another library, in
    which case weight and bias are None. `fp8` is the weight quantised to fp8. With it, the layer's forward product x
    W^T and its backward product dy W are computed in fp8; the products with the adapter's A and B are still in the
    compute dtype.
    """

    weight: Tensor | None
    bias: Tensor | None
    adapter: Adapter
    quantized: Quantized | None = None
    fp8: Fp8Weight | None = None


def compute_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype of the matrix products: autocast's if it is on, else the weight's, or x's if weight is None."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype if weight is None else weight.dtype


def cast_lora_factors(a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast the LoRA factors to the compute dtype: A (R, I) and scaling*B (O, R), detached, each rounded once."""
    # s is folded into B: O*R products here in place of N*O on the output.
    a, b = a.detach(), b.detach()
    scaled = b if scaling == 1 else b.to(torch.promote_types(b.dtype, dtype)) * scaling
    return a.to(dtype), scaled.to(dtype)


@torch.no_grad()
def cast_all_lora_factors(
    adapters: Sequence[tuple[Tensor, Tensor, float]], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Apply `cast_lora_factors` to every (a, b, scaling), in a few launches for all; the results are bitwise the same.

    All adapters must have one dtype per factor and be on one device.
    """
    a = [matrix for matrix, _, _ in adapters]
    b = [matrix for _, matrix, _ in adapters]
    scalings = [scaling for *_, scaling in adapters]
    if torch.promote_types(b[0].dtype, dtype) is not b[0].dtype:  # must be multiplied in a wider dtype
        return [cast_lora_factors(*adapter, dtype) for adapter in adapters]
    # PyTorch's optimizers use these two functions, which have no public names.
    if any(scaling != 1 for scaling in scalings):
        b = list(torch._foreach_mul(b, scalings))
    lowered: list[list[Tensor]] = []
    for wide in (a, b):
        if wide[0].dtype is dtype:
            low = [tensor.detach() for tensor in wide]
        else:
            low = [torch.empty_like(tensor, dtype=dtype) for tensor in wide]
            torch._foreach_copy_(low, wide)
        lowered.append(low)
    return list(zip(*lowered, strict=True))


def lora_linear(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    adapter: Adapter,
    *,
    dropout: float = 0.0,
    quantized: Quantized | None = None,
) -> Tensor:
    """Apply a linear layer with a LoRA adapter, without extra passes for casts, scaling or sums.

    Args:
        x: (..., I), cast to the compute dtype, which is `compute_dtype(x, weight)`.
        weight: (O, I), frozen, cast to the compute dtype under autocast; None if `quantized` is passed.
        bias: (O,), frozen; None for a layer without one.
        adapter: The trained factors A and B, and their scaling.
        dropout: Dropout probability on the adapter's input, in [0, 1). The mask is the one that `F.dropout` would draw
            here for x in the compute dtype.
        quantized: The frozen layer, if another library quantised it.

    Returns:
        The output (..., O) in the compute dtype. The backward saves x once. The gradient of x is in x's dtype, those
        of A and B are in theirs, from fp32 sums (on a GPU, of a GEMM with fp32 output).

    Raises:
        ValueError: shapes do not fit, the base is not frozen, or `dropout` is outside [0, 1).
    """
    return lora_qkv(x, [Projection(weight, bias, adapter, quantized)], dropout=dropout)[0]


def lora_qkv(x: Tensor, projections: Sequence[Projection], *, dropout: float = 0.0) -> tuple[Tensor, ...]:
    """Apply several adapted linear layers to the same x; x is saved only once, and A's products are one GEMM.

    The gradient of x is one buffer, into which every product is added. With dropout each layer draws its own mask, in
    order, as separate calls would; A's products are then separate GEMMs.

    Args:
        x: (..., I), the input of all layers.
        projections: The layers with their adapters; they must have one compute dtype.
        dropout: Dropout probability on the adapters' inputs, in [0, 1).

    Returns:
        For each layer its output (..., O), as `lora_linear` computes it.

    Raises:
        ValueError: as for `lora_linear`, or compute dtypes differ.
    """
    dtype = compute_dtype(x, projections[0].weight)
    _check_operands(x, projections, dropout, dtype)
    return lora_qkv_unchecked(x, projections, dtype, dropout)


def lora_qkv_unchecked(
    x: Tensor, projections: Sequence[Projection], dtype: torch.dtype, dropout: float
) -> tuple[Tensor, ...]:
    """Compute several adapted linear layers of one x without checking the operands.

    `dtype` is their `compute_dtype`.
    """
    operands: list[Tensor | None] = []
    size = 10 if [p for p in projections if p.fp8 is not None] else 6
    # Flat, in order: autograd.Function sees gradients only of tensors that are arguments themselves.
    for weight, bias, (a, b, scaling, lowered), _, narrow in projections:
        operands += [weight, bias, a, b, *(lowered or cast_lora_factors(a, b, scaling, dtype))]
        if size > 6:
            operands += [None] * 4 if narrow is None else [*narrow.forward, *narrow.backward]
    settings = _Settings(dropout, [p.adapter.scaling for p in projections], [p.quantized for p in projections], size)
    apply = partial(apply_plainly, _LoraProjections) if is_eager_without_transforms() else _LoraProjections.apply
    return apply(_cast_if_needed(x, dtype), settings, *operands)


def _check_operands(x: Tensor, projections: Sequence[Projection], dropout: float, dtype: torch.dtype) -> None:
    """Raise ValueError for a dropout, dtype, shape or base that the LoRA linear op does not support."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1; got {dropout}")
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"the compute dtype must be one of {COMPUTE_DTYPES}; got {dtype}")
    for weight, bias, (a, b, _, lowered), quantized, narrow in projections:
        if narrow is not None and (dtype is not torch.bfloat16 or quantized is not None):
            raise ValueError(f"fp8 needs an unquantised weight and the compute dtype bfloat16; got {dtype}")
        computed = compute_dtype(x, weight)
        if computed is not dtype:
            raise ValueError(f"all projections of an input must compute in the same dtype; got {dtype} and {computed}")
        if b.ndim != 2 or a.shape != (b.shape[1], x.shape[-1]):
            raise ValueError(f"a must be (R, {x.shape[-1]}) and b (O, R); got {(*a.shape,)} and {(*b.shape,)}")
        if (weight is None) is (quantized is None) or (weight is None and bias is not None):
            raise ValueError("a projection needs either a weight and optionally a bias, or only `quantized`")
        for tensor, shape in ((weight, (b.shape[0], a.shape[1])), (bias, (b.shape[0],))):
            if tensor is not None and tensor.shape != shape:
                raise ValueError(f"a base tensor must have the shape {shape}; got {(*tensor.shape,)}")
            if tensor is not None and tensor.requires_grad:
                raise ValueError("the base must be frozen, but its weight or bias requires a gradient")
        if lowered is not None and {t.dtype for t in lowered} != {dtype}:
            raise ValueError(f"lowered a and b must be {dtype}; got {[t.dtype for t in lowered]}")


class _Settings(NamedTuple):
    """The non-tensor arguments of the autograd function `_LoraProjections`.

    `scalings` and `quantized` have one per layer.
    """

    dropout: float
    scalings: list[float]
    quantized: list[Quantized | None]
    size: int
    """Number of tensors per projection: weight, bias, a, b, and a and scaling*b in the compute dtype (lowered). If a
    projection uses fp8, four more follow: codes and scale for the forward and for the backward, or None. Gradients go
    to a and b, and the products use the others."""


class _LoraProjections(torch.autograd.Function):
    """Autograd function that computes the outputs of all projections (adapted linear layers) of one x.

    Autocast is off inside: every operand is in the compute dtype already, or is cast here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: _Settings, *operands: Any) -> tuple[Tensor, ...]:
        """Compute an output (..., O) for each projection of x (..., I).

        `operands` holds the tensors of all projections in one list, `settings.size` for each.
        """
        size = settings.size
        lows_a, lows_b = operands[4::size], operands[5::size]
        weights = list(operands[::size])
        narrow = [operands[i::size] for i in range(6, size)]
        outputs = []
        with _no_autocast(x):
            rows = _view_as_rows(x)
            products, masks = _compute_inner_products(rows, lows_a, settings.dropout)
            # Once for all of them: they share x.
            rounded = fp8.quantize_rows(rows) if narrow else None
            for i, quantized in enumerate(settings.quantized):
                bias = operands[size * i + 1]
                bias = None if bias is None else _cast_if_needed(bias, rows.dtype)
                # Each of these makes a new buffer, which may be added to.
                if rounded is not None and narrow[0][i] is not None:
                    y = fp8.multiply_fp8(rounded, Fp8Matrix(narrow[0][i], narrow[1][i]), bias)
                    weights[i] = None  # not saved either
                elif quantized is not None:
                    y = quantized.product(rows).to(rows.dtype)
                else:
                    y = linear(rows, _cast_if_needed(weights[i], rows.dtype), bias)
                # Added into the base's output, without a separate sum.
                y.addmm_(products[i], lows_b[i].t())
                outputs.append(y.view(*x.shape[:-1], y.shape[1]))
        ctx.settings, ctx.shape = settings, x.shape
        ctx.dtypes = [(operands[i + 2].dtype, operands[i + 3].dtype) for i in range(0, len(operands), size)]
        # Save x as passed in: for a strided x, `rows` is a second copy of memory that others keep. Only dA needs it.
        saved_x = x if any(ctx.needs_input_grad[4::size]) else None
        backward = [part for of_part in narrow[2:] for part in of_part]
        ctx.save_for_backward(saved_x, *weights, *lows_a, *lows_b, *products, *masks, *backward)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x and of every LoRA factor A and B, from those of the layers' outputs."""
        n, settings = len(gradients), ctx.settings
        x, *saved = ctx.saved_tensors
        weights, lows_a, lows_b, products = (saved[i : i + n] for i in range(0, 4 * n, n))
        remaining = saved[4 * n :]
        masks = remaining[:n] if settings.dropout else []
        narrow = remaining[len(masks) :] or [None] * (2 * n)
        needs_b = ctx.needs_input_grad[5 :: settings.size]
        d_b: list[Tensor | None] = [None] * n
        with _no_autocast(gradients[0]):
            dys = [_view_as_rows(dy) for dy in gradients]
            for i in range(n):
                if needs_b[i]:
                    d_b[i] = _weight_gradient(dys[i].t(), products[i])
                    # The products are x A^T without s, which dB has as a factor too.
                    if settings.scalings[i] != 1:
                        d_b[i] *= settings.scalings[i]
            # dy (s B) is the gradient of the inner products x A^T. dA and the adapters' part of dx follow from it.
            inner = [dys[i] @ lows_b[i] for i in range(n)]
            dx = None
            if ctx.needs_input_grad[0]:
                bases = zip(weights, settings.quantized, narrow[:n], narrow[n:], strict=True)
                dx = _base_backward(dys, bases)
            rows = None if x is None else _view_as_rows(x)
            d_a: Sequence[Tensor | None] = [None] * n
            if masks:
                d_a = _masked_backward(rows, dx, inner, lows_a, masks, settings.dropout)
            else:
                # One GEMM for dA (R, I) of every projection, and another for the adapters' part of dx.
                joint = _stacked(inner, 1)
                if dx is not None:
                    dx.addmm_(joint, _stacked(lows_a))
                if rows is not None:
                    d_a = _split_stacked(_weight_gradient(joint.t(), rows), [a.shape[0] for a in lows_a], 0)
        # In the order of the operands: the base is frozen, and the lowered copies have no gradient of their own.
        results: list[Tensor | None] = []
        no_gradients = [None] * (settings.size - 4)
        for grad_a, grad_b, (dtype_a, dtype_b) in zip(d_a, d_b, ctx.dtypes, strict=True):
            results += [None, None, _cast(grad_a, dtype_a), _cast(grad_b, dtype_b), *no_gradients]
        return (None if dx is None else dx.view(ctx.shape), None, *results)


def _no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make a context that disables autocast for the tensor's device type, or does nothing if it is off already."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind):
        return _NULL_CONTEXT
    # Dynamo supports only the first; the second skips its checks, which take longer than a product.
    return torch.autocast(kind, enabled=False) if torch.compiler.is_compiling() else _AutocastDisabled(kind)


_NULL_CONTEXT = nullcontext()


class _AutocastDisabled:
    """Context manager that disables autocast for a device type, and enables it again; autocast must be on before."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._kind, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self._kind, True)


def _view_as_rows(tensor: Tensor) -> Tensor:
    """View a tensor as a matrix (N, last dimension) that a GEMM can read, or copy it if its strides do not allow that.

    Rows may be apart in memory, but must not overlap, and the elements of a row must be adjacent.
    """
    if tensor.is_contiguous():
        return tensor.view(-1, tensor.shape[-1])
    rows = tensor.reshape(-1, tensor.shape[-1])
    if rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1]:
        return rows
    return rows.contiguous()


def _compute_inner_products(
    rows: Tensor, lows_a: Sequence[Tensor], dropout: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute dropout(x) A^T (N, R) of every projection; with dropout, also return each projection's mask (N, I).

    `rows` is x as (N, I), and `lows_a` are the factors A (R, I) in its dtype.
    """
    if not dropout:
        joint = rows @ _stacked(lows_a).t()
        return _split_stacked(joint, [a.shape[0] for a in lows_a], 1), []
    # With dropout every projection has another x, so A's products cannot be one GEMM.
    products, masks = [], []
    for low_a in lows_a:
        dropped, mask = torch.native_dropout(rows, dropout, True)
        products.append(dropped @ low_a.t())
        masks.append(mask)
    return products, masks


def _cast_if_needed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor. If it has that dtype already, it is returned unchanged without a PyTorch call."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


_Base = tuple[Tensor | None, Quantized | None, Tensor | None, Tensor | None]
"""What dy W needs of a frozen layer: its weight, or its `Quantized`, or codes and scale of its weight in fp8."""


def _base_backward(dys: list[Tensor], bases: Iterable[_Base]) -> Tensor:
    """Sum the gradients dy W over all projections: the frozen layers' part of dx (N, I), in a new buffer.

    The caller may add to that buffer.
    """
    dx: Tensor | None = None
    for dy, (weight, quantized, codes, scale) in zip(dys, bases, strict=True):
        # The first product makes the buffer, the others and the adapters' are added by their GEMMs.
        if codes is not None and scale is not None:
            part = fp8.multiply_fp8(fp8.quantize_rows(dy), Fp8Matrix(codes, scale))
            dx = part if dx is None else dx.add_(part)
        elif dx is None:
            dx = dy @ _base_weight(weight, quantized, dy.dtype)
        else:
            dx.addmm_(dy, _base_weight(weight, quantized, dy.dtype))
    assert dx is not None  # there is a projection
    return dx


def _base_weight(weight: Tensor | None, quantized: Quantized | None, dtype: torch.dtype) -> Tensor:
    """The frozen weight (O, I) of a linear layer in the compute dtype, dequantised if another library quantised it."""
    if quantized is not None:
        return quantized.dequantize(dtype)
    assert weight is not None  # `_check_operands` has seen to it
    return _cast_if_needed(weight, dtype)


def _masked_backward(
    rows: Tensor | None,
    dx: Tensor | None,
    inner: list[Tensor],
    lows_a: Sequence[Tensor],
    masks: Sequence[Tensor],
    dropout: float,
) -> Sequence[Tensor | None]:
    """Compute dA (R, I) of projections that each have a dropout mask on x, and add their adapters' part to dx.

    `rows` is x as (N, I), and `inner` holds the gradients dy (s B) (N, R) of the inner products x A^T.
    """
    # A mask is applied and scaled in one op, the one that torch's own dropout has for its backward.
    masked, scale = torch.ops.aten.native_dropout_backward, 1 / (1 - dropout)
    d_a: list[Tensor | None] = []
    for gradient, low_a, mask in zip(inner, lows_a, masks, strict=True):
        d_a.append(None if rows is None else _weight_gradient(gradient.t(), masked(rows, mask, scale)))
        if dx is not None:
            dx += masked(gradient @ low_a, mask, scale)
    return d_a


def _stacked(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors along `dim`; a single tensor is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _split_stacked(stacked: Tensor, sizes: list[int], dim: int) -> list[Tensor]:
    """Split a concatenated tensor into views of these sizes along `dim`."""
    # Past the Python of `Tensor.split`.
    return [stacked] if len(sizes) == 1 else list(stacked.split_with_sizes(sizes, dim))


def _weight_gradient(a: Tensor, b: Tensor) -> Tensor:
    """Compute the gradient of a LoRA factor as the product a @ b in fp32 (fp64 for fp64); it sums over all N rows."""
    # A sum over all N rows, which 16 bits would round: cuBLAS stores its fp32 sum, and a CPU has no such GEMM.
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return _cast_if_needed(torch.mm(a, b), accumulation_dtype(a.dtype))


def _cast(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Cast a gradient to its parameter's dtype; None stays None."""
    return None if gradient is None else _cast_if_needed(gradient, dtype)
