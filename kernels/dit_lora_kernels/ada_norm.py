"""Adaptive norm with the gated residual before it: ``out = norm(x') * (1 + scale) + shift``, ``x' = x + gate * y``.

Norm is LayerNorm or RMSNorm over D, then ``* weight + bias`` where they are given; each of y, gate, scale and shift
may be missing. Streams (text and video) may write into one joint buffer, in the order given.

Shapes: B batch, T tokens of a stream, S tokens of all streams, D channels, G groups of consecutive tokens that share
a row of the tables: token t uses row ``t // (T // G)`` (1: a row a sample; T: a row a token).
Source: adaLN-Zero, https://arxiv.org/abs/2212.09748 section 3.2; LayerNorm https://arxiv.org/abs/1607.06450;
RMSNorm https://arxiv.org/abs/1910.07467.
Traffic, with u = B*S*D elements and tables left out (they stay in L2 while G is far below T):
forward reads x and writes out, 2u; with y it reads x, y and writes x', out, 4u.
Backward reads the gradients of out and x' and x', and writes dx, 4u; with gate*y also dy, 5u; and y where the gate is
trained, 6u. Kept for the backward: x' (which the caller keeps as the residual stream) and 4 or 8 bytes a row.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from dit_lora_kernels.ada_norm_kernels import (
    Known,
    Stream,
    check_streams,
    grouped,
    launch_backward,
    launch_forward,
)
from dit_lora_kernels.support import launches

# 1. reference


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _a_row_a_token(table: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """(B,D) or (B,G,D) as (B,T,D)."""
    table = table[:, None] if table.ndim == 2 else table
    return table.to(dtype).repeat_interleave(tokens // max(table.shape[1], 1), dim=1)


def ada_norm_reference(
    stream: Stream, weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, x', and rstd or (rstd, mean) of the rows of x': (1 or 2,B,T).

    Plain torch, in fp32 (fp64 for fp64); out and x' are rounded once, to x's dtype. The norm is that of the rounded
    x', which is what the backward and the rest of the model see.
    """
    x, shift, scale, y, gate = stream
    wide, tokens, residual = _wide(x), x.shape[1], x
    if y is not None:
        update = y.to(wide)
        if gate is not None:
            update = _a_row_a_token(gate, tokens, wide) * update
        residual = (x.to(wide) + update).to(x.dtype)
    rows = residual.to(wide)
    mean = rows.mean(-1, keepdim=True)
    rows = rows - mean if layer else rows
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    out = rows * rstd
    if weight is not None:
        out = out * weight.to(wide)
    if bias is not None:
        out = out + bias.to(wide)
    if scale is not None:
        out = out * (1 + _a_row_a_token(scale, tokens, wide))
    if shift is not None:
        out = out + _a_row_a_token(shift, tokens, wide)
    stats = torch.cat([rstd, mean], -1) if layer else rstd
    return out.to(x.dtype), residual, stats.movedim(-1, 0)


def _backward_reference(known: Known, groups: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """dx', ``gate * dx'`` and the three sums of `launch_backward`, in fp32 (fp64 for fp64)."""
    grad, grad_residual, residual, stats, y, gate, scale, weight = known
    wide, (B, T, D) = stats.dtype, residual.shape
    grad, rstd = grad.to(wide), stats[0][..., None]
    layer = stats.shape[0] == 2
    hat = (residual.to(wide) - (stats[1][..., None] if layer else 0)) * rstd
    dhat = grad
    if weight is not None:
        dhat = dhat * weight.to(wide)
    if scale is not None:
        dhat = dhat * (1 + _a_row_a_token(scale, T, wide))
    dx = dhat - hat * (dhat * hat).mean(-1, keepdim=True)
    if layer:
        dx = dx - dhat.mean(-1, keepdim=True)
    dx = dx * rstd
    if grad_residual is not None:
        dx = dx + grad_residual.to(wide)
    dy = dx if gate is None else dx * _a_row_a_token(gate, T, wide)
    gated = dx if y is None else dx * y.to(wide)
    sums = [v.reshape(B, groups, T // groups, D).sum(2) for v in (grad, grad * hat, gated)]
    return dx, dy, sums


# 2. kernels and 3. launchers are in ada_norm_kernels.py. 4. op


def _streams(flat: Sequence[Any]) -> list[Stream]:
    size = len(Stream._fields)
    return [Stream(*flat[i : i + size]) for i in range(0, len(flat), size)]


def _allocate_forward(streams: Sequence[Stream], layer: bool) -> list[Tensor]:
    """The joint output, rstd (and mean) of its rows, and x' of the streams that have a y."""
    x = streams[0].x
    tokens = sum(stream.x.shape[1] for stream in streams)
    out = torch.empty((x.shape[0], tokens, x.shape[2]), dtype=x.dtype, device=x.device)
    stats = torch.empty((1 + layer, x.shape[0], tokens), dtype=_wide(x), device=x.device)
    gated = [stream.x.shape for stream in streams if stream.y is not None]
    return [out, stats, *(torch.empty(shape, dtype=x.dtype, device=x.device) for shape in gated)]


@torch.library.custom_op("dit_lora::ada_norm", mutates_args=(), device_types=("cuda", "cpu"))
def ada_norm_forward(
    flat: list[Tensor | None], weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> list[Tensor]:
    """`out`, `stats`, and x' of every stream with a y; `flat` holds the fields of every Stream in turn."""
    streams = _streams(flat)
    out, stats, *residuals = made = _allocate_forward(streams, layer)
    first = 0
    for stream in streams:
        tokens = slice(first, first := first + stream.x.shape[1])
        residual = None if stream.y is None else residuals.pop(0)
        if launches(stream.x):
            launch_forward(stream, weight, bias, residual, out[:, tokens], stats[..., tokens], eps)
            continue
        out[:, tokens], updated, stats[..., tokens] = ada_norm_reference(
            stream, weight, bias, layer, eps
        )
        if residual is not None:
            residual.copy_(updated)
    return made


@ada_norm_forward.register_fake
def _(
    flat: list[Tensor | None], weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> list[Tensor]:
    return _allocate_forward(_streams(flat), layer)


def _allocate_backward(known: Known, dx: bool, dy: torch.dtype | None) -> list[Tensor | None]:
    shape, device = known.residual.shape, known.residual.device
    dtypes = (known.residual.dtype if dx else None, dy)
    return [None if d is None else torch.empty(shape, dtype=d, device=device) for d in dtypes]


@torch.library.custom_op(
    "dit_lora::ada_norm_backward", mutates_args=(), device_types=("cuda", "cpu")
)
def ada_norm_backward(
    flat: list[Tensor | None], groups: int, dx: bool, dy: torch.dtype | None, sums: list[bool]
) -> list[Tensor]:
    """Those wanted of dx', ``gate * dx'`` and the three sums of `launch_backward`; `flat` is a Known's fields."""
    known = Known(*flat)  # type: ignore[arg-type]
    rows = _allocate_backward(known, dx, dy)
    totals: Sequence[Tensor | None]
    if launches(known.grad):
        totals = launch_backward(known, rows, groups, sums)
    else:
        *values, every = _backward_reference(known, groups)
        rows = [None if v is None else v.copy_(new) for v, new in zip(rows, values, strict=True)]
        totals = [total if want else None for total, want in zip(every, sums, strict=True)]
    return [v for v in (*rows, *totals) if v is not None]


@ada_norm_backward.register_fake
def _(
    flat: list[Tensor | None], groups: int, dx: bool, dy: torch.dtype | None, sums: list[bool]
) -> list[Tensor]:
    known = Known(*flat)  # type: ignore[arg-type]
    rows = _allocate_backward(known, dx, dy)
    (B, _, D), stats = known.residual.shape, known.stats
    totals = [
        torch.empty((B, groups, D), dtype=stats.dtype, device=stats.device) for want in sums if want
    ]
    return [*(v for v in rows if v is not None), *totals]


def _gradients(
    known: Known,
    bias: Tensor | None,
    groups: int,
    dtypes: Stream,
    want: Stream,
    affine: Sequence[bool],
) -> tuple[list[Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """The gradients of a Stream's fields in their order, and its shares of those of weight and bias.

    `dtypes` and `want` hold each field's dtype and whether its gradient is wanted; `affine`, whether weight's, bias's.
    """
    one = known.gate is None and dtypes.y is dtypes.x  # dx' is also the gradient of y
    wanted = [
        bool(want.x or (want.y and one)),
        bool(want.y and not one),
        bool(want.shift or affine[1] or (want.scale and bias is not None)),
        bool(want.scale or affine[0]),
        bool(want.gate),
    ]
    dy_dtype: Any = dtypes.y if wanted[1] else None
    made = iter(ada_norm_backward(list(known), groups, wanted[0], dy_dtype, wanted[2:]))
    parts: list[Any] = [next(made) if it else None for it in wanted]
    dx, dy, ones, hats, dgate = parts
    factor = 1 if known.scale is None else 1 + known.scale.to(known.stats.dtype)
    shares = (
        (factor * hats).sum((0, 1)) if affine[0] else None,
        (factor * ones).sum((0, 1)) if affine[1] else None,
    )
    if want.scale:  # the sum of grad * (normalised row * weight + bias)
        hats = hats if known.weight is None else hats * known.weight
        hats = hats if bias is None else hats + ones * bias
    grads = (dx, ones, hats, dx if one else dy, dgate)
    return [g.to(d) if w else None for g, d, w in zip(grads, dtypes, want, strict=True)], shares


class _AdaNorm(torch.autograd.Function):
    """Both ops under one node that also hands on x, so that its other use's gradient arrives in the kernel.

    `register_autograd` cannot do that: an op of torch.library must not return its input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: bool,
        eps: float,
        weight: Tensor | None,
        bias: Tensor | None,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        out, stats, *updated = ada_norm_forward(list(flat), weight, bias, layer, eps)
        streams, wants = _streams(flat), _streams(ctx.needs_input_grad[4:])
        residuals = [s.x if s.y is None else updated.pop(0) for s in streams]
        ctx.groups = [s.groups() for s in streams]
        ctx.dtypes = [None if v is None else v.dtype for v in flat]
        kept: list[Tensor | None] = [weight, bias, stats]
        for residual, stream, want in zip(residuals, streams, wants, strict=True):
            kept += [residual, stream.y if want.gate else None, stream.gate, stream.scale]
        ctx.save_for_backward(*kept)
        return (out, *residuals)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, *grad_residuals: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        weight, bias, stats, *kept = ctx.saved_tensors
        if grad is None:  # out was not used
            grad = torch.zeros_like(kept[0][:, :1, :1]).expand(*stats.shape[1:], kept[0].shape[2])
        affine, wants = ctx.needs_input_grad[2:4], _streams(ctx.needs_input_grad[4:])
        grads: list[Tensor | None] = []
        shares: list[tuple[Any, Any]] = []
        first = 0
        for i, (want, dtypes) in enumerate(zip(wants, _streams(ctx.dtypes), strict=True)):
            residual, y, gate, scale = kept[4 * i : 4 * i + 4]
            tokens = slice(first, first := first + residual.shape[1])
            known = Known(
                grad[:, tokens], grad_residuals[i], residual, stats[..., tokens], y, gate, scale, weight
            )  # fmt: skip
            own, share = _gradients(known, bias, ctx.groups[i], dtypes, want, affine)
            grads += own
            shares.append(share)
        dweight, dbias = (
            torch.stack([share[i] for share in shares]).sum(0).to(v.dtype) if affine[i] else None
            for i, v in enumerate((weight, bias))
        )
        return (None, None, dweight, dbias, *grads)


def joint_ada_norm(
    streams: Sequence[Stream],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Literal["layer", "rms"],
    eps: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """``norm(x + gate * y) * (1 + scale) + shift`` of each stream, in one buffer (B, sum of T, D) in their order.

    Returns the buffer and each stream's ``x + gate * y`` (the memory of x where it has no y), both in x's dtype.
    Go on from the x returned here: then the gradient of its other use is added in this op's backward, with no pass
    of its own. weight and bias are (D,); each operand may have its own float dtype and strides.
    Raises ValueError for shapes that do not fit. Source: CogVideoX, diffusers CogVideoXLayerNormZero.
    """
    check_streams(streams, norm, {"weight": weight, "bias": bias})
    flat = [field for i, stream in enumerate(streams) for field in grouped(stream, i)]
    out, *residuals = _AdaNorm.apply(norm == "layer", eps, weight, bias, *flat)
    return out, tuple(residuals)


@overload
def ada_norm(
    x: Tensor,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Literal["layer", "rms"],
    eps: float,
    y: None = None,
    gate: None = None,
) -> Tensor: ...


@overload
def ada_norm(
    x: Tensor,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Literal["layer", "rms"],
    eps: float,
    y: Tensor,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def ada_norm(
    x: Tensor,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Literal["layer", "rms"],
    eps: float,
    y: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``norm(x + gate * y) * (1 + scale) + shift``, and ``x + gate * y`` too if y is given; both in x's dtype.

    x, y (B,T,D); shift, scale, gate (B,D) or (B,G,D), where token t uses group ``t // (T // G)``; weight, bias (D,).
    Every operand may have its own float dtype, and any strides. The norm is over D, of ``x + gate * y`` as it was
    rounded. Raises ValueError for shapes that do not fit. `joint_ada_norm` of one stream also returns x where there
    is no y, and saves a pass of the backward.
    Source: diffusers AdaLayerNormZero, and the block forwards of Sana, Wan and LTX.
    """
    out, (residual,) = joint_ada_norm(
        [Stream(x, shift, scale, y, gate)], weight, bias, norm=norm, eps=eps
    )
    return out if y is None else (out, residual)
