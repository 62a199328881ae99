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
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from dit_lora_kernels.support import (
    accumulator,
    launch,
    launches,
    on_its_device,
    op,
    packed,
    pipelined_row_block,
    readable_rows,
    row_block,
    tl,
    triton,
    wide_dtype,
)

# A program that sums a table's gradient takes up to 32 rows, where its fp32 partials are 4% of its bytes, and fewer
# where that would leave an H100's 132 multiprocessors fewer than about 4 programs each.
MAX_ROWS = 32
MIN_PROGRAMS = 512


class Stream(NamedTuple):
    """One stream of tokens: x and y (B,T,D), its tables (B,G,D) or (B,D) where G divides T."""

    x: Tensor
    shift: Tensor | None = None
    scale: Tensor | None = None
    y: Tensor | None = None
    gate: Tensor | None = None

    def groups(self) -> int:
        """Return G, how many rows of the tables a sample has."""
        tables = (self.shift, self.scale, self.gate)
        return next((table.shape[1] for table in tables if table is not None), 1)


class BackwardOperands(NamedTuple):
    """Tensors that the backward of one stream reads: rows (B,T,D), tables (B,G,D), stats (1 or 2,B,T), weight (D,)."""

    grad: Tensor
    grad_residual: Tensor | None
    residual: Tensor
    stats: Tensor
    y: Tensor | None
    gate: Tensor | None
    scale: Tensor | None
    weight: Tensor | None


# 1. reference


def _a_row_a_token(table: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return a table (B,D) or (B,G,D) repeated for every token of its group: (B,T,D) in `dtype`."""
    table = table[:, None] if table.ndim == 2 else table
    return table.to(dtype).repeat_interleave(tokens // max(table.shape[1], 1), dim=1)


def ada_norm_reference(
    stream: Stream, weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `out` and x' (B,T,D), and of the rows of x' rstd or (rstd, mean): (1 or 2,B,T).

    Plain torch, in fp32 (fp64 for fp64); out and x' are rounded once, to x's dtype. The norm is that of the rounded
    x', which is what the backward and the rest of the model see.
    """
    x, shift, scale, y, gate = stream
    wide, tokens, residual = wide_dtype(x.dtype), x.shape[1], x
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


def _backward_reference(
    operands: BackwardOperands, groups: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return dx', ``gate * dx'`` and the three sums of `launch_backward`, in fp32 (fp64 for fp64)."""
    grad, grad_residual, residual, stats, y, gate, scale, weight = operands
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


# 2. kernels


# Forward: a program takes one row in one block of BLOCK_D >= D channels. The row is read once and stays in registers
# for both reductions, the mean and then the variance, which moments taken together would lose to cancellation.
# Numbers of rows and programs are int64: a row's offset, row * D, passes 2^31 at 700 thousand rows of 3072.


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, gate_ptr, shift_ptr, scale_ptr, weight_ptr, bias_ptr,
    residual_ptr, out_ptr, mean_ptr, rstd_ptr,
    x_b, x_t, y_b, y_t, gate_b, gate_g, shift_b, shift_g, scale_b, scale_g,
    T, L, S, D,
    EPS: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = row // T
    t = row % T
    g = t // L
    columns = tl.arange(0, BLOCK_D)
    inside = columns < D

    x = tl.load(x_ptr + b * x_b + t * x_t + columns, mask=inside, other=0.0).to(ACC)
    if y_ptr is not None:
        update = tl.load(y_ptr + b * y_b + t * y_t + columns, mask=inside, other=0.0).to(ACC)
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + b * gate_b + g * gate_g + columns, mask=inside, other=0.0)
            update = update * gate.to(ACC)
        # The row as it is stored: the backward has nothing else to normalise.
        stored = (x + update).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * D + columns, stored, mask=inside)
        x = stored.to(ACC)

    # `out` and the statistics have S tokens a sample; their pointers are at this stream's first token.
    if mean_ptr is not None:
        mean = tl.sum(x, axis=0) / D
        tl.store(mean_ptr + b * S + t, mean)
        x = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + EPS)
    tl.store(rstd_ptr + b * S + t, rstd)

    out = x * rstd
    if weight_ptr is not None:
        out = out * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(ACC)
    if bias_ptr is not None:
        out = out + tl.load(bias_ptr + columns, mask=inside, other=0.0).to(ACC)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + b * scale_b + g * scale_g + columns, mask=inside, other=0.0)
        out = out * (1.0 + scale.to(ACC))
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + b * shift_b + g * shift_g + columns, mask=inside, other=0.0)
        out = out + shift.to(ACC)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (b * S + t) * D + columns, out, mask=inside)


@triton.jit
def _factor(
    scale_ptr, weight_ptr, b, g, scale_b, scale_g, columns, channel,
    ACC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return ``(1 + scale) * weight`` (BLOCK_D,), which all rows of a group share."""
    factor = tl.full((BLOCK_D,), 1.0, ACC)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + b * scale_b + g * scale_g + columns, mask=channel, other=0.0)
        factor += scale.to(ACC)
    if weight_ptr is not None:
        factor *= tl.load(weight_ptr + columns, mask=channel, other=0.0).to(ACC)
    return factor


@triton.jit
def _store_sums(ones_ptr, hats_ptr, dgate_ptr, ones, hats, dgate, program, D, columns, channel):
    """Store a program's sums (BLOCK_D,) as its row of the partials; a null pointer is a sum nobody wants."""
    if ones_ptr is not None:
        tl.store(ones_ptr + program * D + columns, ones, mask=channel)
    if hats_ptr is not None:
        tl.store(hats_ptr + program * D + columns, hats, mask=channel)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + program * D + columns, dgate, mask=channel)


# Backward: a program takes up to ROWS tokens of one group, which share a row of each table. Sums over them stay in
# registers and are stored once, a row of partials a program: no atomics, so the same bits every time.
# With hat the normalised row and dhat = grad * factor:  dx' = rstd * (dhat - hat * mean(dhat * hat) - mean(dhat)),
# the last mean for LayerNorm alone, and then the gradient of the other use of x' is added.
# `ones` sums grad (of shift and bias), `hats` sums grad * hat (of scale and weight), `dgate` sums dx' * y.
# A row past the group's end loads zeros, so that it adds nothing to the sums, and stores nothing.


@triton.jit
def _backward_kernel(
    grad_ptr, grad_residual_ptr, residual_ptr, mean_ptr, rstd_ptr, y_ptr, gate_ptr, scale_ptr, weight_ptr,
    dx_ptr, dy_ptr, ones_ptr, hats_ptr, dgate_ptr,
    grad_b, grad_t, grad_residual_b, grad_residual_t, residual_b, residual_t, y_b, y_t,
    gate_b, gate_g, scale_b, scale_g,
    T, G, L, S, D, CHUNKS,
    ROWS: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    first = program % CHUNKS * ROWS
    group = program // CHUNKS
    b = group // G
    g = group % G
    columns = tl.arange(0, BLOCK_D)
    channel = columns < D
    factor = _factor(scale_ptr, weight_ptr, b, g, scale_b, scale_g, columns, channel, ACC, BLOCK_D)
    ones = tl.zeros((BLOCK_D,), ACC)
    hats = tl.zeros((BLOCK_D,), ACC)
    dgate = tl.zeros((BLOCK_D,), ACC)

    for i in tl.range(0, ROWS, num_stages=STAGES):
        exists = first + i < L
        inside = columns < tl.where(exists, D, 0)
        t = g * L + first + i
        grad = tl.load(grad_ptr + b * grad_b + t * grad_t + columns, mask=inside, other=0.0).to(ACC)
        row = residual_ptr + b * residual_b + t * residual_t
        x = tl.load(row + columns, mask=inside, other=0.0).to(ACC)
        rstd = tl.load(rstd_ptr + b * S + t, mask=exists, other=0.0)
        if mean_ptr is not None:
            x = tl.where(inside, x - tl.load(mean_ptr + b * S + t, mask=exists, other=0.0), 0.0)
        hat = x * rstd
        if ones_ptr is not None:
            ones += grad
        if hats_ptr is not None:
            hats += grad * hat
        dhat = grad * factor
        dx = dhat - hat * (tl.sum(dhat * hat, axis=0) / D)
        if mean_ptr is not None:
            dx -= tl.sum(dhat, axis=0) / D
        dx *= rstd
        if grad_residual_ptr is not None:
            row = grad_residual_ptr + b * grad_residual_b + t * grad_residual_t
            dx += tl.load(row + columns, mask=inside, other=0.0).to(ACC)
        if dx_ptr is not None:
            value = dx.to(dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + (b * T + t) * D + columns, value, mask=inside)
        if dgate_ptr is not None:
            y = tl.load(y_ptr + b * y_b + t * y_t + columns, mask=inside, other=0.0).to(ACC)
            dgate += dx * y
        if dy_ptr is not None:
            if gate_ptr is not None:  # read again for each row: it would cost registers in the loop
                row = gate_ptr + b * gate_b + g * gate_g
                gate = tl.load(row + columns, mask=channel, other=0.0)
                dx *= gate.to(ACC)
            value = dx.to(dy_ptr.dtype.element_ty)
            tl.store(dy_ptr + (b * T + t) * D + columns, value, mask=inside)

    _store_sums(ones_ptr, hats_ptr, dgate_ptr, ones, hats, dgate, program, D, columns, channel)


# 3. launchers


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    """Return the strides between samples and between rows; of a missing tensor zeros, which nothing reads."""
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def _mean_and_rstd(stats: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return mean, None for RMSNorm, and rstd, each (B,S), of `stats`, which is rstd or (rstd, mean)."""
    return (stats[1] if stats.shape[0] == 2 else None), stats[0]


@on_its_device
def launch_forward(
    stream: Stream,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    stats: Tensor,
    eps: float,
) -> None:
    """Fill `residual` (B,T,D), and `out` (B,T,D) and `stats` (1 or 2,B,T): slices of a joint buffer's tokens."""
    if stream.x.numel() == 0:
        return
    (B, T, D), length = stream.x.shape, stream.x.shape[1] // stream.groups()
    # In the order of the kernel's arguments, as the strides are.
    ordered = (stream.x, stream.y, stream.gate, stream.shift, stream.scale)
    rows = [readable_rows(tensor) for tensor in ordered]
    affine = [packed(weight), packed(bias)]
    strides = [stride for tensor in rows for stride in _strides(tensor)]
    launch(
        _forward_kernel, (B * T,), *rows, *affine, residual, out, *_mean_and_rstd(stats), *strides,
        T, length, stats.stride(1), D,
        EPS=eps, ACC=accumulator(stream.x.dtype), **row_block(D),
    )  # fmt: skip


def rows_per_program(rows: int, length: int) -> int:
    """Return how many of all `rows`, of groups of `length`, a program that sums takes: as many as keep the GPU busy."""
    # A power of two, because each number is a kernel of its own to compile.
    most = max(min(MAX_ROWS, length, rows // MIN_PROGRAMS), 1)
    return 1 << (most.bit_length() - 1)


@on_its_device
def launch_backward(
    operands: BackwardOperands, rows: Sequence[Tensor | None], groups: int, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Fill `rows`, dx and dy; return the sums over each group's tokens that `wanted` names, (B,G,D) or None.

    They are those of grad, of grad times the normalised row, and of dx' times y.
    """
    grad, grad_residual, residual, stats, y, gate, scale, weight = operands
    B, T, D = residual.shape
    length = T // groups
    # Without sums rows have nothing to share, and one program a row keeps the GPU fullest.
    count = rows_per_program(B * T, length) if any(wanted) else 1
    chunks = -(-length // count)  # programs a group, the last of which may have rows to spare
    shape = (B * groups, chunks, D)
    partials = [
        torch.empty(shape, dtype=stats.dtype, device=grad.device) if want else None
        for want in wanted
    ]
    if residual.numel() > 0:
        ordered = [readable_rows(v) for v in (grad, grad_residual, residual)]
        tables = [readable_rows(v) for v in (y, gate, scale)]
        strides = [stride for v in (*ordered, *tables) for stride in _strides(v)]
        launch(
            _backward_kernel, (B * groups * chunks,), *ordered, *_mean_and_rstd(stats), *tables, packed(weight), *rows, *partials, *strides,
            T, groups, length, stats.stride(1), D, chunks,
            ROWS=count, ACC=accumulator(residual.dtype), **pipelined_row_block(D, residual.dtype, any(wanted)),
        )  # fmt: skip
    # Added up by torch, in one order whatever the order in which programs ran.
    return [
        None if p is None else (p if chunks == 1 else p.sum(1)).view(B, groups, D) for p in partials
    ]


# 4. op


def _streams(flat: Sequence[Any]) -> list[Stream]:
    """Return Streams of the fields that follow each other in `flat`: an op's schema has lists but no tuples of them."""
    size = len(Stream._fields)
    return [Stream._make(flat[i : i + size]) for i in range(0, len(flat), size)]


def _allocate_forward(streams: Sequence[Stream], layer: bool) -> list[Tensor]:
    """Return uninitialised: the joint output (B,S,D), rstd (and mean) of its rows (1 or 2,B,S), and x' (B,T,D) of
    each stream that has a y.
    """
    x = streams[0].x
    tokens = sum(stream.x.shape[1] for stream in streams)
    out = torch.empty((x.shape[0], tokens, x.shape[2]), dtype=x.dtype, device=x.device)
    stats = torch.empty((1 + layer, x.shape[0], tokens), dtype=wide_dtype(x.dtype), device=x.device)
    gated = [stream.x.shape for stream in streams if stream.y is not None]
    return [out, stats, *(torch.empty(shape, dtype=x.dtype, device=x.device) for shape in gated)]


def _by_stream(joint: Tensor, stats: Tensor, streams: Sequence[Stream]) -> tuple[Any, Any]:
    """Return each stream's tokens of (B,S,D) and of (1 or 2,B,S)."""
    if len(streams) == 1:  # most are: a view of the whole would only take time
        return (joint,), (stats,)
    lengths = [stream.x.shape[1] for stream in streams]
    return joint.split(lengths, 1), stats.split(lengths, 2)


@op("ada_norm")
def ada_norm_forward(
    flat: list[Tensor | None], weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> list[Tensor]:
    """Return `out`, `stats`, and x' of every stream with a y; `flat` holds the fields of every Stream in turn."""
    streams = _streams(flat)
    results = _allocate_forward(streams, layer)
    residuals = list(results[2:])
    by_stream = _by_stream(results[0], results[1], streams)
    for stream, out, stats in zip(streams, *by_stream, strict=True):
        residual = None if stream.y is None else residuals.pop(0)
        if launches(stream.x):
            launch_forward(stream, weight, bias, residual, out, stats, eps)
            continue
        normed, updated, statistics = ada_norm_reference(stream, weight, bias, layer, eps)
        out.copy_(normed)
        stats.copy_(statistics)
        if residual is not None:
            residual.copy_(updated)
    return results


@ada_norm_forward.register_fake
def _(
    flat: list[Tensor | None], weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> list[Tensor]:
    return _allocate_forward(_streams(flat), layer)


def _allocate_backward(
    operands: BackwardOperands, dx: bool, dy: torch.dtype | None
) -> list[Tensor | None]:
    """Return uninitialised dx' and ``gate * dx'`` (B,T,D), None for one that is not wanted."""
    shape, device = operands.residual.shape, operands.residual.device
    dtypes = (operands.residual.dtype if dx else None, dy)
    return [None if d is None else torch.empty(shape, dtype=d, device=device) for d in dtypes]


@op("ada_norm_backward")
def ada_norm_backward(
    flat: list[Tensor | None], groups: int, dx: bool, dy: torch.dtype | None, sums: list[bool]
) -> list[Tensor]:
    """Return those wanted of dx', ``gate * dx'`` (in the dtype `dy`) and the three sums of `launch_backward`.

    `flat` holds the fields of BackwardOperands.
    """
    operands = BackwardOperands._make(flat)
    rows = _allocate_backward(operands, dx, dy)
    totals: Sequence[Tensor | None]
    if launches(operands.grad):
        totals = launch_backward(operands, rows, groups, sums)
    else:
        *values, all_sums = _backward_reference(operands, groups)
        rows = [None if v is None else v.copy_(new) for v, new in zip(rows, values, strict=True)]
        totals = [total if want else None for total, want in zip(all_sums, sums, strict=True)]
    return [v for v in (*rows, *totals) if v is not None]


@ada_norm_backward.register_fake
def _(
    flat: list[Tensor | None], groups: int, dx: bool, dy: torch.dtype | None, sums: list[bool]
) -> list[Tensor]:
    operands = BackwardOperands._make(flat)
    rows = _allocate_backward(operands, dx, dy)
    (B, _, D), stats = operands.residual.shape, operands.stats
    totals = [
        torch.empty((B, groups, D), dtype=stats.dtype, device=stats.device) for want in sums if want
    ]
    return [*(v for v in rows if v is not None), *totals]


def _gradients(
    operands: BackwardOperands,
    bias: Tensor | None,
    groups: int,
    dtypes: Stream,
    want: Stream,
    affine: Sequence[bool],
) -> tuple[list[Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """Return the gradients of a Stream's fields in their order, and its shares of those of weight and bias, (D,).

    `dtypes` and `want` hold each field's dtype and whether its gradient is wanted; `affine`, whether weight's, bias's.
    """
    # Without a gate, and in one dtype, dx' is also the gradient of y: one tensor serves as both.
    y_is_x = operands.gate is None and dtypes.y is dtypes.x
    wanted = [
        bool(want.x or (want.y and y_is_x)),
        bool(want.y and not y_is_x),
        # d scale is of what it multiplies, hat * weight + bias, and so needs the sum of grad for the bias.
        bool(want.shift or affine[1] or (want.scale and bias is not None)),
        bool(want.scale or affine[0]),
        bool(want.gate),
    ]
    dy_dtype: Any = dtypes.y if wanted[1] else None
    computed = iter(ada_norm_backward(list(operands), groups, wanted[0], dy_dtype, wanted[2:]))
    parts: list[Any] = [next(computed) if needed else None for needed in wanted]
    dx, dy, ones, hats, dgate = parts
    # weight and bias stand before the scale, so their gradients take each group's factor before groups are summed.
    factor = 1 if operands.scale is None else 1 + operands.scale.to(operands.stats.dtype)
    shares = (
        (factor * hats).sum((0, 1)) if affine[0] else None,
        (factor * ones).sum((0, 1)) if affine[1] else None,
    )
    if want.scale:
        hats = hats if operands.weight is None else hats * operands.weight
        hats = hats if bias is None else hats + ones * bias
    grads = (dx, ones, hats, dx if y_is_x else dy, dgate)
    each = zip(grads, dtypes, want, strict=True)
    return [(g if g.dtype is d else g.to(d)) if w else None for g, d, w in each], shares


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
        ctx.set_materialize_grads(False)  # None for an output not used, not zeros to be read
        out, stats, *rest = ada_norm_forward(list(flat), weight, bias, layer, eps)
        updated = list(rest)  # torch 2.11's Dynamo makes a tuple of starred names
        streams, wants = _streams(flat), _streams(ctx.needs_input_grad[4:])
        residuals = [s.x if s.y is None else updated.pop(0) for s in streams]
        ctx.groups = [s.groups() for s in streams]
        ctx.dtypes = [None if v is None else v.dtype for v in flat]
        # x' is kept and not the normalised row: the caller keeps x' anyway, as the residual stream.
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
        by_stream = _by_stream(grad, stats, [Stream(residual) for residual in kept[::4]])
        for i, (want, dtypes) in enumerate(zip(wants, _streams(ctx.dtypes), strict=True)):
            residual, y, gate, scale = kept[4 * i : 4 * i + 4]
            operands = BackwardOperands(
                by_stream[0][i], grad_residuals[i], residual, by_stream[1][i], y, gate, scale, weight
            )  # fmt: skip
            stream_grads, share = _gradients(operands, bias, ctx.groups[i], dtypes, want, affine)
            grads += stream_grads
            shares.append(share)
        dweight = dbias = None
        if affine[0]:
            dweight = torch.stack([of_weight for of_weight, _ in shares]).sum(0).to(weight.dtype)
        if affine[1]:
            dbias = torch.stack([of_bias for _, of_bias in shares]).sum(0).to(bias.dtype)
        return (None, None, dweight, dbias, *grads)


def _describe(tensor: Tensor) -> str:
    """Return a tensor's shape, dtype and device, for an error."""
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def check_streams(streams: Sequence[Stream], norm: str, affine: dict[str, Tensor | None]) -> None:
    """Raise a ValueError that names what does not fit: the norm, a stream's rows, weight or bias."""
    if norm not in ("layer", "rms"):
        raise ValueError(f"norm must be 'layer' or 'rms', got {norm!r}")
    if not streams:
        raise ValueError("ada_norm needs at least one stream, got none")
    first = streams[0].x
    for i, (x, _, _, y, gate) in enumerate(streams):
        same = x.dtype is first.dtype and x.device == first.device
        if x.ndim != 3 or not x.is_floating_point() or x.shape[::2] != first.shape[::2] or not same:
            raise ValueError(
                f"x of stream {i} must be floating (B,T,D), with the B, D, dtype and device of stream 0: "
                f"got {_describe(x)} beside {_describe(first)}"
            )
        if y is not None and y.shape != x.shape:
            raise ValueError(
                f"y of stream {i} must have the shape of x {tuple(x.shape)}, got {_describe(y)}"
            )
        if gate is not None and y is None:
            raise ValueError(f"gate of stream {i} multiplies y, and there is no y")
    for name, vector in affine.items():
        if vector is not None and vector.shape != first.shape[2:]:
            raise ValueError(f"{name} must be ({first.shape[2]},), got {_describe(vector)}")


def grouped(stream: Stream, position: int) -> Stream:
    """Return the stream with every table as (B,G,D), with one G.

    Raises ValueError for a table of another shape, or a G that does not divide T.
    """
    B, T, D = stream.x.shape
    fields = {"shift": stream.shift, "scale": stream.scale, "gate": stream.gate}
    tables = {k: v[:, None] if v.ndim == 2 else v for k, v in fields.items() if v is not None}
    groups = max([1, *(v.shape[1] for v in tables.values() if v.ndim == 3)])
    for name, table in tables.items():
        fits = table.ndim == 3 and (table.shape[0], table.shape[2]) == (B, D)
        if not fits or table.shape[1] not in (1, groups) or T % groups:
            raise ValueError(
                f"{name} of stream {position} must be (B,D) or (B,G,D), where B={B}, D={D} and G is 1 or one number "
                f"that divides T={T}; got {_describe(table)}"
            )
    # A row for all tokens is repeated by a stride of 0. Autograd sums its gradient over the groups again.
    wide = {k: v if v.shape[1] == groups else v.expand(B, groups, D) for k, v in tables.items()}
    return stream._replace(**wide)


def joint_ada_norm(
    streams: Sequence[Stream],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Literal["layer", "rms"],
    eps: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return ``norm(x + gate * y) * (1 + scale) + shift`` of each stream, in one buffer (B, sum of T, D), in their order.

    The other results are each stream's ``x + gate * y`` (the memory of x where it has no y), both in x's dtype.
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
    """Return ``norm(x + gate * y) * (1 + scale) + shift``, and ``x + gate * y`` too if y is given; both in x's dtype.

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
