"""Triton kernels of `ada_norm` and their launches, each prepared once for operands of one layout.

Layout means dtype, shape, strides and device. Shapes are those of ada_norm.py: B samples, T tokens of a stream, S
tokens of all streams, D channels, G groups per sample, L tokens per group. A group is a run of consecutive tokens that
share one row of each table; the tables are shift, scale and gate.

x' is the updated stream ``x + gate * y`` (`residual`), grad the gradient of the output, dx' that of x', ``dy = gate *
dx'`` that of y, and x_hat the normalised row (`hat`). The backward also sums over the tokens of each group: grad
(`ones`), ``grad * x_hat`` (`hats`) and ``dx' * y`` (`dgate`). Several programs may share a group: each takes a chunk
of its tokens and stores one row of partial sums.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dit_lora_kernels.support import (
    Prepared,
    TensorLayout,
    accumulation_triton_dtype,
    cdiv,
    get_layout,
    get_row_block,
    get_row_block_options,
    make_contiguous,
    make_rows_contiguous,
    tl,
    triton,
)

# A program that sums a table's gradient takes up to 32 rows, where its fp32 partials are 4% of its bytes, and fewer
# where that would leave an H100's 132 multiprocessors fewer than about 4 programs each.
MAX_ROWS = 32
MIN_PROGRAMS = 512
Layouts = tuple[TensorLayout | None, ...]


class AdaNormInputs(NamedTuple):
    """The tensors of one stream of tokens: x, y, and the tables shift, scale and gate.

    x and y are (B, T, D), a table is (B, G, D) or (B, D). The op computes ``norm(x + gate * y) * (1 + scale) +
    shift``. A table has one row of D channels for each of G groups of consecutive tokens, where G divides T; (B, D) is
    one row for all tokens of a sample.
    """

    x: Tensor
    shift: Tensor | None = None
    scale: Tensor | None = None
    y: Tensor | None = None
    gate: Tensor | None = None

    def groups(self) -> int:
        """Number of rows that each table has per sample, G; 1 if there is no table."""
        tables = (self.shift, self.scale, self.gate)
        return next((table.shape[1] for table in tables if table is not None), 1)


class BackwardOperands(NamedTuple):
    """The tensors that the backward of one stream reads.

    `grad` is the gradient of the output; `residual` is the updated stream ``x + gate * y``; and `grad_residual` is the
    gradient of its use elsewhere, or None. These and y are (B, T, D). gate and scale are (B, G, D), weight is (D,).
    `stats` (1 or 2, B, T) holds rstd and for LayerNorm also the mean of each row of `residual`.
    """

    grad: Tensor
    grad_residual: Tensor | None
    residual: Tensor
    stats: Tensor
    y: Tensor | None
    gate: Tensor | None
    scale: Tensor | None
    weight: Tensor | None


# Forward: a program takes one row in one block of BLOCK_D >= D channels. The row is read once and stays in registers
# for both reductions, the mean and then the variance, which moments taken together would lose to cancellation.
# Numbers of rows and programs are int64: a row's offset, row * D, passes 2^31 at 700 thousand rows of 3072.


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, gate_ptr, shift_ptr, scale_ptr, weight_ptr, bias_ptr,
    residual_ptr, out_ptr, rstd_ptr,
    x_b, x_t, y_b, y_t, gate_b, gate_g, shift_b, shift_g, scale_b, scale_g,
    T, L, S, D, MEAN,
    LAYER: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr,
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

    # The joint output and the statistics have S tokens per sample; their pointers are at this stream's first token.
    # LayerNorm's means are stored MEAN elements after rstd.
    if LAYER:
        mean = tl.sum(x, axis=0) / D
        tl.store(rstd_ptr + MEAN + b * S + t, mean)
        x = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + EPS)
    tl.store(rstd_ptr + b * S + t, rstd)

    output = x * rstd
    if weight_ptr is not None:
        output = output * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(ACC)
    if bias_ptr is not None:
        output = output + tl.load(bias_ptr + columns, mask=inside, other=0.0).to(ACC)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + b * scale_b + g * scale_g + columns, mask=inside, other=0.0)
        output = output * (1.0 + scale.to(ACC))
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + b * shift_b + g * shift_g + columns, mask=inside, other=0.0)
        output = output + shift.to(ACC)
    output = output.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (b * S + t) * D + columns, output, mask=inside)


@triton.jit
def _factor(
    scale_ptr, weight_ptr, b, g, scale_b, scale_g, columns, channel,
    ACC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute ``(1 + scale) * weight`` (BLOCK_D,) for group g of sample b; a missing tensor counts as no factor."""
    factor = tl.full((BLOCK_D,), 1.0, ACC)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + b * scale_b + g * scale_g + columns, mask=channel, other=0.0)
        factor += scale.to(ACC)
    if weight_ptr is not None:
        factor *= tl.load(weight_ptr + columns, mask=channel, other=0.0).to(ACC)
    return factor


# Backward: a program takes up to ROWS tokens of one group, which share a row of each table. Sums over them stay in
# registers and are stored once, a row of partials a program: no atomics, so the same bits every time.
# With x_hat (`hat`) the normalised row, factor = (1 + scale) * weight and dhat = grad * factor:
# dx' = rstd * (dhat - x_hat * mean(dhat * x_hat) - mean(dhat)), the last mean only for LayerNorm. Then the gradient of
# the other use of x' is added. Three sums are stored: `ones` of grad, for the gradients of shift and bias; `hats` of
# grad * x_hat, for those of scale and weight; and `dgate` of dx' * y, for that of gate.
# A row past the group's end loads zeros, so that it adds nothing to the sums, and stores nothing.


@triton.jit
def _backward_kernel(
    grad_ptr, grad_residual_ptr, residual_ptr, rstd_ptr, y_ptr, gate_ptr, scale_ptr, weight_ptr,
    dx_ptr, dy_ptr, ones_ptr, hats_ptr, dgate_ptr,
    grad_b, grad_t, grad_residual_b, grad_residual_t, residual_b, residual_t, y_b, y_t,
    gate_b, gate_g, scale_b, scale_g,
    T, G, L, S, D, CHUNKS, MEAN,
    LAYER: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    first_row = program % CHUNKS * ROWS
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
        exists = first_row + i < L
        inside = columns < tl.where(exists, D, 0)
        t = g * L + first_row + i
        grad = tl.load(grad_ptr + b * grad_b + t * grad_t + columns, mask=inside, other=0.0).to(ACC)
        row = residual_ptr + b * residual_b + t * residual_t
        x = tl.load(row + columns, mask=inside, other=0.0).to(ACC)
        rstd = tl.load(rstd_ptr + b * S + t, mask=exists, other=0.0)
        if LAYER:
            mean = tl.load(rstd_ptr + MEAN + b * S + t, mask=exists, other=0.0)
            x = tl.where(inside, x - mean, 0.0)
        hat = x * rstd
        if ones_ptr is not None:
            ones += grad
        if hats_ptr is not None:
            hats += grad * hat
        dhat = grad * factor
        dx = dhat - hat * (tl.sum(dhat * hat, axis=0) / D)
        if LAYER:
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

    if ones_ptr is not None:
        tl.store(ones_ptr + program * D + columns, ones, mask=channel)
    if hats_ptr is not None:
        tl.store(hats_ptr + program * D + columns, hats, mask=channel)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + program * D + columns, dgate, mask=channel)


def _list_strides(layouts: Layouts) -> list[int]:
    """List two strides per layout, between samples and between rows; zeros for a missing tensor, which is not read."""
    strides: list[int] = []
    for layout in layouts:
        # A table (B, D) has one row per sample, so its stride between rows is 0.
        strides += (0, 0) if layout is None else [*layout.stride[:-1], 0][:2]
    return strides


@functools.lru_cache(8192)
def prepare_forward(rows: Layouts, affine: Layouts, stats: TensorLayout, groups: int, eps: float) -> Prepared:
    """Prepare the forward launch of one stream; the result is cached.

    `rows` are the layouts of x, y, gate, shift and scale, `affine` those of weight and bias, and `stats` that of the
    stream's row statistics. Call the result with these seven tensors (without the statistics), a buffer (B, T, D) for
    ``x + gate * y`` or None, and the stream's tokens of the joint output (B, S, D) and of the statistics (1 or 2, B,
    S).
    """
    x = rows[0]
    assert x is not None
    del affine  # only part of the cache key: their dtypes select the launch
    B, T, D = x.shape
    numbers = (*_list_strides(rows), T, T // groups, stats.stride[1], D, stats.stride[0])
    constants = {
        "LAYER": stats.shape[0] == 2,
        "EPS": eps,
        "ACC": accumulation_triton_dtype(x.dtype),
        **get_row_block(D),
    }
    return Prepared(_forward_kernel, (B * T,), numbers, constants)


def compute_rows_per_program(rows: int, length: int) -> int:
    """Compute how many tokens of a group one program of the backward sums, if there are `rows` tokens in all.

    The number is a power of two, at most `length`, the tokens of a group, and as large as possible while enough
    programs keep the GPU busy.
    """
    # A power of two, because each number compiles another kernel.
    max_count = max(min(MAX_ROWS, length, rows // MIN_PROGRAMS), 1)
    return 1 << (max_count.bit_length() - 1)


@functools.lru_cache(8192)
def prepare_backward(
    rows: Layouts,
    weight: TensorLayout | None,
    stats: TensorLayout,
    groups: int,
    count: int,
    output_dtypes: tuple[torch.dtype | None, ...],
) -> Prepared:
    """Prepare the backward launch of one stream; the result is cached.

    `rows` are the layouts of grad (the gradient of the output), grad_residual (that of x' from its use elsewhere),
    ``x' = x + gate * y``, y, gate and scale. `stats` is the layout of the row statistics. `count` is the number of
    rows, of one group of tokens, that a program takes.

    Call the result with grad, grad_residual, x', the statistics, y, gate, scale, weight and five outputs, of the
    dtypes `output_dtypes`, None for one that is not needed: the gradients of x' and of y (B, T, D), and the sums over
    tokens of grad, of grad times the normalised row, and of the gradient of x' times y. Each sum has one row of D per
    program.
    """
    residual = rows[2]
    assert residual is not None
    B, T, D = residual.shape
    length = T // groups
    chunks = cdiv(length, count)  # programs per group; the last one may have unused rows
    strides = (stats.stride[1], D, chunks, stats.stride[0])
    numbers = (*_list_strides(rows), T, groups, length, *strides)
    constants: dict[str, Any] = {
        "LAYER": stats.shape[0] == 2,
        "ROWS": count,
        "ACC": accumulation_triton_dtype(residual.dtype),
        **get_row_block_options(D, residual.dtype, any(output_dtypes[2:])),
    }
    return Prepared(_backward_kernel, (B * groups * chunks,), numbers, constants)


def _get_layouts(tensors: Sequence[Tensor | None]) -> Layouts:
    return tuple([None if tensor is None else get_layout(tensor) for tensor in tensors])


def launch_forward(
    stream: AdaNormInputs,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    output: Tensor,
    stats: Tensor,
    eps: float,
) -> None:
    """Compute the forward of one stream: fill `output` and `stats`, and `residual` if the stream has a y.

    `output` (B, T, D) and `stats` (1 or 2, B, T) are the stream's slices of joint buffers. `stats` takes rstd of each
    row, and its mean for LayerNorm, which is chosen by the 2. `residual` (B, T, D) takes ``x + gate * y``.
    """
    if stream.x.numel() == 0:
        return
    # In the order of the kernel's arguments.
    ordered = (stream.x, stream.y, stream.gate, stream.shift, stream.scale)
    rows = [make_rows_contiguous(tensor) for tensor in ordered]
    affine = [make_contiguous(weight), make_contiguous(bias)]
    launch = prepare_forward(_get_layouts(rows), _get_layouts(affine), get_layout(stats), stream.groups(), eps)
    launch(*rows, *affine, residual, output, stats)


def launch_backward(
    operands: BackwardOperands, rows: Sequence[Tensor | None], groups: int, needed_sums: Sequence[bool]
) -> list[Tensor | None]:
    """Compute the gradients of one stream: fill `rows`, and return the needed sums over each group's tokens.

    `rows` are buffers (B, T, D) for dx', the gradient of ``x' = x + gate * y``, and for ``gate * dx'``, the gradient
    of y; None for one that is not needed. The three sums are of the output's gradient, of the output's gradient times
    the normalised row, and of dx' times y. `needed_sums` selects from them; a sum is (B, G, D), or None if not needed.
    """
    grad, grad_residual, residual, stats, y, gate, scale, weight = operands
    B, T, D = residual.shape
    count, chunks = programs(B * T, T // groups, any(needed_sums))
    shape = (B, groups, chunks, D)
    partials = [torch.empty(shape, dtype=stats.dtype, device=grad.device) if want else None for want in needed_sums]
    if residual.numel() > 0:
        read = [make_rows_contiguous(v) for v in (grad, grad_residual, residual, y, gate, scale)]
        factor, outputs = make_contiguous(weight), (*rows, *partials)
        dtypes = tuple([None if tensor is None else tensor.dtype for tensor in outputs])
        of_weight = None if factor is None else get_layout(factor)
        launch = prepare_backward(_get_layouts(read), of_weight, get_layout(stats), groups, count, dtypes)
        launch(*read[:3], stats, *read[3:], factor, *outputs)
    return [None if p is None else sum_chunks(p, chunks) for p in partials]


def programs(rows: int, length: int, sums: bool) -> tuple[int, int]:
    """Choose how many rows (tokens) a program of the backward takes, and how many programs a group of tokens needs.

    `rows` is the number of rows in all, `length` that of a group. Without `sums`, a program takes one row. The last
    program of a group may have fewer rows than the others.
    """
    # Without sums rows share nothing, and one program per row keeps the GPU fullest.
    count = compute_rows_per_program(rows, length) if sums else 1
    return count, cdiv(length, count)


def sum_chunks(partials: Tensor, chunks: int) -> Tensor:
    """Add up the partial sums of each group's programs, (..., chunks, D), to (..., D)."""
    # With torch, in a fixed order that does not depend on the programs' order.
    return partials.squeeze(-2) if chunks == 1 else partials.sum(-2)
