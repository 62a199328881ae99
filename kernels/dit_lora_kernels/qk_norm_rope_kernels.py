"""Kernels of `qk_norm_rope`, and their launches.

Shapes as in qk_norm_rope.py: B samples, S tokens, H heads, D elements per head, R rotated tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dit_lora_kernels.support import (
    accumulation_dtype,
    accumulation_triton_dtype,
    cdiv,
    launch,
    make_contiguous,
    make_rows_contiguous,
    next_power_of_2,
    tl,
    triton,
)

# Rows of partial sums, at most, when the weight's or the bias's gradient is asked for.
MAX_PARTIALS = 512


class NormRopeOptions(NamedTuple):
    """Settings that are fixed for a layer: `norm` layer, rms or none; `rotation` interleaved or half."""

    norm: str
    eps: float
    across_heads: bool
    rotation: str
    first: int


class BackwardOperands(NamedTuple):
    """Tensors that the backward reads: `grad` and `source` (B,S,H,D), the parameters and tables of `qk_norm_rope`.

    `source` is the output if `rstd` (B,S,H or 1) is given, else x, and None without a norm.
    """

    grad: Tensor
    source: Tensor | None
    rstd: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


# Of x, weight and bias; None for one that is not asked for.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

# A program holds a token: a tile of BLOCK_H >= H heads by BLOCK >= D / 2 pairs, twice, for a rotation mixes the two
# elements a, b of a pair. Across heads, the mean of a row is then one more sum within the program.
# The pairs are (2i, 2i+1), split in registers, or (i, i+D/2), loaded apart. Every load is cast up at once, so that
# nothing is computed in 16 bits. Token numbers are int64: token * H * D passes 2^31 for long videos.


@triton.jit
def _load_rotary_pairs(
    ptr, rows, valid, fill: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Load elements a, b (rows, BLOCK) of each row's D/2 pairs; `rows` (rows, 1) are offsets, `valid` a mask."""
    if HALVES:
        i = tl.arange(0, BLOCK)[None, :]
        mask = valid & (i < D // 2)
        a = tl.load(ptr + rows + i, mask=mask, other=fill).to(ACC)
        b = tl.load(ptr + rows + D // 2 + i, mask=mask, other=fill).to(ACC)
    else:
        # One load of whole rows, then a split: loads of every other element would use half of each memory line.
        d = tl.arange(0, 2 * BLOCK)[None, :]
        tile = tl.load(ptr + rows + d, mask=valid & (d < D), other=fill).to(ACC)
        a, b = tl.split(tl.reshape(tile, (tile.shape[0], BLOCK, 2)))
    return a, b


@triton.jit
def _store_rotary_pairs(ptr, rows, valid, a, b, D: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr):
    """The inverse of `_load_rotary_pairs`: store pairs, cast to the pointer's dtype."""
    dtype = ptr.dtype.element_ty
    if HALVES:
        i = tl.arange(0, BLOCK)[None, :]
        mask = valid & (i < D // 2)
        tl.store(ptr + rows + i, a.to(dtype), mask=mask)
        tl.store(ptr + rows + D // 2 + i, b.to(dtype), mask=mask)
    else:
        d = tl.arange(0, 2 * BLOCK)[None, :]
        tl.store(ptr + rows + d, tl.interleave(a, b).to(dtype), mask=valid & (d < D))


@triton.jit
def _load_shared(
    ptr, offset, count, fill: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Load the pairs of a row of H*D, or of a row of D that all heads share; `fill` past `count` heads, H or 0."""
    # Shared by all heads it is (1, BLOCK), and where nothing is given (1, 1): both broadcast over the heads.
    if ptr is None:
        a = tl.full((1, 1), fill, ACC)
        b = a
    else:
        heads = tl.arange(0, BLOCK_H if PER_HEAD else 1)[:, None]
        rows = offset + heads * D
        a, b = _load_rotary_pairs(ptr, rows, heads < count, fill, D, BLOCK, HALVES, ACC)
    return a, b


@triton.jit
def _load_rotation(
    cos_ptr, sin_ptr, batch, row, R, TABLES: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ONCE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Load row `row` of both tables; cos 1 and sin 0 (no rotation) for tokens before the first or past the last."""
    count = tl.where((row >= 0) & (row < R), H, 0)  # the interpreter cannot broadcast a mask of one
    if TABLES > 1:  # a table for every sample
        row += batch * R
    if ONCE:
        heads = tl.arange(0, BLOCK_H if PER_HEAD else 1)[:, None]
        i = tl.arange(0, BLOCK)[None, :]
        offsets = (row * (H if PER_HEAD else 1) + heads) * (D // 2) + i
        mask = (heads < count) & (i < D // 2)
        c1 = tl.load(cos_ptr + offsets, mask=mask, other=1.0).to(ACC)
        s1 = tl.load(sin_ptr + offsets, mask=mask, other=0.0).to(ACC)
        c2, s2 = c1, s1
    else:
        offset = row * (H * D if PER_HEAD else D)
        c1, c2 = _load_shared(cos_ptr, offset, count, 1.0, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ACC)
        s1, s2 = _load_shared(sin_ptr, offset, count, 0.0, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ACC)
    return c1, c2, s1, s2


@triton.jit
def _unrotate(a, b, c1, c2, s1, s2):
    """Apply the transpose of the rotation, which is its inverse, to the pairs a, b."""
    return a * c1 + b * s2, b * c2 - a * s1


@triton.jit
def _mean(tile, H: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr):
    """Mean of each head (heads, 1), or over all (1, 1); `tile` (heads, BLOCK) is 0 outside the row.

    A tile of a + b holds a head's D elements as D / 2 sums.
    """
    total = tl.sum(tile, axis=1, keep_dims=True)
    if ACROSS:
        total = tl.sum(total, axis=0, keep_dims=True) / H
    return total / D


@triton.jit
def _normalize(
    a, b, live, H: tl.constexpr, D: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute the normalised pairs and rstd; the variance is that of the centred row, not from moments."""
    if NORM == "layer":
        # What lies outside the row was 0 and would be -mean: it must not enter the variance.
        mean = _mean(a + b, H, D, ACROSS)
        a = tl.where(live, a - mean, 0.0)
        b = tl.where(live, b - mean, 0.0)
    rstd = tl.rsqrt(_mean(a * a + b * b, H, D, ACROSS) + EPS)
    return a * rstd, b * rstd, rstd


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, out_ptr, rstd_ptr,
    S, R, first, x_batch, x_token, x_head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr, HALVES: tl.constexpr,
    TABLES: tl.constexpr, PER_HEAD: tl.constexpr, ONCE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Norm and rotate x; store out (B,S,H,D) and rstd (B,S,H|1).

    x has strides, weight and bias are (D) or (H*D), tables (1|B,R,D|H*D) or with ONCE (1|B,R,1|H,D/2).
    """
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // S, token % S
    heads = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    rows = batch * x_batch + position * x_token + heads * x_head
    a, b = _load_rotary_pairs(x_ptr, rows, heads < H, 0.0, D, BLOCK, HALVES, ACC)
    if NORM != "none":
        live = (heads < H) & (tl.arange(0, BLOCK)[None, :] < D // 2)
        a, b, rstd = _normalize(a, b, live, H, D, NORM, EPS, ACROSS)
        if rstd_ptr is not None:
            head = tl.arange(0, rstd.shape[0])[:, None]
            tl.store(rstd_ptr + token * (1 if ACROSS else H) + head, rstd, mask=head < H)
        w1, w2 = _load_shared(weight_ptr, 0, H, 1.0, ACROSS, H, D, BLOCK_H, BLOCK, HALVES, ACC)
        b1, b2 = _load_shared(bias_ptr, 0, H, 0.0, ACROSS, H, D, BLOCK_H, BLOCK, HALVES, ACC)
        a, b = a * w1 + b1, b * w2 + b2
    if cos_ptr is not None:
        c1, c2, s1, s2 = _load_rotation(
            cos_ptr, sin_ptr, batch, position - first, R, TABLES, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ONCE, ACC
        )  # fmt: skip
        a, b = a * c1 - b * s1, b * c2 + a * s2
    _store_rotary_pairs(out_ptr, (token * H + heads) * D, heads < H, a, b, D, BLOCK, HALVES)


# With y = x_hat * w + b saved (`source` the output, rotated back), x_hat costs a division in place of saving x; with
# g = dy * w then  dx = rstd * (g - x_hat * mean(g * x_hat) - mean(g)),  the last mean for LayerNorm alone.


@triton.jit
def _token_gradients(
    d1, d2, y1, y2, rstd_ptr, w1, w2, b1, b2, token, count, live, H: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute the pairs of a token's dx and x_hat, from dy and y if rstd was saved, else from dy and x."""
    if rstd_ptr is None:
        n1, n2, rstd = _normalize(y1, y2, live, H, D, NORM, EPS, ACROSS)
    else:
        head = tl.arange(0, 1 if ACROSS else BLOCK_H)[:, None]
        rstd = tl.load(rstd_ptr + token * (1 if ACROSS else H) + head, mask=head < count, other=0.0)
        # As `_normalize` leaves it: 0 where the block is larger than the row.
        n1 = tl.where(live, (y1 - b1) / w1, 0.0)
        n2 = tl.where(live, (y2 - b2) / w2, 0.0)
    g1, g2 = d1 * w1, d2 * w2
    projection = _mean(g1 * n1 + g2 * n2, H, D, ACROSS)
    x1, x2 = g1 - n1 * projection, g2 - n2 * projection
    if NORM == "layer":
        mean = _mean(g1 + g2, H, D, ACROSS)
        x1, x2 = x1 - mean, x2 - mean
    return x1 * rstd, x2 * rstd, n1, n2


@triton.jit
def _store_partial(
    ptr, a, b, H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    ACROSS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Store a program's sum over its tokens, and over heads if they share the parameter, as its row of partials."""
    if ACROSS:
        heads = tl.arange(0, BLOCK_H)[:, None]
        rows = (tl.program_id(0).to(tl.int64) * H + heads) * D
    else:
        heads = tl.arange(0, 1)[:, None]
        rows = (tl.program_id(0).to(tl.int64) + heads) * D
        a = tl.sum(a, axis=0, keep_dims=True)
        b = tl.sum(b, axis=0, keep_dims=True)
    _store_rotary_pairs(ptr, rows, heads < H, a, b, D, BLOCK, HALVES)


@triton.jit
def _backward_kernel(
    grad_ptr, source_ptr, rstd_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr,
    dx_ptr, dweight_ptr, dbias_ptr, tokens, S, R, first,
    grad_batch, grad_token, grad_head, source_batch, source_token, source_head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr, HALVES: tl.constexpr,
    TABLES: tl.constexpr, PER_HEAD: tl.constexpr, ONCE: tl.constexpr, EACH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store dx (B,S,H,D) and a program's partial sums; `source` is the output if rstd was saved, else x."""
    # A program takes EACH consecutive tokens, and keeps their sums in registers: no atomics, the same bits every time.
    heads = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    live = (heads < H) & (tl.arange(0, BLOCK)[None, :] < D // 2)
    w1, w2 = _load_shared(weight_ptr, 0, H, 1.0, ACROSS, H, D, BLOCK_H, BLOCK, HALVES, ACC)
    b1, b2 = _load_shared(bias_ptr, 0, H, 0.0, ACROSS, H, D, BLOCK_H, BLOCK, HALVES, ACC)
    dw1 = tl.zeros((BLOCK_H, BLOCK), ACC)
    dw2, db1, db2 = dw1, dw1, dw1
    for step in range(EACH):
        token = tl.program_id(0).to(tl.int64) * EACH + step
        count = tl.where(token < tokens, H, 0)  # the last program may have tokens to spare
        valid = heads < count
        batch, position = token // S, token % S
        row = tl.where(token < tokens, position - first, R)  # R: no such row of the tables
        rows = batch * grad_batch + position * grad_token + heads * grad_head
        d1, d2 = _load_rotary_pairs(grad_ptr, rows, valid, 0.0, D, BLOCK, HALVES, ACC)
        if NORM != "none":
            rows = batch * source_batch + position * source_token + heads * source_head
            y1, y2 = _load_rotary_pairs(source_ptr, rows, valid, 0.0, D, BLOCK, HALVES, ACC)
        if cos_ptr is not None:
            c1, c2, s1, s2 = _load_rotation(
                cos_ptr, sin_ptr, batch, row, R, TABLES, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ONCE, ACC
            )  # fmt: skip
            d1, d2 = _unrotate(d1, d2, c1, c2, s1, s2)
            if rstd_ptr is not None:
                y1, y2 = _unrotate(y1, y2, c1, c2, s1, s2)
        if NORM != "none":
            x1, x2, n1, n2 = _token_gradients(
                d1, d2, y1, y2, rstd_ptr, w1, w2, b1, b2, token, count, live, H, D, BLOCK_H, NORM, EPS, ACROSS
            )  # fmt: skip
            dw1, dw2 = dw1 + d1 * n1, dw2 + d2 * n2
            db1, db2 = db1 + d1, db2 + d2
        else:
            x1, x2 = d1, d2
        if dx_ptr is not None:
            _store_rotary_pairs(dx_ptr, (token * H + heads) * D, valid, x1, x2, D, BLOCK, HALVES)
    if dweight_ptr is not None:
        _store_partial(dweight_ptr, dw1, dw2, H, D, BLOCK_H, BLOCK, ACROSS, HALVES)
    if dbias_ptr is not None:
        _store_partial(dbias_ptr, db1, db2, H, D, BLOCK_H, BLOCK, ACROSS, HALVES)


def _get_compile_time_arguments(x: Tensor, cos: Tensor | None, options: NormRopeOptions) -> dict[str, Any]:
    """The kernels' compile-time arguments, and `num_warps`."""
    heads, width = x.shape[2:]
    block_h = next_power_of_2(heads)
    block = next_power_of_2(width // 2)
    once = cos is not None and cos.ndim == 4
    shared = cos is None or (cos.shape[2] == 1 if once else cos.shape[-1] == width)
    return {
        "H": heads,
        "D": width,
        "BLOCK_H": block_h,
        "BLOCK": block,
        "NORM": options.norm,
        "EPS": options.eps,
        "ACROSS": options.across_heads,
        "HALVES": options.rotation == "half",
        "TABLES": 0 if cos is None else cos.shape[0],
        "PER_HEAD": not shared,
        "ONCE": once,
        "ACC": accumulation_triton_dtype(x.dtype),
        # 16 elements of a token to a thread: 8 pairs, of which a warp of 32 threads has 256.
        "num_warps": min(max(block_h * block // 256, 1), 16),
    }


def _add_batch_dimension(table: Tensor | None) -> Tensor | None:
    """A contiguous table (1, R, C) of one with two dimensions (R, C), or the contiguous table itself."""
    return make_contiguous(table[None] if table is not None and table.ndim == 2 else table)


def launch_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    options: NormRopeOptions,
    rstd: Tensor | None,
) -> Tensor:
    """Compute the output (B,S,H,D), contiguous; fills `rstd` (B,S,H or 1) if given. The caller checks shapes."""
    batch, tokens, heads, width = x.shape
    output = torch.empty((batch, tokens, heads, width), dtype=x.dtype, device=x.device)
    if output.numel() == 0:
        return output
    x, cos, sin = make_rows_contiguous(x), _add_batch_dimension(cos), _add_batch_dimension(sin)
    rows = 0 if cos is None else cos.shape[1]
    launch(
        _forward_kernel, (batch * tokens,), x, make_contiguous(weight), make_contiguous(bias), cos, sin, output, rstd,
        tokens, rows, options.first, *x.stride()[:3], **_get_compile_time_arguments(x, cos, options),
    )  # fmt: skip
    return output


def launch_backward(operands: BackwardOperands, options: NormRopeOptions, needs: Sequence[bool]) -> Gradients:
    """Compute the gradients of x, weight and bias that `needs` selects; partial sums are added in fp32."""
    grad, source, rstd, weight, bias, cos, sin = operands
    batch, tokens, heads, width = grad.shape
    total, size = batch * tokens, heads * width if options.across_heads else width
    grad, cos, sin = (make_rows_contiguous(grad), _add_batch_dimension(cos), _add_batch_dimension(sin))
    source = make_rows_contiguous(source)
    # Several tokens per program only if their sums are needed; a power of two, to compile few kernels.
    tokens_per_program = next_power_of_2(max(cdiv(total, MAX_PARTIALS), 1)) if any(needs[1:]) else 1
    programs = cdiv(total, tokens_per_program)
    constants = _get_compile_time_arguments(grad, cos, options)
    shapes = ((batch, tokens, heads, width), (programs, size), (programs, size))
    wide = accumulation_dtype(grad.dtype)
    dx, dweight, dbias = (
        torch.empty(shape, dtype=dtype, device=grad.device) if need else None
        for shape, dtype, need in zip(shapes, (grad.dtype, wide, wide), needs, strict=True)
    )
    if grad.numel() > 0:
        strides = (0, 0, 0) if source is None else source.stride()[:3]
        launch(
            _backward_kernel, (programs,), grad, source, rstd, make_contiguous(weight), make_contiguous(bias),
            cos, sin, dx, dweight, dbias, total, tokens, 0 if cos is None else cos.shape[1], options.first,
            *grad.stride()[:3], *strides, EACH=tokens_per_program, **constants,
        )  # fmt: skip
    return (
        dx,
        None if dweight is None or weight is None else dweight.sum(0).to(weight.dtype),
        None if dbias is None or bias is None else dbias.sum(0).to(bias.dtype),
    )
