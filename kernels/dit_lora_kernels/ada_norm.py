"""Adaptive norm with the gated residual before it: ``out = norm(x') * (1 + scale) + shift``, ``x' = x + gate * y``.

The norm is LayerNorm or RMSNorm over the D channels, then ``* weight + bias`` if they are passed. y, gate, scale and
shift are optional. Several streams may write into one joint buffer, in the order in which they are passed.

Shapes: B batch, T tokens of a stream, S tokens of all streams, D channels, G groups of a sample's tokens.

Terms of this module and of ada_norm_kernels.py:

- Stream: one sequence of tokens, such as the text or the video in a joint attention. Its fields are the five tensors
  of `AdaNormInputs`: x, shift, scale, y and gate.
- x': the updated residual stream ``x + gate * y``, called `residual` in the code. Without a y it is x itself.
- Row: the D channels of one token. x_hat is the normalised row, before weight and bias (`hat` in the code).
- Tables: shift, scale and gate. Each has one row of D numbers for every group.
- Group: consecutive tokens of one sample that share a row of the tables. Token t uses row ``t // (T // G)``: with
  G = 1 there is one row per sample, with G = T one row per token.
- Statistics (`stats`): rstd = ``1 / sqrt(variance + eps)`` of each row and, for LayerNorm, its mean. RMSNorm takes the
  mean square for the variance.
- grad is the gradient of out, dx' that of x', and ``dy = gate * dx'`` that of y.
- The three sums: over the tokens of each group, the sum of grad (for shift and bias), of ``grad * x_hat`` (for scale
  and weight) and of ``dx' * y`` (for gate). The code calls them ones, hats and dgate.
- Layout: a tensor's dtype, shape, strides and device. Plan: the output shapes and prepared kernel launches for
  operands of one layout. It is computed once and cached.

Source: adaLN-Zero, https://arxiv.org/abs/2212.09748 section 3.2; LayerNorm https://arxiv.org/abs/1607.06450; RMSNorm
https://arxiv.org/abs/1910.07467.

Memory traffic, with u = B*S*D elements. Tables are not counted, because they stay in the L2 cache while G is far below
T. The forward reads x and writes out, 2u; with y it reads x and y and writes x' and out, 4u. The backward reads x',
its gradient and that of out, and writes dx, 4u; with gate*y it also writes dy, 5u; if the gate is trained it also
reads y, 6u. The backward needs x', which the caller keeps anyway as the residual stream, and 4 or 8 bytes per row.
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


def _expand_modulation_table(table: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Repeat each row of a modulation table (B, D) or (B, G, D) for every token of its group; (B, T, D) in `dtype`."""
    table = table[:, None] if table.ndim == 2 else table
    return table.to(dtype).repeat_interleave(tokens // max(table.shape[1], 1), dim=1)


def ada_norm_reference(
    stream: AdaNormInputs, weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one stream's adaptive norm in plain torch, as the reference for the kernel.

    Returns the output ``norm(x') * (1 + scale) + shift`` and the updated stream ``x' = x + gate * y``, both (B, T, D),
    and the statistics of the rows of x': rstd (1, B, T), or rstd and mean (2, B, T) for LayerNorm (`layer`).

    It computes in fp32 (fp64 for fp64 inputs), and rounds the output and x' once each, to x's dtype. The norm is that
    of the rounded x', because the backward and the rest of the model see only the rounded values.
    """
    x, shift, scale, y, gate = stream
    wide, tokens, residual = accumulation_dtype(x.dtype), x.shape[1], x
    if y is not None:
        update = y.to(wide)
        if gate is not None:
            update = _expand_modulation_table(gate, tokens, wide) * update
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
        output = output * (1 + _expand_modulation_table(scale, tokens, wide))
    if shift is not None:
        output = output + _expand_modulation_table(shift, tokens, wide)
    stats = torch.cat([rstd, mean], -1) if layer else rstd
    return output.to(x.dtype), residual, stats.movedim(-1, 0)


def _backward_reference(operands: BackwardOperands, groups: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute one stream's gradients of the adaptive norm in plain torch, as the reference for the kernel.

    Uses fp32 (fp64 for fp64).

    Returns dx', the gradient of ``x' = x + gate * y``, including that of its use elsewhere; ``gate * dx'``, the
    gradient of y; and a list of three sums over the tokens of each group, each (B, G, D): of grad, of ``grad * x_hat``
    and of ``dx' * y``. Here grad is the gradient of the output, and x_hat the normalised row.
    """
    grad, grad_residual, residual, stats, y, gate, scale, weight = operands
    wide, (B, T, D) = stats.dtype, residual.shape
    grad, rstd = grad.to(wide), stats[0][..., None]
    layer = stats.shape[0] == 2
    hat = (residual.to(wide) - (stats[1][..., None] if layer else 0)) * rstd
    dhat = grad
    if weight is not None:
        dhat = dhat * weight.to(wide)
    if scale is not None:
        dhat = dhat * (1 + _expand_modulation_table(scale, T, wide))
    dx = dhat - hat * (dhat * hat).mean(-1, keepdim=True)
    if layer:
        dx = dx - dhat.mean(-1, keepdim=True)
    dx = dx * rstd
    if grad_residual is not None:
        dx = dx + grad_residual.to(wide)
    dy = dx if gate is None else dx * _expand_modulation_table(gate, T, wide)
    gated = dx if y is None else dx * y.to(wide)
    sums = [v.reshape(B, groups, T // groups, D).sum(2) for v in (grad, grad * hat, gated)]
    return dx, dy, sums


# 2. op


def _group_fields(flat: Sequence[Any]) -> list[AdaNormInputs]:
    """Split a flat list (x, shift, scale, y, gate of each stream in order) into one `AdaNormInputs` per stream."""
    size = len(AdaNormInputs._fields)
    return [AdaNormInputs._make(flat[i : i + size]) for i in range(0, len(flat), size)]


def _allocate_forward(streams: Sequence[AdaNormInputs], layer: bool) -> list[Tensor]:
    """Allocate the outputs of the forward op: the joint output, the statistics of its rows, and the updated streams.

    Returns the joint output (B, S, D); the statistics (1 or 2, B, S), which are rstd and for LayerNorm also the mean;
    and, for each stream that has a y, a buffer (B, T, D) for ``x' = x + gate * y``.
    """
    x = streams[0].x
    tokens = sum(stream.x.shape[1] for stream in streams)
    output = torch.empty((x.shape[0], tokens, x.shape[2]), dtype=x.dtype, device=x.device)
    stats = torch.empty((1 + layer, x.shape[0], tokens), dtype=accumulation_dtype(x.dtype), device=x.device)
    gated = [stream.x.shape for stream in streams if stream.y is not None]
    return [output, stats, *(torch.empty(shape, dtype=x.dtype, device=x.device) for shape in gated)]


def _split_by_stream(joint: Tensor, stats: Tensor, lengths: list[int]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Split a joint tensor (B, S, D) and its row statistics (1 or 2, B, S) into views of each stream's tokens.

    `lengths` has each stream's number of tokens.
    """
    if len(lengths) == 1:  # the usual case: a view of the whole would only take time
        return (joint,), (stats,)
    return joint.split_with_sizes(lengths, 1), stats.split_with_sizes(lengths, 2)


@op("ada_norm")
def ada_norm_forward(
    flat: list[Tensor | None], weight: Tensor | None, bias: Tensor | None, layer: bool, eps: float
) -> list[Tensor]:
    """Compute the adaptive norm of all streams; this is the forward op.

    `flat` holds x, shift, scale, y and gate of the first stream, then those of the next, None for a missing tensor.
    `layer` is True for LayerNorm, False for RMSNorm. Returns the joint output (B, S, D); the row statistics
    (1 or 2, B, S), which are rstd and for LayerNorm also the mean; and the updated ``x' = x + gate * y`` (B, T, D) of
    every stream that has a y.
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
    """Allocate buffers (B, T, D) for the gradients of one stream's ``x' = x + gate * y`` and y.

    `dx` says whether dx', the gradient of x', is needed. `dy` is the dtype of ``gate * dx'``, the gradient of y, or
    None if it is not needed. None is returned in place of a buffer that is not needed.
    """
    shape, device = operands.residual.shape, operands.residual.device
    dtypes = (operands.residual.dtype if dx else None, dy)
    return [None if d is None else torch.empty(shape, dtype=d, device=device) for d in dtypes]


@op("ada_norm_backward")
def ada_norm_backward(
    flat: list[Tensor | None], groups: int, dx: bool, dy: torch.dtype | None, sums: list[bool]
) -> list[Tensor]:
    """Compute the gradients of one token stream (video or text) of the adaptive norm; this is the backward op.

    Args:
        flat: The tensors of `BackwardOperands`, in the order of its fields.
        groups: G, the number of groups per sample; the tokens of a group share a row of each table.
        dx: Whether dx', the gradient of ``x' = x + gate * y``, is needed.
        dy: The dtype of ``gate * dx'``, the gradient of y; None if it is not needed.
        sums: Which of the three sums over each group's tokens are needed; `launch_backward` lists them.

    Returns:
        dx' and ``gate * dx'``, both (B, T, D), and the sums (B, G, D), in this order, without those not needed.
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
    """Find which results of the backward op are needed for the gradients that autograd asks for.

    Args:
        ungated: True if the stream has no gate.
        biased: True if the norm has a bias.
        dtypes: The dtypes of x, shift, scale, y and gate.
        want: Whether each of these five needs a gradient.
        affine: Whether weight and bias need a gradient.

    Returns:
        (shared, needed). `shared` is True if dx', the gradient of ``x' = x + gate * y``, is also the gradient of y.
        `needed` says which of five results are needed: dx', ``gate * dx'``, and the sums over each group's tokens of
        grad (the gradient of the output), of ``grad * x_hat`` (x_hat is the normalised row) and of ``dx' * y``.
    """
    # Without a gate, and in one dtype, one tensor serves as both gradients.
    y_is_x = ungated and dtypes.y is dtypes.x
    return y_is_x, [
        bool(want.x or (want.y and y_is_x)),
        bool(want.y and not y_is_x),
        # The scale multiplies x_hat * weight + bias, so with a bias its gradient also needs the sum of grad.
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
    """Compute the gradients of one stream's x, shift, scale, y and gate, and its share of those of weight and bias.

    `dtypes` and `want` hold the dtype of each of the five tensors and whether it needs a gradient. `affine` says
    whether weight and bias need one. Returns five gradients, None for one that is not needed, and the two shares (D,),
    which the caller adds up over the streams.
    """
    y_is_x, needed_outputs = _find_needed_gradients(operands.gate is None, bias is not None, dtypes, want, affine)
    dy_dtype: Any = dtypes.y if needed_outputs[1] else None
    computed = iter(ada_norm_backward(list(operands), groups, needed_outputs[0], dy_dtype, needed_outputs[2:]))
    parts: list[Any] = [next(computed) if needed else None for needed in needed_outputs]
    dx, dy, ones, hats, dgate = parts
    # weight and bias are applied before the scale, so each group's sum is multiplied by its 1 + scale before the
    # groups are summed.
    factor = 1 if operands.scale is None else 1 + operands.scale.to(operands.stats.dtype)
    shares = ((factor * hats).sum((0, 1)) if affine[0] else None, (factor * ones).sum((0, 1)) if affine[1] else None)
    sums = (dx if y_is_x else dy, ones, hats, dgate)
    return _order_by_field(dx, sums, (operands.weight, bias), dtypes, want), shares


def _order_by_field(
    dx: Any, gradient_parts: Sequence[Any], affine: Sequence[Tensor | None], dtypes: Sequence[Any], want: Sequence[Any]
) -> list[Tensor | None]:
    """List the gradients of one stream's x, shift, scale, y and gate, in this order, each in its tensor's dtype.

    `dx` is the gradient of x. `gradient_parts` are the gradient of y and three sums over each group's tokens: of grad
    (the gradient of the output), of ``grad * x_hat`` (x_hat is the normalised row) and of ``dx' * y`` (dx' is the
    gradient of ``x' = x + gate * y``). `affine` is weight and bias, which the gradient of scale depends on. A gradient
    that `want` does not ask for is None.
    """
    dy, ones, hats, dgate = gradient_parts
    weight, bias = affine
    if want[2]:  # of scale
        hats = hats if weight is None else hats * weight
        hats = hats if bias is None else hats + ones * bias
    rows = zip((dx, ones, hats, dy, dgate), dtypes, want, strict=True)
    return [(g if g.dtype is d else g.to(d)) if w else None for g, d, w in rows]


@dataclass(eq=False)
class _StreamPlan:
    """The cached preparation of one stream: its forward launch, and the layouts that its backward is prepared from.

    It serves operands of one layout (dtype, shape, strides and device) that need no copies.
    """

    launch: Prepared
    fields: Layouts
    """The layouts of x, shift, scale, y and gate; None for a missing tensor."""
    affine: Layouts
    stats: TensorLayout
    groups: int

    def backward(self, tensors: Sequence[Any], grads: Sequence[Any], want: tuple[bool, ...]) -> list[Tensor | None]:
        """Compute the gradients of the stream's x, shift, scale, y and gate.

        Args:
            tensors: weight, bias, the stream's row statistics, the updated ``x' = x + gate * y``, y, gate and scale.
            grads: The gradients of the stream's part of the output, and of x' (None if x' was not used elsewhere).
            want: Whether each of the five needs a gradient.

        Returns:
            Five gradients, None for one that is not needed.
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
    """The cached preparation of one stream's backward, for gradients of one layout: its kernel launch and its outputs.

    `outputs` has the shape and dtype of each tensor to allocate, or None for one that is not needed: dx' (the gradient
    of ``x' = x + gate * y``), ``gate * dx'``, and three sums over each group's tokens. `chunks` is the number of
    programs that share a group: if there are several, each stores its own row of a sum, and the rows are added up
    later. `y_is_x` is True if dx' is also the gradient of y. `dtypes` are those of x, shift, scale, y and gate.
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
    """Build the plan of one stream's backward (buffers and launch arguments) for gradients of one layout. Cached.

    `wants` says whether x, shift, scale, y and gate need a gradient. `grad` is the layout of the gradient of the
    output. `grad_residual` is that of the gradient of the updated ``x' = x + gate * y``; it is None if x' was not used
    elsewhere.
    """
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
    """The cached preparation of a whole call: the shapes of its joint outputs, and the plan of each stream.

    It serves operands of one layout (dtype, shape, strides and device) that are valid and need no copies. `wide` is
    the dtype of the row statistics, and `lengths` holds each stream's number of tokens.
    """

    output_shape: tuple[int, ...]
    stats_shape: tuple[int, ...]
    wide: torch.dtype
    lengths: list[int]
    streams: tuple[_StreamPlan, ...]

    def run(
        self, weight: Tensor | None, bias: Tensor | None, flat: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Launch the forward kernel of every stream.

        `flat` holds x, shift, scale, y and gate of the first stream, then those of the next, None for a missing
        tensor. `needs` says which of them need a gradient. Returns a list of the joint output and of each stream's
        updated ``x + gate * y``, and a list of the tensors to save for the backward.
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
    """Build the launch plan (grid, kernel options) of an adaptive norm from its operands' layouts. Cached.

    `layouts` are those of weight, bias, and x, shift, scale, y and gate of the first stream, then of the next. Returns
    None if an operand is invalid, empty, needs a copy or is on another device, or if a stream's tables (shift, scale
    and gate) differ in their number of rows.
    """
    operands = tuple([None if v is None else TensorLayout._make(v) for v in layouts])
    # Tensors without memory, whose shapes and strides the functions for real operands can check.
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
    """Autograd function of the forward and the backward op, which also returns each stream's ``x' = x + gate * y``.

    The model continues with the x' returned here. The gradient of that use therefore arrives in this backward, whose
    kernel adds it. `register_autograd` cannot do that: without a y, x' is the input x, and an op of torch.library must
    not return its input. If a plan for the operands is passed, the kernels are launched directly, without an op.
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
        ctx.set_materialize_grads(False)  # None, and not zeros that must be read, for an output that is not used
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
    """Format a tensor's shape, dtype and device for an error message."""
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def check_streams(streams: Sequence[AdaNormInputs], norm: str, affine: dict[str, Tensor | None]) -> None:
    """Raise a ValueError that names the invalid operand, if there is one.

    The function checks `norm`, that x, y and gate of every stream fit together, and the shapes of weight and bias,
    which `affine` holds by name. `expand_tables` checks the tables.
    """
    if norm not in ("layer", "rms"):
        raise ValueError(f"norm must be 'layer' or 'rms'; got {norm!r}")
    if not streams:
        raise ValueError("joint_ada_norm needs at least one stream; got none")
    first_x = streams[0].x
    for i, (x, _, _, y, gate) in enumerate(streams):
        fits_first = x.dtype is first_x.dtype and x.device == first_x.device
        if x.ndim != 3 or not x.is_floating_point() or x.shape[::2] != first_x.shape[::2] or not fits_first:
            raise ValueError(
                f"x of stream {i} must be floating-point (B, T, D), with the B, D, dtype and device of stream 0; "
                f"got {_describe(x)}, and {_describe(first_x)} for stream 0"
            )
        if y is not None and y.shape != x.shape:
            raise ValueError(f"y of stream {i} must have the shape of x, {tuple(x.shape)}; got {_describe(y)}")
        if gate is not None and y is None:
            raise ValueError(f"gate of stream {i} needs y, which is None")
    for name, vector in affine.items():
        if vector is not None and vector.shape != first_x.shape[2:]:
            raise ValueError(f"{name} must be ({first_x.shape[2]},); got {_describe(vector)}")


def expand_tables(stream: AdaNormInputs, position: int) -> AdaNormInputs:
    """Expand the stream's tables (shift, scale and gate) to (B, G, D), with the same G in each.

    A table (B, D) or (B, 1, D) has one row for all tokens, which is repeated as a view. `position` is the stream's
    number in error messages. Raises ValueError for a table of another shape, or a G that does not divide the number of
    tokens T.
    """
    B, T, D = stream.x.shape
    fields = {"shift": stream.shift, "scale": stream.scale, "gate": stream.gate}
    tables = {k: v[:, None] if v.ndim == 2 else v for k, v in fields.items() if v is not None}
    groups = max([1, *(v.shape[1] for v in tables.values() if v.ndim == 3)])
    for name, table in tables.items():
        fits = table.ndim == 3 and (table.shape[0], table.shape[2]) == (B, D)
        if not fits or table.shape[1] not in (1, groups) or T % groups:
            raise ValueError(
                f"{name} of stream {position} must be (B, D) or (B, G, D) with B={B} and D={D}; G must divide T={T} "
                f"and be 1 or the same in all tables; got {_describe(table)}"
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
    """Compute ``norm(x + gate * y) * (1 + scale) + shift`` of each stream, all into one buffer.

    Continue the model with the updated x that is returned here. The gradient of its other use is then added in this
    op's backward, without a separate pass. Every operand may have its own floating dtype and its own strides.

    Source: diffusers CogVideoXLayerNormZero and AdaLayerNormZero, and the blocks of Sana, Wan and LTX.

    Args:
        streams: The sequences of tokens, each with x and optional y, gate, scale and shift (see `AdaNormInputs`). They
            have one B, D, dtype of x and device.
        weight: (D,), multiplies the normalised rows; None for a norm without it.
        bias: (D,), is added to them; None for a norm without it.
        norm: LayerNorm or RMSNorm, over the last dimension.
        eps: Added to the variance (or the mean square) before the square root.

    Returns:
        The output (B, sum of T, D), with the streams' tokens in order, and a tuple of each stream's ``x + gate * y``
        (B, T, D), which is x itself for a stream without a y. All are in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or a gate is passed without a y.
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
    """Look up or build the plan (output shapes and prepared launches) of this call; None if the ops must be called.

    They must be called if something traces the call, which would not see a plain kernel launch; if weight or bias
    needs a gradient; or if `_build_plan` finds no plan. `flat` holds x, shift, scale, y and gate of every stream.
    """
    if not flat or not launches(flat[0]):
        return None
    if (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad):
        return None
    layouts = get_plain_layouts((weight, bias, *flat))
    return None if layouts is None else _build_plan(norm, eps, layouts)
