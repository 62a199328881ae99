"""Triton kernels of `qk_norm_rope` and their launchers; the equation and the public function are beside it.

One program holds one token: a tile of its heads by half a head, twice, because a rotation mixes two elements.
The pairs are (2i, 2i+1), split in registers, or (i, i+D/2), loaded apart. Every load is cast up at once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dit_lora_kernels.support import accumulator, on_its_device, tl, triton

PARTIALS = 512
"""Rows of partial sums, at most, when the weight's or the bias's gradient is asked for."""


class Options(NamedTuple):
    """What is fixed for a layer: `norm` layer, rms or none; `rotation` interleaved or half."""

    norm: str
    eps: float
    across_heads: bool
    rotation: str
    first: int


# 2 --- kernels -----------------------------------------------------------------------------------


@triton.jit
def _load_pair(
    ptr, rows, valid, other: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The two elements of each of a row's D/2 pairs; `rows` (rows, 1) are offsets, `valid` their mask."""
    if HALVES:
        i = tl.arange(0, BLOCK)[None, :]
        mask = valid & (i < D // 2)
        one = tl.load(ptr + rows + i, mask=mask, other=other).to(ACC)
        two = tl.load(ptr + rows + D // 2 + i, mask=mask, other=other).to(ACC)
    else:
        d = tl.arange(0, 2 * BLOCK)[None, :]
        tile = tl.load(ptr + rows + d, mask=valid & (d < D), other=other).to(ACC)
        one, two = tl.split(tl.reshape(tile, (tile.shape[0], BLOCK, 2)))
    return one, two


@triton.jit
def _store_pair(
    ptr, rows, valid, one, two, D: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr
):
    """Write what `_load_pair` takes apart, cast to the pointer's dtype."""
    dtype = ptr.dtype.element_ty
    if HALVES:
        i = tl.arange(0, BLOCK)[None, :]
        mask = valid & (i < D // 2)
        tl.store(ptr + rows + i, one.to(dtype), mask=mask)
        tl.store(ptr + rows + D // 2 + i, two.to(dtype), mask=mask)
    else:
        d = tl.arange(0, 2 * BLOCK)[None, :]
        tl.store(ptr + rows + d, tl.interleave(one, two).to(dtype), mask=valid & (d < D))


@triton.jit
def _load_shared(
    ptr, offset, count, other: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A row of H*D, or one of D that all heads share and is read once; `other` past `count` heads, H or 0."""
    if ptr is None:
        one = tl.full((1, 1), other, ACC)
        two = one
    else:
        heads = tl.arange(0, BLOCK_H if PER_HEAD else 1)[:, None]
        rows = offset + heads * D
        one, two = _load_pair(ptr, rows, heads < count, other, D, BLOCK, HALVES, ACC)
    return one, two


@triton.jit
def _load_rotation(
    cos_ptr, sin_ptr, batch, row, R, TABLES: tl.constexpr, PER_HEAD: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Row `row` of both tables; cos 1 and sin 0 for a token before the first or past the last of R."""
    count = tl.where((row >= 0) & (row < R), H, 0)  # the interpreter cannot broadcast a mask of one
    if TABLES > 1:  # a table for every sample
        row += batch * R
    offset = row * (H * D if PER_HEAD else D)
    c1, c2 = _load_shared(cos_ptr, offset, count, 1.0, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ACC)
    s1, s2 = _load_shared(sin_ptr, offset, count, 0.0, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ACC)
    return c1, c2, s1, s2


@triton.jit
def _unrotate(one, two, c1, c2, s1, s2):
    """The transpose of the rotation, which is its inverse."""
    return one * c1 + two * s2, two * c2 - one * s1


@triton.jit
def _mean(tile, H: tl.constexpr, D: tl.constexpr, ACROSS: tl.constexpr):
    """Mean of a head, (heads, 1), or of all of them, (1, 1); what lies outside the row is 0 in `tile`."""
    total = tl.sum(tile, axis=1, keep_dims=True)
    if ACROSS:
        total = tl.sum(total, axis=0, keep_dims=True) / H
    return total / D


@triton.jit
def _normalize(
    one, two, live, H: tl.constexpr, D: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """The normalised row and 1 / sqrt(variance + eps); the variance of the centred row, not from moments."""
    if NORM == "layer":
        mean = _mean(one + two, H, D, ACROSS)
        one = tl.where(live, one - mean, 0.0)
        two = tl.where(live, two - mean, 0.0)
    rstd = tl.rsqrt(_mean(one * one + two * two, H, D, ACROSS) + EPS)
    return one * rstd, two * rstd, rstd


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, out_ptr, rstd_ptr,
    S, R, first, x_batch, x_token, x_head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr, HALVES: tl.constexpr,
    TABLES: tl.constexpr, PER_HEAD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """x by strides; weight, bias (D) or (H*D); tables (1|B, R, D|H*D); out (B, S, H, D); rstd (B, S, H|1)."""
    token = tl.program_id(0).to(tl.int64)
    batch, position = token // S, token % S
    heads = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    rows = batch * x_batch + position * x_token + heads * x_head
    one, two = _load_pair(x_ptr, rows, heads < H, 0.0, D, BLOCK, HALVES, ACC)
    if NORM != "none":
        live = (heads < H) & (tl.arange(0, BLOCK)[None, :] < D // 2)
        one, two, rstd = _normalize(one, two, live, H, D, NORM, EPS, ACROSS)
        if rstd_ptr is not None:
            head = tl.arange(0, rstd.shape[0])[:, None]
            tl.store(rstd_ptr + token * (1 if ACROSS else H) + head, rstd, mask=head < H)
        w1, w2 = _load_shared(weight_ptr, 0, H, 1.0, ACROSS, H, D, BLOCK_H, BLOCK, HALVES, ACC)
        b1, b2 = _load_shared(bias_ptr, 0, H, 0.0, ACROSS, H, D, BLOCK_H, BLOCK, HALVES, ACC)
        one, two = one * w1 + b1, two * w2 + b2
    if cos_ptr is not None:
        c1, c2, s1, s2 = _load_rotation(
            cos_ptr, sin_ptr, batch, position - first, R, TABLES, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ACC
        )  # fmt: skip
        one, two = one * c1 - two * s1, two * c2 + one * s2
    _store_pair(out_ptr, (token * H + heads) * D, heads < H, one, two, D, BLOCK, HALVES)


@triton.jit
def _token_gradients(
    d1, d2, y1, y2, rstd_ptr, w1, w2, b1, b2, token, count, live, H: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """A token's dx and x_hat, from dy and y = x_hat w + b where rstd was saved, from dy and x where not."""
    if rstd_ptr is None:
        n1, n2, rstd = _normalize(y1, y2, live, H, D, NORM, EPS, ACROSS)
    else:
        head = tl.arange(0, 1 if ACROSS else BLOCK_H)[:, None]
        rstd = tl.load(rstd_ptr + token * (1 if ACROSS else H) + head, mask=head < count, other=0.0)
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
    ptr, one, two, H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    ACROSS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """A program's sum over its tokens, and over heads if they share the parameter: a row of its own."""
    if ACROSS:
        heads = tl.arange(0, BLOCK_H)[:, None]
        rows = (tl.program_id(0).to(tl.int64) * H + heads) * D
    else:
        heads = tl.arange(0, 1)[:, None]
        rows = (tl.program_id(0).to(tl.int64) + heads) * D
        one = tl.sum(one, axis=0, keep_dims=True)
        two = tl.sum(two, axis=0, keep_dims=True)
    _store_pair(ptr, rows, heads < H, one, two, D, BLOCK, HALVES)


@triton.jit
def _backward_kernel(
    grad_ptr, source_ptr, rstd_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr,
    dx_ptr, dweight_ptr, dbias_ptr, tokens, S, R, first,
    grad_batch, grad_token, grad_head, source_batch, source_token, source_head,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, ACROSS: tl.constexpr, HALVES: tl.constexpr,
    TABLES: tl.constexpr, PER_HEAD: tl.constexpr, EACH: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`source` is the output where rstd was saved, else x; each program takes EACH tokens in a row."""
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
        row = tl.where(token < tokens, position - first, R)
        rows = batch * grad_batch + position * grad_token + heads * grad_head
        d1, d2 = _load_pair(grad_ptr, rows, valid, 0.0, D, BLOCK, HALVES, ACC)
        if NORM != "none":
            rows = batch * source_batch + position * source_token + heads * source_head
            y1, y2 = _load_pair(source_ptr, rows, valid, 0.0, D, BLOCK, HALVES, ACC)
        if cos_ptr is not None:
            c1, c2, s1, s2 = _load_rotation(
                cos_ptr, sin_ptr, batch, row, R, TABLES, PER_HEAD, H, D, BLOCK_H, BLOCK, HALVES, ACC
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


# 3 --- launchers ---------------------------------------------------------------------------------


def _constants(x: Tensor, cos: Tensor | None, options: Options) -> dict[str, Any]:
    """The kernels' compile-time arguments, and `num_warps`: 16 elements of the tile to a thread."""
    heads, width = x.shape[2:]
    block_h = triton.next_power_of_2(heads)
    block = triton.next_power_of_2(width // 2)
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
        "PER_HEAD": cos is not None and cos.shape[-1] != width,
        "ACC": accumulator(x.dtype),
        "num_warps": min(max(block_h * block // 256, 1), 16),
    }


def _strided(tensor: Tensor) -> Tensor:
    """`tensor` as the kernels read it: any strides, but the elements of a head side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _table(table: Tensor | None) -> Tensor | None:
    """(R, C) or (1|B, R, C) as contiguous (1|B, R, C)."""
    if table is None:
        return None
    return (table if table.ndim == 3 else table[None]).contiguous()


@on_its_device
def launch_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Options,
    rstd: Tensor | None,
) -> Tensor:
    """The output, contiguous; fills `rstd` (B, S, H or 1) where it is given. Shapes are the caller's to check."""
    batch, tokens, heads, width = x.shape
    out = torch.empty((batch, tokens, heads, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x, cos, sin = _strided(x), _table(cos), _table(sin)
    rows = 0 if cos is None else cos.shape[1]
    _forward_kernel[(batch * tokens,)](
        x,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        cos,
        sin,
        out,
        rstd,
        tokens,
        rows,
        options.first,
        *x.stride()[:3],
        **_constants(x, cos, options),
    )
    return out


@on_its_device
def launch_backward(
    grad: Tensor,
    source: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    options: Options,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias, those that `needs` asks for; partial sums are added up in fp32.

    `source` is the output where `rstd` is given, else x, and None without a norm.
    """
    batch, tokens, heads, width = grad.shape
    total, size = batch * tokens, heads * width if options.across_heads else width
    grad, cos, sin = _strided(grad), _table(cos), _table(sin)
    source = None if source is None else _strided(source)
    each = triton.next_power_of_2(max(triton.cdiv(total, PARTIALS), 1)) if any(needs[1:]) else 1
    programs = triton.cdiv(total, each)
    constants = _constants(grad, cos, options)
    shapes = ((batch, tokens, heads, width), (programs, size), (programs, size))
    kinds = (grad.dtype, *(2 * [torch.promote_types(grad.dtype, torch.float32)]))
    dx, dweight, dbias = (
        torch.empty(shape, dtype=kind, device=grad.device) if need else None
        for shape, kind, need in zip(shapes, kinds, needs, strict=True)
    )
    if grad.numel() > 0:
        _backward_kernel[(programs,)](
            grad,
            source,
            rstd,
            None if weight is None else weight.contiguous(),
            None if bias is None else bias.contiguous(),
            cos,
            sin,
            dx,
            dweight,
            dbias,
            total,
            tokens,
            0 if cos is None else cos.shape[1],
            options.first,
            *grad.stride()[:3],
            *((0, 0, 0) if source is None else source.stride()[:3]),
            EACH=each,
            **constants,
        )
    return (
        dx,
        None if dweight is None or weight is None else dweight.sum(0).to(weight.dtype),
        None if dbias is None or bias is None else dbias.sum(0).to(bias.dtype),
    )
