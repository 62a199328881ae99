"""Triton kernels of `ada_norm`: one row a program forward, a few rows of one token group a program backward.

Shapes: B batch, T tokens of a stream, S tokens of the joint buffer, G token groups, L = T // G, D channels.
Every tensor is addressed by its batch and token (or group) strides; its last dimension is contiguous.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dit_lora_kernels.support import accumulator, on_its_device, tl, triton

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
        """G: how many rows of the tables a sample has."""
        tables = (self.shift, self.scale, self.gate)
        return next((table.shape[1] for table in tables if table is not None), 1)


class Known(NamedTuple):
    """What the backward of one stream reads: rows (B,T,D), tables (B,G,D), stats (1 or 2,B,T), weight (D,)."""

    grad: Tensor
    grad_residual: Tensor | None
    residual: Tensor
    stats: Tensor
    y: Tensor | None
    gate: Tensor | None
    scale: Tensor | None
    weight: Tensor | None


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
    """What a normalised element is multiplied by."""
    factor = tl.full((BLOCK_D,), 1.0, ACC)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + b * scale_b + g * scale_g + columns, mask=channel, other=0.0)
        factor += scale.to(ACC)
    if weight_ptr is not None:
        factor *= tl.load(weight_ptr + columns, mask=channel, other=0.0).to(ACC)
    return factor


@triton.jit
def _store_sums(ones_ptr, hats_ptr, dgate_ptr, ones, hats, dgate, program, D, columns, channel):
    if ones_ptr is not None:
        tl.store(ones_ptr + program * D + columns, ones, mask=channel)
    if hats_ptr is not None:
        tl.store(hats_ptr + program * D + columns, hats, mask=channel)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + program * D + columns, dgate, mask=channel)


@triton.jit
def _backward_kernel(
    grad_ptr, grad_residual_ptr, residual_ptr, mean_ptr, rstd_ptr, y_ptr, gate_ptr, scale_ptr, weight_ptr,
    dx_ptr, dy_ptr, ones_ptr, hats_ptr, dgate_ptr,
    grad_b, grad_t, grad_residual_b, grad_residual_t, residual_b, residual_t, y_b, y_t,
    gate_b, gate_g, scale_b, scale_g,
    T, G, L, S, D, CHUNKS,
    ROWS: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr,
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

    for i in range(ROWS):
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


def _describe(tensor: Tensor) -> str:
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
    """The stream with every table as (B,G,D), with one G: a row for all tokens is repeated by a stride of 0.

    Raises ValueError for a table of another shape, or a G that does not divide T.
    """
    B, T, D = stream.x.shape
    tables = {"shift": stream.shift, "scale": stream.scale, "gate": stream.gate}
    wide = {k: v[:, None] if v.ndim == 2 else v for k, v in tables.items() if v is not None}
    groups = max([1, *(v.shape[1] for v in wide.values() if v.ndim == 3)])
    for name, table in wide.items():
        fits = table.ndim == 3 and (table.shape[0], table.shape[2]) == (B, D)
        if not fits or table.shape[1] not in (1, groups) or T % groups:
            raise ValueError(
                f"{name} of stream {position} must be (B,D) or (B,G,D), where B={B}, D={D} and G is 1 or one number "
                f"that divides T={T}; got {_describe(table)}"
            )
    return stream._replace(**{k: v.expand(B, groups, D) for k, v in wide.items()})


def _contiguous_rows(tensor: Tensor | None) -> Tensor | None:
    """The tensor itself if its last dimension is contiguous, else a contiguous copy."""
    if tensor is None or tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return tensor.contiguous()


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def _block(channels: int, *, sums: bool = False) -> dict[str, int]:
    """A row's block and its warps: 16 values a thread, two 16-byte loads of bf16; 8 beside the sums' registers."""
    block = triton.next_power_of_2(channels)
    warps = block // 256 if sums else block // 512
    return {"BLOCK_D": block, "num_warps": min(max(warps, 1), 16)}


def _mean_and_rstd(stats: Tensor) -> tuple[Tensor | None, Tensor]:
    """`stats` is rstd, or rstd and mean: (1 or 2, B, S)."""
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
    ordered = (stream.x, stream.y, stream.gate, stream.shift, stream.scale)
    rows = [_contiguous_rows(tensor) for tensor in ordered]
    flat = [None if v is None else v.contiguous() for v in (weight, bias)]
    strides = [stride for tensor in rows for stride in _strides(tensor)]
    _forward_kernel[(B * T,)](
        *rows, *flat, residual, out, *_mean_and_rstd(stats), *strides,
        T, length, stats.stride(1), D,
        EPS=eps, ACC=accumulator(stream.x.dtype), **_block(D),
    )  # fmt: skip


def rows_per_program(rows: int, length: int) -> int:
    """A power of two, to compile few kernels: as many as leave the GPU enough programs to be busy."""
    most = max(min(MAX_ROWS, length, rows // MIN_PROGRAMS), 1)
    return 1 << (most.bit_length() - 1)


@on_its_device
def launch_backward(
    known: Known, rows: Sequence[Tensor | None], groups: int, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Fill `rows`, dx and dy; return the sums over each group's tokens that `wanted` names, (B,G,D) or None.

    They are those of grad, of grad times the normalised row, and of dx' times y.
    """
    grad, grad_residual, residual, stats, y, gate, scale, weight = known
    B, T, D = residual.shape
    length = T // groups
    count = rows_per_program(B * T, length) if any(wanted) else 1
    chunks = -(-length // count)
    shape = (B * groups, chunks, D)
    partials = [
        torch.empty(shape, dtype=stats.dtype, device=grad.device) if want else None
        for want in wanted
    ]
    if residual.numel() > 0:
        operands = [_contiguous_rows(v) for v in (grad, grad_residual, residual)]
        tables = [_contiguous_rows(v) for v in (y, gate, scale)]
        strides = [stride for v in (*operands, *tables) for stride in _strides(v)]
        flat = None if weight is None else weight.contiguous()
        _backward_kernel[(B * groups * chunks,)](
            *operands, *_mean_and_rstd(stats), *tables, flat, *rows, *partials, *strides,
            T, groups, length, stats.stride(1), D, chunks,
            ROWS=count, ACC=accumulator(residual.dtype), **_block(D, sums=any(wanted)),
        )  # fmt: skip
    return [
        None if p is None else (p if chunks == 1 else p.sum(1)).view(B, groups, D) for p in partials
    ]
