"""Triton kernels of `qk_norm_rope`, and their launches.

Shapes are those of qk_norm_rope.py: B samples, S tokens, H heads, D elements per head, R rotated tokens. It also
explains x_hat and rstd. Terms of the kernels:

- Pair: two elements (a, b) of a head that are rotated together, (2i, 2i+1) or with HALVES (i, i+D/2). A program keeps
  the a's and the b's in two tiles (heads, BLOCK). In names, 1 is for a and 2 for b: c1, c2 are their cosines, s1, s2
  sines, w1, w2 weights, d1, d2 and g1, g2 gradients, n1, n2 normalised elements.
- Tables: cos and sin. TABLES is the number of samples that have a table: 1 if all share it, 0 without tables.
  PER_HEAD: each head has its own columns. ONCE: the table has D/2 columns, each with the angle of a pair; else both
  elements have it.
- ACROSS: the norm is over all H*D elements of a token, not over each head.
- Partial sums: the weight's and the bias's gradients are sums over tokens; each program stores the sum of its tokens.
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

# The largest number of rows of partial sums, which are stored if the weight or the bias needs a gradient.
MAX_PARTIALS = 512


class NormRopeOptions(NamedTuple):
    """Settings of norm and rotation of q or k that are fixed for a layer, as in `qk_norm_rope`.

    `norm` is "layer", "rms" or "none", over each head or `across_heads`. `rotation` is "interleaved" or "half".
    `first` is the first token that is rotated.
    """

    norm: str
    eps: float
    across_heads: bool
    rotation: str
    first: int


class BackwardOperands(NamedTuple):
    """Tensors that the backward of norm and rotation of q or k reads.

    `grad` (B, S, H, D) is the gradient of the output. `source` (B, S, H, D) is the output itself if `rstd` (B, S, H or
    1) is passed, else x, and None without a norm. The others are the parameters and tables of `qk_norm_rope`.
    """

    grad: Tensor
    source: Tensor | None
    rstd: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None


# The gradients of x, weight and bias; None for one that is not needed.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

# A program holds one token in two tiles of BLOCK_H >= H heads by BLOCK >= D / 2 pairs: one for each element of a pair,
# because a rotation mixes them. For a norm across heads, the mean of a row is then one more sum within the program.
# The pairs are (2i, 2i+1), split in registers, or (i, i+D/2), loaded apart. Every load is cast up at once, so that
# nothing is computed in 16 bits. Token numbers are int64: token * H * D passes 2^31 for long videos.


@triton.jit
def _load_rotary_pairs(
    ptr, rows, valid, fill: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Load the D/2 pairs of each row as two tiles (rows, BLOCK): the first elements a and the second elements b.

    A pair is (2i, 2i+1), or (i, i+D/2) with HALVES. `rows` (rows, 1) are the offsets of the rows, and `valid` is a
    mask of them. `fill` stands in for elements outside.
    """
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
    """Store the first and second elements of each row's rotary pairs, two tiles, cast to the pointer's dtype."""
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
def _load_shared_pairs(
    ptr, offset, count, fill: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Load the pairs of a row that all tokens or all heads share: H*D elements if PER_HEAD, else D for all heads.

    Returns the first and the second elements of the pairs. `count` is H, or 0 to load nothing; `fill` stands in for
    elements that are not loaded, and for a tensor that is None.
    """
    # A row that all heads share is (1, BLOCK), and a missing tensor (1, 1): both broadcast over the heads.
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
    """Load a row of the cosine and sine tables, for the first and the second elements of the pairs: c1, c2, s1, s2.

    `row` is the number of a token, counted from the first that is rotated. A token before the first row or after the
    last is not rotated: its cosines are 1, its sines 0. With ONCE the tables have one entry for each
    pair, else one for each element.
    """
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
        c1, c2 = _load_shared_pairs(cos_ptr, offset, count, 1.0, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ACC)
        s1, s2 = _load_shared_pairs(sin_ptr, offset, count, 0.0, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ACC)
    return c1, c2, s1, s2


@triton.jit
def _unrotate(a, b, c1, c2, s1, s2):
    """Rotate rotary pairs (a, b) back, with the transpose of the rotation, which is its inverse."""
    return a * c1 + b * s2, b * c2 - a * s1


@triton.jit
def _mean(tile, H: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr):
    """Mean of each head's D elements (heads, 1), or of all H*D elements of the token (1, 1) if ACROSS.

    `tile` (heads, BLOCK) holds the sum of the two elements of each pair, D/2 sums per head, and 0 outside the row.
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
    """Normalise a token, given as the first and second elements of its pairs; return both, and rstd.

    rstd is ``1 / sqrt(variance + eps)``. LayerNorm's variance is that of the centred row, because computing it from
    the mean of squares would cancel. `live` is a mask of the elements that exist.
    """
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
    """Normalise and rotate one token of x; store its output (H, D) and, if saved, rstd (H or 1).

    x may have any strides between samples, tokens and heads. weight and bias are (D,) or (H*D,). The tables are (1 or
    B, R, D or H*D), or with ONCE (1 or B, R, 1 or H, D/2).
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
        w1, w2 = _load_shared_pairs(weight_ptr, 0, H, 1.0, ACROSS, H, D, BLOCK_H, BLOCK, HALVES, ACC)
        b1, b2 = _load_shared_pairs(bias_ptr, 0, H, 0.0, ACROSS, H, D, BLOCK_H, BLOCK, HALVES, ACC)
        a, b = a * w1 + b1, b * w2 + b2
    if cos_ptr is not None:
        c1, c2, s1, s2 = _load_rotation(
            cos_ptr, sin_ptr, batch, position - first, R, TABLES, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ONCE, ACC
        )  # fmt: skip
        a, b = a * c1 - b * s1, b * c2 + a * s2
    _store_rotary_pairs(out_ptr, (token * H + heads) * D, heads < H, a, b, D, BLOCK, HALVES)


# Rotated back, the output (`source`) is y = x_hat * w + b, from which a division gives x_hat, so x need not be saved.
# With g = dy * w,  dx = rstd * (g - x_hat * mean(g * x_hat) - mean(g)),  the last mean only for LayerNorm.


@triton.jit
def _token_gradients(
    d1, d2, y1, y2, rstd_ptr, w1, w2, b1, b2, token, count, live, H: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Compute a token's dx and x_hat (its normalised elements), each as the first and second elements of the pairs.

    `d1`, `d2` are the gradient of the row before its rotation. `y1`, `y2` are the row before its rotation if rstd was
    saved, else x.
    """
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
    """Store the program's sum over its tokens as one row of partial sums; the launcher adds up the rows.

    `a` and `b` (BLOCK_H, BLOCK) are the sums for the first and second elements of the pairs. They are also summed over
    the heads, unless the norm is ACROSS heads and each head has its own elements of the parameter.
    """
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
    """Store dx of the program's tokens, and its sums for the gradients of the norm's weight and bias.

    `source` is the output if rstd was saved, else x. A program takes EACH consecutive tokens.
    """
    # A program takes EACH consecutive tokens, and keeps their sums in registers: no atomics, the same bits every time.
    heads = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    live = (heads < H) & (tl.arange(0, BLOCK)[None, :] < D // 2)
    w1, w2 = _load_shared_pairs(weight_ptr, 0, H, 1.0, ACROSS, H, D, BLOCK_H, BLOCK, HALVES, ACC)
    b1, b2 = _load_shared_pairs(bias_ptr, 0, H, 0.0, ACROSS, H, D, BLOCK_H, BLOCK, HALVES, ACC)
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
    """Choose compile-time arguments and number of warps for the kernels of norm and rotation, for x (B, S, H, D)."""
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
    """View a table of cosines or sines (R, C) as (1, R, C), and make any table contiguous; None stays None."""
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
    """Compute the output of `qk_norm_rope` (B, S, H, D), contiguous; fill `rstd` (B, S, H or 1) if it is passed.

    The caller has checked the shapes.
    """
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
    """Compute the gradients of norm and rotation for x, weight and bias; None for one that `needs` does not select.

    The kernel stores partial sums of the gradients of weight and bias, which are added up here in fp32 (fp64 for
    fp64).
    """
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
