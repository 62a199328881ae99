"""QK-norm and rotary embedding of one of q, k, in one pass: ``out = R(norm(x) * weight + bias)``.

Shapes: B samples, S tokens, H heads, D elements a head; R tokens from `first` on are rotated, the others only normed.
`norm` is LayerNorm or RMSNorm over D, or over H*D (across heads), or none. With the pairs (a, b) = (2i, 2i+1) or
(i, i+D/2), ``R(y)[a] = y[a] cos[a] - y[b] sin[a]`` and ``R(y)[b] = y[b] cos[b] + y[a] sin[b]``. Tables hold each angle
twice, at a and at b, or once, at i.

Source: RoFormer, https://arxiv.org/abs/2104.09864, section 3.2; tables and formula are those of Diffusers'
`apply_rotary_emb` and `get_1d_rotary_pos_embed(use_real=True)`.

Backward from its own output, which attention saves anyway: ``x_hat = (R^-1(out) - bias) / weight``, and with
``g = R^T(dout) * weight``: ``dx = rstd * (g - x_hat * mean(g * x_hat) - mean(g))``, the last for LayerNorm alone.
Traffic in passes over x: forward 2, backward 3 (2 without a norm), beside the tables and rstd.
Saved for backward beyond `out`: rstd, fp32, one number a head (or a token, across heads).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dit_lora_kernels.support import (
    accumulator,
    cdiv,
    launch,
    launches,
    next_power_of_2,
    op,
    packed,
    readable_rows,
    tl,
    triton,
    wide_dtype,
)

# Rows of partial sums, at most, when the weight's or the bias's gradient is asked for.
PARTIALS = 512


class Options(NamedTuple):
    """Settings that are fixed for a layer: `norm` layer, rms or none; `rotation` interleaved or half."""

    norm: str
    eps: float
    across_heads: bool
    rotation: str
    first: int


class BackwardOperands(NamedTuple):
    """Tensors that the backward reads: `grad` and `source` (B,S,H,D), the parameters and tables of `qk_norm_rope`.

    `source` is the output where `rstd` (B,S,H or 1) is given, else x, and None without a norm.
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

# 1. reference


def _turned(y: Tensor, rotation: str) -> Tensor:
    """Return (-b, a) for every pair (a, b) of the last dimension, in the pairs' places."""
    if rotation == "half":
        a, b = y.chunk(2, dim=-1)
        return torch.cat([-b, a], dim=-1)
    return torch.stack([-y[..., 1::2], y[..., 0::2]], dim=-1).flatten(-2)


def _rows(table: Tensor) -> int:
    """Return the number of tokens that a table rotates."""
    return table.shape[1 if table.ndim == 4 else -2]


def _twice(table: Tensor, width: int, rotation: str) -> Tensor:
    """Return a table (..., R, 1 or H, D) with each angle at both elements of its pair."""
    if table.ndim < 4:
        return table.unflatten(-1, (-1, width))
    if rotation == "half":
        return torch.cat([table, table], dim=-1)
    return table.repeat_interleave(2, dim=-1)


def _rotated(
    y: Tensor, cos: Tensor | None, sin: Tensor | None, options: Options, sign: int = 1
) -> Tensor:
    """Return y (B,S,H,D) with R applied to the tokens that have a row in the tables; with `sign` -1 its inverse."""
    if cos is None or sin is None:
        return y
    # The inverse is the transpose, in which each sine goes with the element that it is in a row with: before the turn.
    stop = options.first + _rows(cos)
    c, s = (_twice(table.to(y.dtype), y.shape[-1], options.rotation) for table in (cos, sin))
    part = y[:, options.first : stop]
    if sign > 0:
        part = part * c + _turned(part, options.rotation) * s
    else:
        part = part * c - _turned(part * s, options.rotation)
    return torch.cat([y[:, : options.first], part, y[:, stop:]], dim=1)


def _normalized(x: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Return x_hat (B,S,H,D) and rstd (B,S,H or 1,1) of x (B,S,H,D)."""
    dims = (-2, -1) if options.across_heads else (-1,)
    if options.norm == "layer":
        x = x - x.mean(dims, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + options.eps)
    return x * rstd, rstd


def _by_head(parameter: Tensor | None, x: Tensor, otherwise: float) -> Tensor:
    """Return a parameter (D,) or (H*D,) as (1 or H, D) in x's dtype, or `otherwise` where it is missing."""
    if parameter is None:
        return x.new_full((1, x.shape[-1]), otherwise)
    return parameter.to(x.dtype).view(-1, x.shape[-1])


def qk_norm_rope_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    norm: str,
    eps: float,
    across_heads: bool = False,
    rotation: str = "interleaved",
    first: int = 0,
) -> Tensor:
    """Define `qk_norm_rope`: plain torch, differentiable, fp32 inside (fp64 of fp64), rounded once."""
    options = Options(norm, eps, across_heads, rotation, first)
    y = x.to(wide_dtype(x.dtype))
    if norm != "none":
        y = _normalized(y, options)[0] * _by_head(weight, y, 1.0) + _by_head(bias, y, 0.0)
    return _rotated(y, cos, sin, options).to(x.dtype)


def _reference_gradients(
    operands: BackwardOperands, options: Options, needs: Sequence[bool]
) -> Gradients:
    """Compute what `launch_backward` does, in plain torch: fp32 inside (fp64 of fp64)."""
    grad, source, rstd, weight, bias, cos, sin = operands
    wide = wide_dtype(grad.dtype)
    dy = _rotated(grad.to(wide), cos, sin, options, sign=-1)
    if source is None:
        return dy.to(grad.dtype), None, None
    w = _by_head(weight, dy, 1.0)
    if rstd is None:
        x_hat, rstd = _normalized(source.to(wide), options)
    else:
        y = _rotated(source.to(wide), cos, sin, options, sign=-1)
        x_hat, rstd = (y - _by_head(bias, y, 0.0)) / w, rstd[..., None]
    dims = (-2, -1) if options.across_heads else (-1,)
    g = dy * w
    dx = g - x_hat * (g * x_hat).mean(dims, keepdim=True)
    if options.norm == "layer":
        dx = dx - g.mean(dims, keepdim=True)
    rows = (0, 1) if options.across_heads else (0, 1, 2)
    dweight = dbias = None
    if needs[1] and weight is not None:
        dweight = (dy * x_hat).sum(rows).flatten().to(weight.dtype)
    if needs[2] and bias is not None:
        dbias = dy.sum(rows).flatten().to(bias.dtype)
    return (dx * rstd).to(grad.dtype) if needs[0] else None, dweight, dbias


# 2. kernels
#
# A program holds a token: a tile of BLOCK_H >= H heads by BLOCK >= D / 2 pairs, twice, for a rotation mixes the two
# elements a, b of a pair. Across heads, the mean of a row is then one more sum within the program.
# The pairs are (2i, 2i+1), split in registers, or (i, i+D/2), loaded apart. Every load is cast up at once, so that
# nothing is computed in 16 bits. Token numbers are int64: token * H * D passes 2^31 for long videos.


@triton.jit
def _load_pair(
    ptr, rows, valid, other: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return the elements a, b (rows, BLOCK) of each row's D/2 pairs; `rows` (rows, 1) are offsets, `valid` their mask."""
    if HALVES:
        i = tl.arange(0, BLOCK)[None, :]
        mask = valid & (i < D // 2)
        a = tl.load(ptr + rows + i, mask=mask, other=other).to(ACC)
        b = tl.load(ptr + rows + D // 2 + i, mask=mask, other=other).to(ACC)
    else:
        # One load of whole rows, then a split: loads of every other element would use half of each memory line.
        d = tl.arange(0, 2 * BLOCK)[None, :]
        tile = tl.load(ptr + rows + d, mask=valid & (d < D), other=other).to(ACC)
        a, b = tl.split(tl.reshape(tile, (tile.shape[0], BLOCK, 2)))
    return a, b


@triton.jit
def _store_pair(ptr, rows, valid, a, b, D: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr):
    """Write what `_load_pair` takes apart, cast to the pointer's dtype."""
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
    ptr, offset, count, other: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return the pairs of a row of H*D, or of one of D that all heads share; `other` past `count` heads, H or 0."""
    # Shared by all heads it is (1, BLOCK), and where nothing is given (1, 1): both broadcast over the heads.
    if ptr is None:
        a = tl.full((1, 1), other, ACC)
        b = a
    else:
        heads = tl.arange(0, BLOCK_H if PER_HEAD else 1)[:, None]
        rows = offset + heads * D
        a, b = _load_pair(ptr, rows, heads < count, other, D, BLOCK, HALVES, ACC)
    return a, b


@triton.jit
def _load_rotation(
    cos_ptr, sin_ptr, batch, row, R, TABLES: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ONCE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Return row `row` of both tables; cos 1 and sin 0, no rotation, for a token before the first or past the last of R."""
    count = tl.where((row >= 0) & (row < R), H, 0)  # the interpreter cannot broadcast a mask of one
    if TABLES > 1:  # a table for every sample
        row += batch * R
    if ONCE:
        heads = tl.arange(0, BLOCK_H if PER_HEAD else 1)[:, None]
        i = tl.arange(0, BLOCK)[None, :]
        places = (row * (H if PER_HEAD else 1) + heads) * (D // 2) + i
        mask = (heads < count) & (i < D // 2)
        c1 = tl.load(cos_ptr + places, mask=mask, other=1.0).to(ACC)
        s1 = tl.load(sin_ptr + places, mask=mask, other=0.0).to(ACC)
        c2, s2 = c1, s1
    else:
        offset = row * (H * D if PER_HEAD else D)
        c1, c2 = _load_shared(
            cos_ptr, offset, count, 1.0, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ACC
        )
        s1, s2 = _load_shared(
            sin_ptr, offset, count, 0.0, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ACC
        )
    return c1, c2, s1, s2


@triton.jit
def _unrotate(a, b, c1, c2, s1, s2):
    """Return the transpose of the rotation, which is its inverse, of the pairs a, b."""
    return a * c1 + b * s2, b * c2 - a * s1


@triton.jit
def _mean(tile, H: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr):
    """Return the mean of each head (heads, 1), or of all (1, 1); `tile` (heads, BLOCK) is 0 outside the row.

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
    """Return the normalised pairs and rstd; the variance is that of the centred row, not from moments."""
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
    """Take x by strides, weight and bias (D) or (H*D), tables (1|B,R,D|H*D) or with ONCE (1|B,R,1|H,D/2); store out (B,S,H,D), rstd (B,S,H|1)."""
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // S, token % S
    heads = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    rows = batch * x_batch + position * x_token + heads * x_head
    a, b = _load_pair(x_ptr, rows, heads < H, 0.0, D, BLOCK, HALVES, ACC)
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
    _store_pair(out_ptr, (token * H + heads) * D, heads < H, a, b, D, BLOCK, HALVES)


# With y = x_hat * w + b saved (`source` the output, rotated back), x_hat costs a division in place of saving x; with
# g = dy * w then  dx = rstd * (g - x_hat * mean(g * x_hat) - mean(g)),  the last mean for LayerNorm alone.


@triton.jit
def _token_gradients(
    d1, d2, y1, y2, rstd_ptr, w1, w2, b1, b2, token, count, live, H: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """Return the pairs of a token's dx and x_hat, from dy and y where rstd was saved, from dy and x where not."""
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
    _store_pair(ptr, rows, heads < H, a, b, D, BLOCK, HALVES)


@triton.jit
def _backward_kernel(
    grad_ptr, source_ptr, rstd_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr,
    dx_ptr, dweight_ptr, dbias_ptr, tokens, S, R, first,
    grad_batch, grad_token, grad_head, source_batch, source_token, source_head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr, HALVES: tl.constexpr,
    TABLES: tl.constexpr, PER_HEAD: tl.constexpr, ONCE: tl.constexpr, EACH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store dx (B,S,H,D) and a program's partial sums; `source` is the output where rstd was saved, else x."""
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
        d1, d2 = _load_pair(grad_ptr, rows, valid, 0.0, D, BLOCK, HALVES, ACC)
        if NORM != "none":
            rows = batch * source_batch + position * source_token + heads * source_head
            y1, y2 = _load_pair(source_ptr, rows, valid, 0.0, D, BLOCK, HALVES, ACC)
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
            _store_pair(dx_ptr, (token * H + heads) * D, valid, x1, x2, D, BLOCK, HALVES)
    if dweight_ptr is not None:
        _store_partial(dweight_ptr, dw1, dw2, H, D, BLOCK_H, BLOCK, ACROSS, HALVES)
    if dbias_ptr is not None:
        _store_partial(dbias_ptr, db1, db2, H, D, BLOCK_H, BLOCK, ACROSS, HALVES)


# 3. launchers


def _constants(x: Tensor, cos: Tensor | None, options: Options) -> dict[str, Any]:
    """Return the kernels' compile-time arguments, and `num_warps`."""
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
        "ACC": accumulator(x.dtype),
        # 16 elements of a token to a thread: 8 pairs, of which a warp of 32 threads has 256.
        "num_warps": min(max(block_h * block // 256, 1), 16),
    }


def _table(table: Tensor | None) -> Tensor | None:
    """Return a table as it is, contiguous; one of (R, C) as (1, R, C)."""
    return packed(table[None] if table is not None and table.ndim == 2 else table)


def launch_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Options,
    rstd: Tensor | None,
) -> Tensor:
    """Return the output (B,S,H,D), contiguous; fill `rstd` (B,S,H or 1) if given. Shapes are the caller's to check."""
    batch, tokens, heads, width = x.shape
    out = torch.empty((batch, tokens, heads, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, cos, sin = readable_rows(x), _table(cos), _table(sin)
    rows = 0 if cos is None else cos.shape[1]
    launch(
        _forward_kernel, (batch * tokens,), x, packed(weight), packed(bias), cos, sin, out, rstd,
        tokens, rows, options.first, *x.stride()[:3], **_constants(x, cos, options),
    )  # fmt: skip
    return out


def launch_backward(
    operands: BackwardOperands, options: Options, needs: Sequence[bool]
) -> Gradients:
    """Return the gradients of x, weight and bias that `needs` asks for; partial sums are added up in fp32."""
    grad, source, rstd, weight, bias, cos, sin = operands
    batch, tokens, heads, width = grad.shape
    total, size = batch * tokens, heads * width if options.across_heads else width
    grad, cos, sin = readable_rows(grad), _table(cos), _table(sin)
    source = readable_rows(source)
    # Several tokens a program only where their sums are wanted; a power of two, to compile few kernels.
    each = next_power_of_2(max(cdiv(total, PARTIALS), 1)) if any(needs[1:]) else 1
    programs = cdiv(total, each)
    constants = _constants(grad, cos, options)
    shapes = ((batch, tokens, heads, width), (programs, size), (programs, size))
    wide = wide_dtype(grad.dtype)
    dx, dweight, dbias = (
        torch.empty(shape, dtype=dtype, device=grad.device) if need else None
        for shape, dtype, need in zip(shapes, (grad.dtype, wide, wide), needs, strict=True)
    )
    if grad.numel() > 0:
        strides = (0, 0, 0) if source is None else source.stride()[:3]
        launch(
            _backward_kernel, (programs,), grad, source, rstd, packed(weight), packed(bias), cos, sin, dx, dweight, dbias,
            total, tokens, 0 if cos is None else cos.shape[1], options.first,
            *grad.stride()[:3], *strides, EACH=each, **constants,
        )  # fmt: skip
    return (
        dx,
        None if dweight is None or weight is None else dweight.sum(0).to(weight.dtype),
        None if dbias is None or bias is None else dbias.sum(0).to(bias.dtype),
    )


# 4. op


@op("qk_norm_rope")
def _op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    norm: str,
    eps: float,
    across_heads: bool,
    rotation: str,
    first: int,
    from_output: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output, and rstd if the backward starts from the output (else an empty tensor)."""
    options = Options(norm, eps, across_heads, rotation, first)
    rstd = torch.empty(
        _rstd_shape(x, options, from_output), dtype=wide_dtype(x.dtype), device=x.device
    )
    if launches(x):
        out = launch_forward(x, weight, bias, cos, sin, options, rstd if from_output else None)
        return out, rstd
    if from_output:
        rstd = _normalized(x.to(rstd.dtype), options)[1].squeeze(-1)
    out = qk_norm_rope_reference(x, weight, bias, cos, sin, **options._asdict())
    return out.contiguous(), rstd


def _rstd_shape(x: Tensor, options: Options, from_output: bool) -> tuple[int, ...]:
    """Return (B,S,H), (B,S,1) across heads, or (0,) where rstd is not kept."""
    if not from_output:
        return (0,)
    return (*x.shape[:2], 1 if options.across_heads else x.shape[2])


@_op.register_fake
def _(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_parameters, norm, eps, across_heads, rotation, first, from_output = others
    options = Options(norm, eps, across_heads, rotation, first)
    rstd = x.new_empty(_rstd_shape(x, options, from_output), dtype=wide_dtype(x.dtype))
    return x.new_empty(x.shape), rstd


@op("qk_norm_rope_backward")
def _backward_op(
    grad: Tensor,
    source: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    norm: str,
    eps: float,
    across_heads: bool,
    rotation: str,
    first: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; an empty tensor for one that is not asked for."""
    options = Options(norm, eps, across_heads, rotation, first)
    operands = BackwardOperands(grad, source, rstd, weight, bias, cos, sin)
    compute = launch_backward if launches(grad) else _reference_gradients
    gradients = compute(operands, options, needs)
    # The schema of an op has no optional results: an empty tensor stands for a gradient that was not asked for.
    dx, dweight, dbias = (grad.new_empty(0) if g is None else g for g in gradients)
    return dx, dweight, dbias


@_backward_op.register_fake
def _(
    grad: Tensor,
    _source: Tensor | None,
    _rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    needs = others[-1]
    return (
        grad.new_empty(grad.shape if needs[0] else (0,)),
        grad.new_empty(0) if weight is None or not needs[1] else torch.empty_like(weight),
        grad.new_empty(0) if bias is None or not needs[2] else torch.empty_like(bias),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward reads, in the order of BackwardOperands."""
    x, weight, bias, cos, sin, norm, *options, from_output = inputs
    out, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.options = (norm, *options)
    # A rotation alone is undone by its tables; a norm needs its output, which attention keeps anyway, or else x.
    if norm == "none":
        ctx.save_for_backward(None, None, None, None, cos, sin)
    elif from_output:
        ctx.save_for_backward(out, rstd, weight, bias, cos, sin)
    else:
        ctx.save_for_backward(x, None, weight, bias, cos, sin)


def _backward(ctx: Any, grad: Tensor, _grad_rstd: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the op's inputs."""
    needs = list(ctx.needs_input_grad[:3])
    computed = _backward_op(grad, *ctx.saved_tensors, *ctx.options, needs)
    gradients = [g if need else None for g, need in zip(computed, needs, strict=True)]
    return (*gradients, *(None for _ in range(8)))  # none for the tables and the settings


_op.register_autograd(_backward, setup_context=_setup_context)


def recoverable(weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """Return whether x_hat can be computed back from a 16-bit output; ask when a model is patched, as it waits for a GPU.

    The output's rounding, relative to the row, is divided by each weight: none may be under 1e-3, and
    rms(weight, bias) / |weight| may be 16 in the root mean square over the elements. At that limit the
    gradient's error is that of rounding it to bf16.
    """
    if weight is None:
        return True
    size = weight.detach().double().abs()
    if not bool((size > 1e-3).all()):
        return False
    power = size.square().mean()
    if bias is not None:
        power = power + bias.detach().double().square().mean()
    return bool((power / size.square()).mean().sqrt() <= 16)


def _check(
    x: Tensor,
    parameters: dict[str, Tensor | None],
    cos: Tensor | None,
    sin: Tensor | None,
    options: Options,
) -> None:
    """Raise ValueError for what the kernels do not compute, by name."""
    if x.ndim != 4 or not x.is_floating_point() or x.shape[3] % 2:
        raise ValueError(
            f"x is (B, S, H, D), floating, with an even D; got {x.dtype} {tuple(x.shape)}"
        )
    if options.norm not in ("layer", "rms", "none"):
        raise ValueError(f"norm is 'layer', 'rms' or 'none', not {options.norm!r}")
    if options.rotation not in ("interleaved", "half"):
        raise ValueError(f"rotation is 'interleaved' or 'half', not {options.rotation!r}")
    batch, tokens, heads, width = x.shape
    size = heads * width if options.across_heads else width
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if options.norm == "none":
            raise ValueError(f"{name} is given, but norm is 'none': there is nothing to scale")
        if parameter.shape != (size,):
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}; this norm needs ({size},)"
            )
    if cos is None and sin is None:
        return
    if cos is None or sin is None or cos.shape != sin.shape:
        shapes = [None if t is None else tuple(t.shape) for t in (cos, sin)]
        raise ValueError(
            f"cos and sin come together, in one shape; got {shapes[0]} and {shapes[1]}"
        )
    if cos.ndim == 4:
        fits = cos.shape[2] in (1, heads) and cos.shape[3] == width // 2
    else:
        fits = cos.shape[-1] in (width, heads * width) and cos.ndim in (2, 3)
    if not fits or (cos.ndim > 2 and cos.shape[0] not in (1, batch)):
        raise ValueError(
            "cos and sin are (R, D), (1 or B, R, D), (1 or B, R, H*D) or (1 or B, R, 1 or H, D/2) for x "
            f"{tuple(x.shape)}; got {tuple(cos.shape)}"
        )
    stop = options.first + _rows(cos)
    if options.first < 0 or stop > tokens:
        raise ValueError(f"the tables rotate tokens {options.first} to {stop}, but x has {tokens}")


def qk_norm_rope(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    norm: str,
    eps: float,
    across_heads: bool = False,
    rotation: str = "interleaved",
    first: int = 0,
    from_output: bool = True,
) -> Tensor:
    """Normalise the heads of x and rotate tokens `first` to `first + R`, in one pass each way.

    x: (B, S, H, D), any strides with a contiguous D, even. weight, bias: (D,), or (H*D,) across heads. cos, sin:
    (R, D), (1 or B, R, D) or (1 or B, R, H*D), rotations (cos^2 + sin^2 = 1 in every pair), not differentiated; or
    (1 or B, R, 1 or H, D/2), which holds the angle of a pair once.
    Returns (B, S, H, D) contiguous, in x's dtype; fp32 inside, fp64 of fp64.

    `from_output`: the backward computes x_hat back from the output; pass `recoverable(weight, bias)`, found once.
    False, or a weight or bias that is trained, saves x instead. Source: see the module.

    Raises:
        ValueError: a shape, `norm` or `rotation` other than these; a weight or bias without a norm.
    """
    options = Options(norm, eps, across_heads, rotation, first)
    _check(x, {"weight": weight, "bias": bias}, cos, sin, options)
    if norm == "none" and cos is None:
        return x.contiguous()
    # What is trained moves away from the values that `recoverable` saw.
    trained = any(t is not None and t.requires_grad for t in (weight, bias))
    from_output = from_output and norm != "none" and not trained
    out, _rstd = _op(x, weight, bias, cos, sin, *options, from_output)
    return out
