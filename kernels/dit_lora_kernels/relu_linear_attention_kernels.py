"""Device code of relu_linear_attention: every program walks one chunk of tokens of one head of one sample.

Program (b, chunk, h), h fastest, so that programs in flight together read neighbouring memory. It keeps the
D x D state in registers over BLOCKS blocks of BLOCK_S tokens. Sums over all tokens are partials, one a
program, which the launcher adds up in one fixed order.

Precision of the products: operands that come straight from 16-bit memory are exact in TF32, so one pass of
the tensor cores loses nothing; whatever was rotated, scaled or summed in fp32 takes TF32X3, three passes that
keep fp32's accuracy. For fp32 inputs both are "ieee".
"""

# Device code has no Python types: its arguments are pointers and registers.

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dit_lora_kernels.support import accumulator, on_its_device, tl, triton


@triton.jit
def _place(H, CHUNKS):
    """Sample, chunk and head of this program, in int64: rows times strides pass 2^31 for videos."""
    program = tl.program_id(0).to(tl.int64)
    h = program % H
    chunk = program // H % CHUNKS
    b = program // H // CHUNKS
    return program, b, chunk, h


@triton.jit
def _relu(x):
    return tl.where(x < 0, 0.0, x)  # NaN stays NaN


@triton.jit
def _load(ptr, rows, columns, stride, S, D: tl.constexpr, ACC: tl.constexpr):
    """Rows below S and columns below D of a matrix, 0 elsewhere."""
    inside = (rows < S)[:, None] & (columns < D)[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(ACC)


@triton.jit
def _store(ptr, x, rows, columns, stride, S, D: tl.constexpr):
    inside = (rows < S)[:, None] & (columns < D)[None, :]
    at = ptr + rows[:, None] * stride + columns[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _pairs(x):
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _rotate(x, cos_ptr, sin_ptr, rows, columns, S, D: tl.constexpr, BACK: tl.constexpr):
    """Channels (2i, 2i+1) turned by the angle of cos[2i], sin[2i+1]; BACK is the transpose."""
    if cos_ptr is not None:
        cos, _odd = _pairs(_load(cos_ptr, rows, columns, D, S, D, x.dtype))
        _even, sin = _pairs(_load(sin_ptr, rows, columns, D, S, D, x.dtype))
        if BACK:
            sin = -sin
        first, second = _pairs(x)
        turned = tl.join(first * cos - second * sin, first * sin + second * cos)
        x = tl.reshape(turned, x.shape)
    return x


@triton.jit
def _inverse(p, z, EPS: tl.constexpr):
    """1 / (p . z) of each row as a column, 0 of a dead row."""
    den = tl.sum(p * z, 1)
    shared = (p > 0) & (z > 0)
    z_sum = tl.sum(tl.where(shared, z, 0.0), 1)
    p_sum = tl.sum(tl.where(shared, p, 0.0), 1)
    dead = den <= EPS * tl.where(p_sum > z_sum, p_sum, z_sum)
    return tl.where(dead, 0.0, 1.0 / tl.where(dead, 1.0, den))[:, None]


@triton.jit
def _turned_times(
    x_ptr, cos_ptr, sin_ptr, matrix_ptr, rows, stride, S, D: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """R relu(x) @ matrix, BLOCK_K channels of x at a time: the whole matrix would not fit beside its product."""
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_S, BLOCK_D), ACC)
    for first in range(0, BLOCK_D, BLOCK_K):
        some = first + tl.arange(0, BLOCK_K)
        x = _relu(_load(x_ptr, rows, some, stride, S, D, ACC))
        x = _rotate(x, cos_ptr, sin_ptr, rows, some, S, D, False)
        matrix = _load(matrix_ptr, some, columns, D, D, D, ACC)
        total += tl.dot(x, matrix, input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def _times_transposed(
    x_ptr, matrix_ptr, rows, stride, S, D: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x @ matrix', BLOCK_K channels of x at a time."""
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_S, BLOCK_D), ACC)
    for first in range(0, BLOCK_D, BLOCK_K):
        some = first + tl.arange(0, BLOCK_K)
        x = _load(x_ptr, rows, some, stride, S, D, ACC)
        matrix = _load(matrix_ptr, columns, some, D, D, D, ACC)
        total += tl.dot(x, tl.trans(matrix), input_precision=PRECISION, out_dtype=ACC)
    return total


@triton.jit
def state_kernel(
    k_ptr, v_ptr, cos_ptr, sin_ptr, state_ptr, z_ptr, S, H, CHUNKS,
    k_b, k_s, k_h, v_b, v_s, v_h, table_b,
    D: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Partials of state = sum_t (R relu(k)[t]) v[t]' and of z = sum_t relu(k)[t]."""
    program, b, chunk, h = _place(H, CHUNKS)
    if cos_ptr is not None:
        cos_ptr += b * table_b
        sin_ptr += b * table_b
    columns = tl.arange(0, BLOCK_D)
    state = tl.zeros((BLOCK_D, BLOCK_D), ACC)
    z = tl.zeros((BLOCK_D,), ACC)
    for block in range(BLOCKS):
        rows = (chunk * BLOCKS + block) * BLOCK_S + tl.arange(0, BLOCK_S)
        c = _relu(_load(k_ptr + b * k_b + h * k_h, rows, columns, k_s, S, D, ACC))
        v = _load(v_ptr + b * v_b + h * v_h, rows, columns, v_s, S, D, ACC)
        z += tl.sum(c, 0)
        c = _rotate(c, cos_ptr, sin_ptr, rows, columns, S, D, False)
        state += tl.dot(tl.trans(c), v, input_precision=PRECISION, out_dtype=ACC)
    _store(state_ptr + program * D * D, state, columns, columns, D, D, D)
    tl.store(z_ptr + program * D + columns, z, mask=columns < D)


@triton.jit
def output_kernel(
    q_ptr, cos_ptr, sin_ptr, state_ptr, z_ptr, out_ptr, S, H, CHUNKS,
    q_b, q_s, q_h, table_b,
    EPS: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """out[s] = (R relu(q)[s]) @ state / (relu(q)[s] . z)."""
    _program, b, chunk, h = _place(H, CHUNKS)
    if cos_ptr is not None:
        cos_ptr += b * table_b
        sin_ptr += b * table_b
    q_ptr += b * q_b + h * q_h
    out_ptr += (b * S * H + h) * D
    state_ptr += (b * H + h) * D * D
    columns = tl.arange(0, BLOCK_D)
    z = tl.load(z_ptr + (b * H + h) * D + columns, mask=columns < D, other=0.0)[None, :]
    for block in range(BLOCKS):
        rows = (chunk * BLOCKS + block) * BLOCK_S + tl.arange(0, BLOCK_S)
        out = _turned_times(
            q_ptr, cos_ptr, sin_ptr, state_ptr, rows, q_s, S, D, ACC, PRECISION, BLOCK_S, BLOCK_D, BLOCK_K,
        )  # fmt: skip
        p = _relu(_load(q_ptr, rows, columns, q_s, S, D, ACC))
        _store(out_ptr, out * _inverse(p, z, EPS), rows, columns, H * D, S, D)


@triton.jit
def query_grad_kernel(
    grad_ptr, q_ptr, cos_ptr, sin_ptr, state_ptr, z_ptr, dq_ptr, dstate_ptr, dz_ptr, S, H, CHUNKS,
    g_b, g_s, g_h, q_b, q_s, q_h, table_b,
    EPS: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """dq, and partials of the gradients of state and z.

    With u = state @ g and w = 1 / (p . z): d(R p) = w u and d(p . z) = -w^2 (R p . u); the output is not needed.
    """
    program, b, chunk, h = _place(H, CHUNKS)
    if cos_ptr is not None:
        cos_ptr += b * table_b
        sin_ptr += b * table_b
    q_ptr += b * q_b + h * q_h
    grad_ptr += b * g_b + h * g_h
    state_ptr += (b * H + h) * D * D
    columns = tl.arange(0, BLOCK_D)
    z = tl.load(z_ptr + (b * H + h) * D + columns, mask=columns < D, other=0.0)[None, :]
    dstate = tl.zeros((BLOCK_D, BLOCK_D), ACC)
    dz = tl.zeros((BLOCK_D,), ACC)
    for block in range(BLOCKS):
        rows = (chunk * BLOCKS + block) * BLOCK_S + tl.arange(0, BLOCK_S)
        u = _times_transposed(
            grad_ptr, state_ptr, rows, g_s, S, D, ACC, PRECISION, BLOCK_S, BLOCK_D, BLOCK_K
        )
        p = _relu(_load(q_ptr, rows, columns, q_s, S, D, ACC))
        w = _inverse(p, z, EPS)
        turned = _rotate(p, cos_ptr, sin_ptr, rows, columns, S, D, False)
        dden = -w * w * tl.sum(turned * u, 1)[:, None]
        if dq_ptr is not None:
            dp = _rotate(u * w, cos_ptr, sin_ptr, rows, columns, S, D, True) + dden * z
            own = dq_ptr + (b * S * H + h) * D
            _store(own, tl.where(p <= 0, 0.0, dp), rows, columns, H * D, S, D)
        if dstate_ptr is not None:
            dz += tl.sum(p * dden, 0)
            g = _load(grad_ptr, rows, columns, g_s, S, D, ACC)
            dstate += tl.dot(tl.trans(turned * w), g, input_precision=PRECISION, out_dtype=ACC)
    if dstate_ptr is not None:
        _store(dstate_ptr + program * D * D, dstate, columns, columns, D, D, D)
        tl.store(dz_ptr + program * D + columns, dz, mask=columns < D)


@triton.jit
def key_grad_kernel(
    k_ptr, v_ptr, cos_ptr, sin_ptr, dstate_ptr, dz_ptr, dk_ptr, dv_ptr, S, H, CHUNKS,
    k_b, k_s, k_h, v_b, v_s, v_h, table_b,
    D: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """dk[t] = R' (dstate @ v[t]) + dz where k[t] > 0, and dv[t] = (R relu(k)[t]) @ dstate."""
    _program, b, chunk, h = _place(H, CHUNKS)
    if cos_ptr is not None:
        cos_ptr += b * table_b
        sin_ptr += b * table_b
    k_ptr += b * k_b + h * k_h
    own = (b * S * H + h) * D
    dstate_ptr += (b * H + h) * D * D
    columns = tl.arange(0, BLOCK_D)
    dz = tl.load(dz_ptr + (b * H + h) * D + columns, mask=columns < D, other=0.0)[None, :]
    for block in range(BLOCKS):
        rows = (chunk * BLOCKS + block) * BLOCK_S + tl.arange(0, BLOCK_S)
        if dk_ptr is not None:
            dc = _times_transposed(
                v_ptr + b * v_b + h * v_h, dstate_ptr, rows, v_s, S, D, ACC, PRECISION, BLOCK_S, BLOCK_D, BLOCK_K,
            )  # fmt: skip
            dc = _rotate(dc, cos_ptr, sin_ptr, rows, columns, S, D, True) + dz
            c = _load(k_ptr, rows, columns, k_s, S, D, ACC)
            _store(dk_ptr + own, tl.where(c <= 0, 0.0, dc), rows, columns, H * D, S, D)
        if dv_ptr is not None:
            dv = _turned_times(
                k_ptr, cos_ptr, sin_ptr, dstate_ptr, rows, k_s, S, D, ACC, PRECISION, BLOCK_S, BLOCK_D, BLOCK_K,
            )  # fmt: skip
            _store(dv_ptr + own, dv, rows, columns, H * D, S, D)


BLOCK_S = 32
MAX_D = 128
"""A program holds the whole state in registers: 64 of each thread at D = 128."""


class Tiling(NamedTuple):
    """How heads are cut: a program takes `blocks` times BLOCK_S tokens and all of its `block_d` >= D channels."""

    block_d: int
    block_k: int
    blocks: int
    num_warps: int


def tiling(s: int, d: int) -> Tiling:
    """Chunks of up to 512 or 1024 tokens: the partials are an eighth (D = 32) or 2/5 (112) of k's and v's bytes."""
    block_d = max(16, triton.next_power_of_2(d))
    blocks = min(
        16 if block_d <= 64 else 32, triton.next_power_of_2(triton.cdiv(max(s, 1), BLOCK_S))
    )
    block_k, num_warps = (block_d, 4) if block_d <= 32 else (16, 8)
    return Tiling(block_d, block_k, blocks, num_warps)


def _strided(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _options(*operands: Tensor) -> dict[str, Any]:
    """Arguments of every kernel at compile time."""
    _, s, _, d = operands[0].shape
    cut = tiling(s, d)
    short = all(x.element_size() == 2 for x in operands)
    return {
        "D": d,
        "ACC": accumulator(operands[0].dtype),
        "PRECISION": "tf32x3" if short else "ieee",
        "BLOCK_S": BLOCK_S,
        "BLOCK_D": cut.block_d,
        "BLOCK_K": cut.block_k,
        "BLOCKS": cut.blocks,
        "num_warps": cut.num_warps,
    }


def _tables(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None, int]:
    """The tables, contiguous, and the distance from one sample's to the next: 0 if they share it."""
    if cos is None or sin is None:
        return None, None, 0
    shared = cos.ndim == 2 or cos.shape[0] == 1
    return cos.contiguous(), sin.contiguous(), 0 if shared else cos.shape[1] * cos.shape[2]


def _partials(q: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Room for a (D,D) and a (D,) of every program, in the order of the programs."""
    b, s, h, d = q.shape
    chunks = triton.cdiv(s, blocks)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    square = torch.empty((b, chunks, h, d, d), dtype=dtype, device=q.device)
    return square, torch.empty((b, chunks, h, d), dtype=dtype, device=q.device)


def _total(partials: Tensor) -> Tensor:
    return partials.squeeze(1) if partials.shape[1] == 1 else partials.sum(1)


@on_its_device
def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `state` (B,H,D,D) and `z` (B,H,D)."""
    q, k, v = _strided(q), _strided(k), _strided(v)
    cos, sin, table_b = _tables(cos, sin)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    options = _options(q, k, v)
    state, z = _partials(q, options["BLOCK_S"] * options["BLOCKS"])
    chunks, h = z.shape[1:3]
    grid = (z.shape[0] * chunks * h,)
    exact = "tf32" if options["PRECISION"] == "tf32x3" and cos is None else options["PRECISION"]
    if out.numel():
        state_kernel[grid](
            k, v, cos, sin, state, z, q.shape[1], h, chunks,
            *k.stride()[:3], *v.stride()[:3], table_b, **options | {"PRECISION": exact},
        )  # fmt: skip
    state, z = _total(state), _total(z)
    if out.numel():
        output_kernel[grid](
            q, cos, sin, state, z, out, q.shape[1], h, chunks,
            *q.stride()[:3], table_b, EPS=eps, **options,
        )  # fmt: skip
    return out, state, z


@on_its_device
def launch_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    state: Tensor,
    z: Tensor,
    eps: float,
    grads: list[Tensor | None],
) -> None:
    """Fill dq, dk and dv, those of `grads` that are there."""
    if not q.numel():
        return
    dq, dk, dv = grads
    grad, q, k, v = _strided(grad), _strided(q), _strided(k), _strided(v)
    cos, sin, table_b = _tables(cos, sin)
    options = _options(q, k, v)
    dstate, dz = _partials(q, options["BLOCK_S"] * options["BLOCKS"])
    chunks, h = dz.shape[1:3]
    grid = (dz.shape[0] * chunks * h,)
    keys = dk is not None or dv is not None
    query_grad_kernel[grid](
        grad, q, cos, sin, state, z, dq, dstate if keys else None, dz if keys else None,
        q.shape[1], h, chunks, *grad.stride()[:3], *q.stride()[:3], table_b, EPS=eps, **options,
    )  # fmt: skip
    if keys:
        key_grad_kernel[grid](
            k, v, cos, sin, _total(dstate), _total(dz), dk, dv,
            q.shape[1], h, chunks, *k.stride()[:3], *v.stride()[:3], table_b, **options,
        )  # fmt: skip
