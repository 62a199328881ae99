"""Adaptive norm with the gated residual before it: ``out = norm(x') * (1 + scale) + shift``, ``x' = x + gate * y``.

The norm is LayerNorm or RMSNorm over D, then ``* weight + bias`` if given; each of y, gate, scale and shift may be
missing. Streams (text and video) may write into one joint buffer, in the order given.

Shapes: B batch, T tokens of a stream, S tokens of all streams, D channels, G groups of consecutive tokens that share a
row of the tables: token t uses row ``t // (T // G)`` (G = 1: one row per sample; G = T: one row per token).

Source: adaLN-Zero, https://arxiv.org/abs/2212.09748 section 3.2; LayerNorm https://arxiv.org/abs/1607.06450; RMSNorm
https://arxiv.org/abs/1910.07467.

Traffic, with u = B*S*D elements and without tables (they stay in L2 while G is far below T): forward reads x and
writes out, 2u; with y it reads x, y and writes x', out, 4u. Backward reads the gradients of out and x' and x', and
writes dx, 4u; with gate*y also dy, 5u; and reads y if the gate is trained, 6u. Saved for the backward: x' (which the
caller keeps as the residual stream) and 4 or 8 bytes per row.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dit_lora_kernels.ada_norm_kernels import (
    AdaNormInputs,
    BackwardOperands,
    Layouts,
    launch_backward,
    launch_forward,
    prepare_backward,
    prepare_forward,
    programs,
    sum_chunks,
)
from dit_lora_kernels.support import (
    PlainLayout,
    Prepared,
    TensorLayout,
    accumulation_dtype,
    apply_plainly,
    get_layout,
    get_layout_tuple,
    get_plain_layouts,
    launches,
    make_rows_contiguous,
    op,
)

# 1. reference


def _expand_table(table: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Repeat a table (B,D) or (B,G,D) for every token of its group: (B,T,D) in `dtype`."""
    table = table[:, None] if table.ndim == 2 else table
    return table.to(dtype).repeat_interleave(tokens // max(table.shape[1], 1), dim=1)


def ada_norm_reference(
    stream: AdaNormInputs, weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of the op: `output_shape` and x' (B,T,D), and for the rows of x' rstd or (rstd, mean), (1 or 2,B,T).

    Plain torch, in fp32 (fp64 for fp64); out and x' are rounded once, to x's dtype. The norm is that of the rounded
    x', which the backward and the rest of the model see.
    """
    x, shift, scale, y, gate = stream
    wide, tokens, residual = accumulation_dtype(x.dtype), x.shape[1], x
    if y is not None:
        update = y.to(wide)
        if gate is not None:
            update = _expand_table(gate, tokens, wide) * update
        residual = (x.to(wide) + update).to(x.dtype)
    rows = residual.to(wide)
    mean = rows.mean(-1, keepdim=True)
    rows = rows - mean if layer else rows
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    output = rows * rstd
    if weight is not None:
        output = output * weight.to(wide)
    if bias is not None:
        output = output + bias.to(wide)
    if scale is not None:
        output = output * (1 + _expand_table(scale, tokens, wide))
    if shift is not None:
        output = output + _expand_table(shift, tokens, wide)
    stats = torch.cat([rstd, mean], -1) if layer else rstd
    return output.to(x.dtype), residual, stats.movedim(-1, 0)


def _backward_reference(operands: BackwardOperands, groups: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute dx', ``gate * dx'`` and the three sums of `launch_backward`, in fp32 (fp64 for fp64)."""
    grad, grad_residual, residual, stats, y, gate, scale, weight = operands
    wide, (B, T, D) = stats.dtype, residual.shape
    grad, rstd = grad.to(wide), stats[0][..., None]
    layer = stats.shape[0] == 2
    hat = (residual.to(wide) - (stats[1][..., None] if layer else 0)) * rstd
    dhat = grad
    if weight is not None:
        dhat = dhat * weight.to(wide)
    if scale is not None:
        dhat = dhat * (1 + _expand_table(scale, T, wide))
    dx = dhat - hat * (dhat * hat).mean(-1, keepdim=True)
    if layer:
        dx = dx - dhat.mean(-1, keepdim=True)
    dx = dx * rstd
    if grad_residual is not None:
        dx = dx + grad_residual.to(wide)
    dy = dx if gate is None else dx * _expand_table(gate, T, wide)
    gated = dx if y is None else dx * y.to(wide)
    sums = [v.reshape(B, groups, T // groups, D).sum(2) for v in (grad, grad * hat, gated)]
    return dx, dy, sums


# 2. op


def _group_fields(flat: Sequence[Any]) -> list[AdaNormInputs]:
    """Regroup the flat list of fields into streams; an op's schema allows no lists of tuples."""
    size = len(AdaNormInputs._fields)
    return [AdaNormInputs._make(flat[i : i + size]) for i in range(0, len(flat), size)]


def _allocate_forward(streams: Sequence[AdaNormInputs], layer: bool) -> list[Tensor]:
    """Allocate the joint output (B,S,D), rstd (and mean) of its rows (1 or 2,B,S), and x' (B,T,D) of each stream with
    a y.
    """
    x = streams[0].x
    tokens = sum(stream.x.shape[1] for stream in streams)
    output = torch.empty((x.shape[0], tokens, x.shape[2]), dtype=x.dtype, device=x.device)
    stats = torch.empty((1 + layer, x.shape[0], tokens), dtype=accumulation_dtype(x.dtype), device=x.device)
    gated = [stream.x.shape for stream in streams if stream.y is not None]
    return [output, stats, *(torch.empty(shape, dtype=x.dtype, device=x.device) for shape in gated)]


def _split_by_stream(joint: Tensor, stats: Tensor, lengths: list[int]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Split (B,S,D) and (1 or 2,B,S) into each stream's tokens."""
    if len(lengths) == 1:  # the usual case: a view of the whole would only take time
        return (joint,), (stats,)
    return joint.split_with_sizes(lengths, 1), stats.split_with_sizes(lengths, 2)


@op("ada_norm")
def ada_norm_forward(
    flat: list[Tensor | None], weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> list[Tensor]:
    """The forward op: `output_shape`, `stats_shape`, and x' of every stream with a y; `flat` holds all streams' fields
    in turn.
    """
    streams = _group_fields(flat)
    results = _allocate_forward(streams, layer)
    residuals = list(results[2:])
    by_stream = _split_by_stream(results[0], results[1], [stream.x.shape[1] for stream in streams])
    for stream, output, stats in zip(streams, *by_stream, strict=True):
        residual = None if stream.y is None else residuals.pop(0)
        if launches(stream.x):
            launch_forward(stream, weight, bias, residual, output, stats, eps)
            continue
        normed, updated, statistics = ada_norm_reference(stream, weight, bias, layer, eps)
        output.copy_(normed)
        stats.copy_(statistics)
        if residual is not None:
            residual.copy_(updated)
    return results


@ada_norm_forward.register_fake
def _fake_ada_norm_forward(
    flat: list[Tensor | None], weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> list[Tensor]:
    return _allocate_forward(_group_fields(flat), layer)


def _allocate_backward(operands: BackwardOperands, dx: bool, dy: torch.dtype | None) -> list[Tensor | None]:
    """Allocate dx' and ``gate * dx'`` (B,T,D), None for a gradient that is not needed."""
    shape, device = operands.residual.shape, operands.residual.device
    dtypes = (operands.residual.dtype if dx else None, dy)
    return [None if d is None else torch.empty(shape, dtype=d, device=device) for d in dtypes]


@op("ada_norm_backward")
def ada_norm_backward(
    flat: list[Tensor | None], groups: int, dx: bool, dy: torch.dtype | None, sums: list[bool]
) -> list[Tensor]:
    """The backward op: those of dx', ``gate * dx'`` (in the dtype `dy`) and the sums of `launch_backward` that are
    needed.

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
def _fake_ada_norm_backward(
    flat: list[Tensor | None], groups: int, dx: bool, dy: torch.dtype | None, sums: list[bool]
) -> list[Tensor]:
    operands = BackwardOperands._make(flat)
    rows = _allocate_backward(operands, dx, dy)
    (B, _, D), stats = operands.residual.shape, operands.stats
    totals = [torch.empty((B, groups, D), dtype=stats.dtype, device=stats.device) for want in sums if want]
    return [*(v for v in rows if v is not None), *totals]


def _find_needed_gradients(
    ungated: bool, biased: bool, dtypes: AdaNormInputs, want: AdaNormInputs, affine: Sequence[bool]
) -> tuple[bool, list[bool]]:
    """Whether dx' is also the gradient of y, and which of dx', ``gate * dx'`` and the three sums are needed."""
    # Without a gate, and in one dtype, one tensor serves as both.
    y_is_x = ungated and dtypes.y is dtypes.x
    return y_is_x, [
        bool(want.x or (want.y and y_is_x)),
        bool(want.y and not y_is_x),
        # d scale is of what it multiplies, hat * weight + bias, and so needs the sum of grad for the bias.
        bool(want.shift or affine[1] or (want.scale and biased)),
        bool(want.scale or affine[0]),
        bool(want.gate),
    ]


def _compute_gradients(
    operands: BackwardOperands,
    bias: Tensor | None,
    groups: int,
    dtypes: AdaNormInputs,
    want: AdaNormInputs,
    affine: Sequence[bool],
) -> tuple[list[Tensor | None], tuple[Tensor | None, Tensor | None]]:
    """The gradients of a stream's fields, in order, and its contributions to those of weight and bias, (D,).

    `dtypes` and `want` hold each field's dtype and whether it needs a gradient; `affine`, whether weight and bias do.
    """
    y_is_x, needed_outputs = _find_needed_gradients(operands.gate is None, bias is not None, dtypes, want, affine)
    dy_dtype: Any = dtypes.y if needed_outputs[1] else None
    computed = iter(ada_norm_backward(list(operands), groups, needed_outputs[0], dy_dtype, needed_outputs[2:]))
    parts: list[Any] = [next(computed) if needed else None for needed in needed_outputs]
    dx, dy, ones, hats, dgate = parts
    # weight and bias are applied before the scale, so their gradients take each group's factor before groups are
    # summed.
    factor = 1 if operands.scale is None else 1 + operands.scale.to(operands.stats.dtype)
    shares = ((factor * hats).sum((0, 1)) if affine[0] else None, (factor * ones).sum((0, 1)) if affine[1] else None)
    sums = (dx if y_is_x else dy, ones, hats, dgate)
    return _order_by_field(dx, sums, (operands.weight, bias), dtypes, want), shares


def _order_by_field(
    dx: Any, gradient_parts: Sequence[Any], affine: Sequence[Tensor | None], dtypes: Sequence[Any], want: Sequence[Any]
) -> list[Tensor | None]:
    """The gradients of a stream's fields, in order, from dx', the gradient of y, and the three sums."""
    dy, ones, hats, dgate = gradient_parts
    weight, bias = affine
    if want[2]:  # of scale
        hats = hats if weight is None else hats * weight
        hats = hats if bias is None else hats + ones * bias
    rows = zip((dx, ones, hats, dy, dgate), dtypes, want, strict=True)
    return [(g if g.dtype is d else g.to(d)) if w else None for g, d, w in rows]


@dataclass(eq=False)
class _StreamPlan:
    """The prepared work on one stream, for operands of one layout that need no copies."""

    launch: Prepared
    fields: Layouts
    """The layouts of its fields, as in `AdaNormInputs`."""
    affine: Layouts
    stats: TensorLayout
    groups: int

    def backward(self, tensors: Sequence[Any], grads: Sequence[Any], want: tuple[bool, ...]) -> list[Tensor | None]:
        """Compute the gradients of the stream's fields.

        `tensors` are weight, bias, the stream's stats, x', y, gate and scale. `grads` are those of its part of
        `output_shape`, and of x'.
        """
        weight, bias, stats, residual, y, gate, scale = tensors
        grad, grad_residual = make_rows_contiguous(grads[0]), make_rows_contiguous(grads[1])
        of_residual = None if grad_residual is None else get_layout_tuple(grad_residual)
        plan = _build_backward_plan(self, want, get_layout_tuple(grad), of_residual)
        allocated = [None if m is None else grad.new_empty(m[0], dtype=m[1]) for m in plan.outputs]
        plan.launch(grad, grad_residual, residual, stats, y, gate, scale, weight, *allocated)
        dx, dy, *sums = allocated
        if plan.chunks > 1:
            sums = [None if p is None else sum_chunks(p, plan.chunks) for p in sums]
        sums_by_field = (dx if plan.y_is_x else dy, *sums)
        return _order_by_field(dx, sums_by_field, (weight, bias), plan.dtypes, want)


class _BackwardPlan(NamedTuple):
    """A stream's backward for gradients of one layout: outputs to allocate, with dtypes, and the launch that fills
    them.
    """

    launch: Prepared
    outputs: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
    chunks: int
    y_is_x: bool
    dtypes: AdaNormInputs


@functools.lru_cache(8192)
def _build_backward_plan(
    stream: _StreamPlan, wants: tuple[bool, ...], grad: PlainLayout, grad_residual: PlainLayout | None
) -> _BackwardPlan:
    """The plan for the needed gradients of the fields, given the layouts of the gradients of `output_shape` and x'."""
    of_grads = [None if v is None else TensorLayout._make(v) for v in (grad, grad_residual)]
    x, shift, scale, y, gate = stream.fields
    assert x is not None
    want: Any = AdaNormInputs._make(wants)
    dtypes: Any = AdaNormInputs._make([None if v is None else v.dtype for v in stream.fields])
    weight, bias = stream.affine
    y_is_x, needed = _find_needed_gradients(gate is None, bias is not None, dtypes, want, (False, False))
    (B, T, D), wide = x.shape, stream.stats.dtype
    count, chunks = programs(B * T, T // stream.groups, any(needed[2:]))
    tables = [v.shape for v in (shift, scale, gate) if v is not None]
    table = tables[0] if tables else (B, 1, D)
    shape = table if chunks == 1 else (*table[:-1], chunks, D)
    outputs: list[tuple[tuple[int, ...], Any]] = [(x.shape, x.dtype), (x.shape, dtypes.y)]
    outputs += [(shape, wide)] * 3
    needed_outputs = tuple([m if w else None for m, w in zip(outputs, needed, strict=True)])
    residual = x if y is None else x._replace(stride=(T * D, D, 1))
    launch = prepare_backward(
        (*of_grads, residual, y if want.gate else None, gate, scale),
        weight,
        stream.stats,
        stream.groups,
        count,
        tuple([None if m is None else m[1] for m in needed_outputs]),
    )
    return _BackwardPlan(launch, needed_outputs, chunks, y_is_x, dtypes)


class _Plan(NamedTuple):
    """The prepared work of a call, for operands of one layout that are valid and need no copies."""

    output_shape: tuple[int, ...]
    stats_shape: tuple[int, ...]
    wide: torch.dtype
    lengths: list[int]
    streams: tuple[_StreamPlan, ...]

    def run(
        self, weight: Tensor | None, bias: Tensor | None, flat: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Compute `output_shape` and each stream's x', and the tensors that `_AdaNorm` saves; `needs`: fields that
        need a gradient.
        """
        first_operand = flat[0]
        output = first_operand.new_empty(self.output_shape)
        stats = first_operand.new_empty(self.stats_shape, dtype=self.wide)
        outputs, saved = [output], [weight, bias, stats]
        rows, statistics = _split_by_stream(output, stats, self.lengths)
        for i, plan in enumerate(self.streams):
            x, shift, scale, y, gate = flat[5 * i : 5 * i + 5]
            residual = None if y is None else x.new_empty(x.shape)
            plan.launch(x, y, gate, shift, scale, weight, bias, residual, rows[i], statistics[i])
            outputs.append(x if residual is None else residual)
            saved += [outputs[-1], y if needs[5 * i + 4] else None, gate, scale]
        return outputs, saved


@functools.lru_cache(8192)
def _build_plan(norm: str, eps: float, layouts: tuple[PlainLayout | None, ...]) -> _Plan | None:
    """The plan for weight, bias and the fields of every stream in turn.

    None if an operand is invalid, needs a copy or is on another device, or if tables differ in their number of rows.
    """
    operands = tuple([None if v is None else TensorLayout._make(v) for v in layouts])
    # Without memory, to check shapes and strides as those of the operands themselves.
    tensors = [
        None if v is None else torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device="meta") for v in operands
    ]
    streams = _group_fields(tensors[2:])
    try:
        check_streams(streams, norm, {"weight": tensors[0], "bias": tensors[1]})
        wide = [expand_tables(stream, i) for i, stream in enumerate(streams)]
    except ValueError:
        return None  # the path without a plan raises the error
    if len({v.device for v in operands if v is not None}) > 1:
        return None
    if any(make_rows_contiguous(tensor) is not tensor for tensor in tensors):
        return None
    for stream, expanded in zip(streams, wide, strict=True):
        tables = [v for v in (stream.shift, stream.scale, stream.gate) if v is not None]
        if stream.x.numel() == 0 or len({table.shape for table in tables}) > 1:
            return None
        # As `expand_tables` returns them, or (B,D).
        if tables and tables[0].ndim != 2 and tables[0].shape[1] != expanded.groups():
            return None
    B, _, D = streams[0].x.shape
    lengths = [stream.x.shape[1] for stream in streams]
    dtype = accumulation_dtype(streams[0].x.dtype)
    stats = torch.empty((1 + (norm == "layer"), B, sum(lengths)), dtype=dtype, device="meta")
    plans = []
    for i, (stream, part) in enumerate(zip(wide, stats.split(lengths, 2), strict=True)):
        fields = operands[2 + 5 * i : 7 + 5 * i]
        x, shift, scale, y, gate = fields
        of_stats, groups = get_layout(part), stream.groups()
        rows = (x, y, gate, shift, scale)
        launch = prepare_forward(rows, operands[:2], of_stats, groups, eps)
        plans.append(_StreamPlan(launch, fields, operands[:2], of_stats, groups))
    return _Plan((B, sum(lengths), D), tuple(stats.shape), dtype, lengths, tuple(plans))


class _AdaNorm(torch.autograd.Function):
    """Both ops in one autograd node that also returns x, so that the gradient of its other use arrives in the kernel.

    `register_autograd` cannot do that: an op of torch.library must not return its input. With a plan for the operands
    the kernels are launched directly, without an op.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: bool,
        eps: float,
        plan: _Plan | None,
        weight: Tensor | None,
        bias: Tensor | None,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # None for an output not used, not zeros to be read
        ctx.plan = plan
        # x' is saved, not the normalised row: the caller keeps x' anyway, as the residual stream.
        if plan is not None:
            outputs, keep = plan.run(weight, bias, flat, ctx.needs_input_grad[5:])
            ctx.save_for_backward(*keep)
            return tuple(outputs)
        output, stats, *updates = ada_norm_forward(list(flat), weight, bias, layer, eps)
        updated = list(updates)  # torch 2.11's Dynamo makes a tuple of starred names
        streams, wants = _group_fields(flat), _group_fields(ctx.needs_input_grad[5:])
        residuals = [s.x if s.y is None else updated.pop(0) for s in streams]
        ctx.groups = [s.groups() for s in streams]
        ctx.dtypes = [None if v is None else v.dtype for v in flat]
        saved: list[Tensor | None] = [weight, bias, stats]
        for residual, stream, want in zip(residuals, streams, wants, strict=True):
            saved += [residual, stream.y if want.gate else None, stream.gate, stream.scale]
        ctx.save_for_backward(*saved)
        return (output, *residuals)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *grad_residuals: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, bias, stats, *saved = ctx.saved_tensors
        if grad is None:  # out was not used
            grad = torch.zeros_like(saved[0][:, :1, :1]).expand(*stats.shape[1:], saved[0].shape[2])
        grads: list[Tensor | None] = []
        if ctx.plan is not None:
            needs = ctx.needs_input_grad[5:]
            rows, statistics = _split_by_stream(grad, stats, ctx.plan.lengths)
            for i, plan in enumerate(ctx.plan.streams):
                tensors = (weight, bias, statistics[i], *saved[4 * i : 4 * i + 4])
                of_outputs = (rows[i], grad_residuals[i])
                grads += plan.backward(tensors, of_outputs, needs[5 * i : 5 * i + 5])
            return (None, None, None, None, None, *grads)
        affine, wants = ctx.needs_input_grad[3:5], _group_fields(ctx.needs_input_grad[5:])
        shares: list[tuple[Any, Any]] = []
        by_stream = _split_by_stream(grad, stats, [residual.shape[1] for residual in saved[::4]])
        for i, want in enumerate(wants):
            residual, y, gate, scale = saved[4 * i : 4 * i + 4]
            operands = BackwardOperands(
                by_stream[0][i], grad_residuals[i], residual, by_stream[1][i], y, gate, scale, weight
            )  # fmt: skip
            dtypes = AdaNormInputs._make(ctx.dtypes[5 * i : 5 * i + 5])
            stream_grads, share = _compute_gradients(operands, bias, ctx.groups[i], dtypes, want, affine)
            grads += stream_grads
            shares.append(share)
        dweight = dbias = None
        if affine[0]:
            dweight = torch.stack([of_weight for of_weight, _ in shares]).sum(0).to(weight.dtype)
        if affine[1]:
            dbias = torch.stack([of_bias for _, of_bias in shares]).sum(0).to(bias.dtype)
        return (None, None, None, dweight, dbias, *grads)


def _describe(tensor: Tensor) -> str:
    """A tensor's shape, dtype and device, for an error message."""
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def check_streams(streams: Sequence[AdaNormInputs], norm: str, affine: dict[str, Tensor | None]) -> None:
    """Raise a ValueError that names the invalid operand: the norm, a stream's rows, weight or bias."""
    if norm not in ("layer", "rms"):
        raise ValueError(f"norm must be 'layer' or 'rms', got {norm!r}")
    if not streams:
        raise ValueError("ada_norm needs at least one stream, got none")
    first_x = streams[0].x
    for i, (x, _, _, y, gate) in enumerate(streams):
        fits_first = x.dtype is first_x.dtype and x.device == first_x.device
        if x.ndim != 3 or not x.is_floating_point() or x.shape[::2] != first_x.shape[::2] or not fits_first:
            raise ValueError(
                f"x of stream {i} must be floating (B,T,D), with the B, D, dtype and device of stream 0: "
                f"got {_describe(x)} beside {_describe(first_x)}"
            )
        if y is not None and y.shape != x.shape:
            raise ValueError(f"y of stream {i} must have the shape of x {tuple(x.shape)}, got {_describe(y)}")
        if gate is not None and y is None:
            raise ValueError(f"gate of stream {i} multiplies y, and there is no y")
    for name, vector in affine.items():
        if vector is not None and vector.shape != first_x.shape[2:]:
            raise ValueError(f"{name} must be ({first_x.shape[2]},), got {_describe(vector)}")


def expand_tables(stream: AdaNormInputs, position: int) -> AdaNormInputs:
    """The stream with every table as (B,G,D), with one G.

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
    streams: Sequence[AdaNormInputs],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Literal["layer", "rms"],
    eps: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute ``norm(x + gate * y) * (1 + scale) + shift`` of each stream, into one buffer (B, sum of T, D).

    The other results are each stream's ``x + gate * y`` (the memory of x if it has no y), both in x's dtype. Continue
    with the x returned here: then the gradient of its other use is added in this op's backward, without a separate
    pass. weight and bias are (D,); each operand may have its own float dtype and strides. Raises ValueError for shapes
    that do not fit. Source: diffusers CogVideoXLayerNormZero and AdaLayerNormZero, and blocks of Sana, Wan and LTX.
    """
    flat = [field for stream in streams for field in stream]
    layer = norm == "layer"
    plan = None if torch.compiler.is_compiling() else _find_plan(norm, eps, weight, bias, flat)
    if plan is None:
        check_streams(streams, norm, {"weight": weight, "bias": bias})
        flat = [field for i, stream in enumerate(streams) for field in expand_tables(stream, i)]
        output, *residuals = _AdaNorm.apply(layer, eps, None, weight, bias, *flat)
    else:
        output, *residuals = apply_plainly(_AdaNorm, layer, eps, plan, weight, bias, *flat)
    return output, tuple(residuals)


def _find_plan(norm: str, eps: float, weight: Tensor | None, bias: Tensor | None, flat: list[Any]) -> _Plan | None:
    """The plan for these operands; None if ops must be called, because tracing would not see a plain launch."""
    if not flat or not launches(flat[0]):
        return None
    if (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad):
        return None
    layouts = get_plain_layouts((weight, bias, *flat))
    return None if layouts is None else _build_plan(norm, eps, layouts)
