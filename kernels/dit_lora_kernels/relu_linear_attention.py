"""Attention of Sana and SanaVideo, linear in the number of tokens, for training::

    p = relu(q)    c = relu(k)    state = sum_t (R_t c_t) v_t^T    z = sum_t c_t
    out_s = (R_s p_s) @ state / (p_s . z),   or 0 where row s is dead

Shapes: B batch, S tokens, H heads, D channels of a head. A row is one token of one head. Terms:

- R_t rotates the pairs of channels (2i, 2i+1) by the angle of token t, as rotary embeddings do, or is absent. Its
  inverse is its transpose R^T. "Turned" means rotated: R p, R c. The tables are cos and sin of the angles.
- `state` (D, D) is of a sample and head, and so is z (D,). Both are fp32 whatever autocast says.
- p . z is the denominator (`den`), and `inverse` is 1 / (p . z). A d in front means the gradient: dp, dden, dstate.
- A number in fp32 is split into bf16 numbers high, middle and low: their sum is the number, and high is the largest.

Dead rows. Row s is dead where ``p_s . z <= eps * max(sum p_s, sum z)``, with sums over the channels in which p_s
and z are both positive (the others add nothing to p_s . z and take no gradient): where the mean of its query,
weighted by z, or the mean of z, weighted by its query, is at most eps. A dead row attends to nothing: its output
and every gradient through it are 0. Other queries and the number of tokens have no influence. Any other row is divided
by p_s . z itself, which is then more than eps^2. The stock processors add 1e-15 to it instead: below rounding in
fp32 where p_s . z > 1e-8, 0 in fp16, and the gradient of a tiny query grows to 1e13 and more. Here, without R,
|dq| <= 2 |dout| |v| / eps. A NaN or an Inf in a row's query is not hidden: its output is NaN.

Source: Sana, https://arxiv.org/abs/2410.10629 (diffusers `SanaLinearAttnProcessor2_0`); SanaVideo,
https://arxiv.org/abs/2509.24695 (`SanaLinearAttnProcessor3_0`: numerator rotated, denominator not).
Traffic, in u = B*S*H*D elements: forward reads k, v, q and writes out, 4u; backward reads q, dout, k, v and
writes dq, dk, dv, 7u. In addition to q, k and v, only state and z are saved.
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
    launches,
    make_rows_contiguous,
    next_power_of_2,
    op,
    tl,
    triton,
)

MAX_D = 128  # a program holds the whole state in registers, then 64 a thread


class BackwardOperands(NamedTuple):
    """Tensors that the backward of ReLU linear attention reads: the output's gradient (B, S, H, D), and saved ones."""

    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None
    sin: Tensor | None
    state: Tensor
    z: Tensor


# 1. reference


def _add_batch_dimension(table: Tensor) -> Tensor:
    """View a table of cosines or sines, (S, D) or (1 or B, S, D), as (1 or B, S, D)."""
    return table if table.ndim == 3 else table[None]


def _apply_rotation(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Rotate channels (2i, 2i+1) of x (B, S, H, D) by the angle of cos[2i] and sin[2i+1]; no rotation for None."""
    if cos is None or sin is None:
        return x
    c = _add_batch_dimension(cos)[:, :, None, 0::2].to(x.dtype)
    s = _add_batch_dimension(sin)[:, :, None, 1::2].to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)


def _compute_reciprocal(p: Tensor, z: Tensor, eps: float) -> Tensor:
    """Compute 1 / (p . z) of each row (B, S, H, 1), from p = relu(q) (B, S, H, D) and z, the sum of relu(k) (B, H, D).

    It is 0 for a dead row, where p . z is too small to divide by, as the module defines it.
    """
    z = z[:, None]
    den = (p * z).sum(-1, keepdim=True)
    shared = (p > 0) & (z > 0)
    p_sum = torch.where(shared, p, 0).sum(-1, keepdim=True)
    z_sum = torch.where(shared, z, 0).sum(-1, keepdim=True)
    dead = den <= eps * torch.maximum(p_sum, z_sum)
    # `where` twice: the branch that is not taken has a gradient too, and 1 / 0 would make it NaN.
    return torch.where(dead, 0, 1 / torch.where(dead, 1, den))


def _compute_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ReLU linear attention in plain torch: the output (B, S, H, D) in q's dtype, and the sums state and z.

    state (B, H, D, D) is the sum of rotated relu(k) times v, and z (B, H, D) that of relu(k), in fp32 (fp64 for fp64).
    """
    # Autocast would run these einsums in 16 bits, and their sums over all tokens need fp32.
    with torch.autocast(q.device.type, enabled=False):
        p, c, v = (
            q.to(accumulation_dtype(q.dtype)).relu(),
            k.to(accumulation_dtype(q.dtype)).relu(),
            v.to(accumulation_dtype(q.dtype)),
        )
        z = c.sum(1)
        state = torch.einsum("bshd,bshe->bhde", _apply_rotation(c, cos, sin), v)
        rotated_p = _apply_rotation(p, cos, sin)
        output = torch.einsum("bshd,bhde->bshe", rotated_p, state) * _compute_reciprocal(p, z, eps)
        return output.to(q.dtype), state, z


def relu_linear_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """Compute ReLU linear attention in plain torch, differentiably, in fp32 (fp64 for fp64), and round once."""
    return _compute_reference(q, k, v, cos, sin, eps)[0]


def _backward_reference(operands: BackwardOperands, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ReLU linear attention (dq, dk, dv) in plain torch, with the formulas of the kernels."""
    grad, q, k, v, cos, sin, state, z = operands
    # g is dout / (p . z), u is g @ state^T, and dden is the gradient of the denominator p . z.
    back = None if sin is None else -sin  # the inverse rotation, which is its transpose
    with torch.autocast(q.device.type, enabled=False):
        p, c = q.to(state.dtype).relu(), k.to(state.dtype).relu()
        inverse = _compute_reciprocal(p, z, eps)
        g = grad.to(state.dtype) * inverse
        turned = _apply_rotation(p, cos, sin)
        u = torch.einsum("bshe,bhde->bshd", g, state)
        dden = -inverse * (turned * u).sum(-1, keepdim=True)
        dp = _apply_rotation(u, cos, back) + dden * z[:, None]
        dstate = torch.einsum("bshd,bshe->bhde", turned, g)
        dz = (p * dden).sum(1)
        dc = torch.einsum("bshe,bhde->bshd", v.to(state.dtype), dstate)
        dc = _apply_rotation(dc, cos, back) + dz[:, None]
        dv = torch.einsum("bshd,bhde->bshe", _apply_rotation(c, cos, sin), dstate)
        return torch.where(p <= 0, 0, dp), torch.where(c <= 0, 0, dc), dv


# 2. kernels
# Every program walks one chunk of tokens of one head of one sample: (b, chunk, h), h fastest, so that programs in
# flight together read neighbouring memory. It keeps the D x D state in registers over BLOCKS blocks of BLOCK_S
# tokens. A sum over all tokens is stored as partial sums, one per program, which the launcher adds up in one order.
#
# PRECISION of the products. Their operands have dtype OPERAND, and their sums ACC:
# - "bf16", if all inputs are bf16: values straight from memory are exact operands (EXACT). What was rotated, scaled or
#   summed in fp32 is split into bf16 numbers: two have 16 bits, twice what results are rounded to; three have fp32's
#   24, where nearly all bits may cancel afterwards. Triton's interpreter cannot multiply bf16: there OPERAND is fp32.
# - "tf32x3", for other inputs of 16 bits: three passes of TF32, with fp32's accuracy; "ieee", for fp32 and fp64.


@triton.jit
def _locate_program(H, CHUNKS):
    """Locate this program: number, sample, chunk of tokens and head, in int64: row offsets pass 2^31 for videos."""
    program = tl.program_id(0).to(tl.int64)
    h = program % H
    chunk = program // H % CHUNKS
    b = program // H // CHUNKS
    return program, b, chunk, h


@triton.jit
def _relu(x):
    """Set negative elements of x to 0; not with `maximum`, which may return 0 for NaN: here NaN stays NaN."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def _load_matrix_block(ptr, rows, columns, stride, S, D: tl.constexpr, ACC: tl.constexpr):
    """Load some rows and columns of a matrix (S, D) as dtype ACC, 0 outside it; rows are `stride` elements apart."""
    inside = (rows < S)[:, None] & (columns < D)[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(ACC)


@triton.jit
def _store_matrix_block(ptr, x, rows, columns, stride, S, D: tl.constexpr):
    """Store some rows and columns of a matrix (S, D), cast to the pointer's dtype; skip elements outside it."""
    inside = (rows < S)[:, None] & (columns < D)[None, :]
    at = ptr + rows[:, None] * stride + columns[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _pairs(x):
    """Split x into its even and its odd columns."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _rotate(x, cos_ptr, sin_ptr, rows, columns, S, D: tl.constexpr, BACK: tl.constexpr):
    """Rotate channels (2i, 2i+1) of x by the angle of cos[2i] and sin[2i+1]; BACK rotates by the negative angle."""
    if cos_ptr is not None:
        cos, _odd = _pairs(_load_matrix_block(cos_ptr, rows, columns, D, S, D, x.dtype))
        _even, sin = _pairs(_load_matrix_block(sin_ptr, rows, columns, D, S, D, x.dtype))
        if BACK:
            sin = -sin
        first, second = _pairs(x)
        turned = tl.join(first * cos - second * sin, first * sin + second * cos)
        x = tl.reshape(turned, x.shape)
    return x


@triton.jit
def _inverse(p, z, EPS: tl.constexpr):
    """Compute 1 / (p . z) of each row p of a block, as a column; 0 for a dead row, as the module defines it."""
    den = tl.sum(p * z, 1)
    shared = (p > 0) & (z > 0)
    z_sum = tl.sum(tl.where(shared, z, 0.0), 1)
    p_sum = tl.sum(tl.where(shared, p, 0.0), 1)
    dead = den <= EPS * tl.where(p_sum > z_sum, p_sum, z_sum)
    return tl.where(dead, 0.0, 1.0 / tl.where(dead, 1.0, den))[:, None]


@triton.jit
def _split_into_bf16(x, OPERAND: tl.constexpr):
    """Split x into three bf16 numbers (high, middle, low), from large to small, whose sum is x; as OPERAND."""
    high = x.to(tl.bfloat16).to(x.dtype)
    middle = (x - high).to(tl.bfloat16).to(x.dtype)
    low = (x - high - middle).to(tl.bfloat16)
    return high.to(OPERAND), middle.to(OPERAND), low.to(OPERAND)


@triton.jit
def _add_turned(total, turned, high, middle, ROTATED: tl.constexpr, OPERAND: tl.constexpr):
    """Compute total + turned @ (high + middle), to 16 bits or more; `turned` is relu(q) or relu(k).

    ROTATED: `turned` is rotated, so it is split into bf16 numbers. high + middle is a matrix that was split so.
    """
    if ROTATED:
        of_high, of_middle, _low = _split_into_bf16(turned, OPERAND)
        total = tl.dot(of_middle, high, total)
    else:  # as it was in memory
        of_high = turned.to(OPERAND)
    total = tl.dot(of_high, middle, total)
    return tl.dot(of_high, high, total)


@triton.jit
def _add_transposed_product(total, x, high, middle, low):
    """Compute total + x @ (high + middle + low)^T to fp32's accuracy: bf16 x, and a matrix split into bf16 numbers."""
    total = tl.dot(x, tl.trans(low), total)
    total = tl.dot(x, tl.trans(middle), total)
    return tl.dot(x, tl.trans(high), total)


@triton.jit
def _add_outer(
    total, c, v, EXACT: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """Compute total + c^T @ v (BLOCK_D, BLOCK_D). EXACT: c was loaded, not computed, so it is exact in its dtype."""
    if EXACT and PRECISION == "tf32x3":  # as exact in one pass of TF32
        total += tl.dot(tl.trans(c), v, input_precision="tf32")
    elif PRECISION != "bf16":
        total += tl.dot(tl.trans(c), v, input_precision=PRECISION, out_dtype=ACC)
    elif EXACT:
        total = tl.dot(tl.trans(c.to(OPERAND)), v, total)
    else:
        high, middle, _low = _split_into_bf16(c, OPERAND)
        total = tl.dot(tl.trans(middle), v, total)
        total = tl.dot(tl.trans(high), v, total)
    return total


@triton.jit
def _multiply_rotated_features(
    x_ptr, cos_ptr, sin_ptr, matrix_ptr, rows, stride, S, TRANSPOSED: tl.constexpr,
    D: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute rotate(relu(x)) @ matrix (BLOCK_S, BLOCK_D); if TRANSPOSED, x @ matrix^T without relu and rotation."""
    # BLOCK_K channels of x at a time: the whole matrix would not fit in registers beside its product. A rotation
    # mixes neighbours alone, so a slice of an even number of channels is rotated by itself.
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_S, BLOCK_D), ACC)
    for start in range(0, BLOCK_D, BLOCK_K):
        some = start + tl.arange(0, BLOCK_K)
        if TRANSPOSED:
            x = _load_matrix_block(x_ptr, rows, some, stride, S, D, OPERAND)
            matrix = _load_matrix_block(matrix_ptr, columns, some, D, D, D, ACC)
        else:
            x = _relu(_load_matrix_block(x_ptr, rows, some, stride, S, D, ACC))
            x = _rotate(x, cos_ptr, sin_ptr, rows, some, S, D, False)
            matrix = _load_matrix_block(matrix_ptr, some, columns, D, D, D, ACC)
        if PRECISION != "bf16":
            matrix = tl.trans(matrix) if TRANSPOSED else matrix
            total += tl.dot(x, matrix, input_precision=PRECISION, out_dtype=ACC)
        else:
            high, middle, low = _split_into_bf16(matrix, OPERAND)
            if TRANSPOSED:
                total = _add_transposed_product(total, x, high, middle, low)
            else:
                total = _add_turned(total, x, high, middle, cos_ptr is not None, OPERAND)
    return total


@triton.jit
def state_kernel(
    k_ptr, v_ptr, cos_ptr, sin_ptr, state_ptr, z_ptr, S, H, CHUNKS,
    k_b, k_s, k_h, v_b, v_s, v_h, table_b,
    D: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store sums over the program's tokens: state = sum R_t relu(k_t) v_t^T (R_t rotates) and z = sum relu(k_t)."""
    program, b, chunk, h = _locate_program(H, CHUNKS)
    if cos_ptr is not None:
        cos_ptr += b * table_b
        sin_ptr += b * table_b
    columns = tl.arange(0, BLOCK_D)
    state = tl.zeros((BLOCK_D, BLOCK_D), ACC)
    z = tl.zeros((BLOCK_D,), ACC)
    for block in range(BLOCKS):
        rows = (chunk * BLOCKS + block) * BLOCK_S + tl.arange(0, BLOCK_S)
        c = _relu(_load_matrix_block(k_ptr + b * k_b + h * k_h, rows, columns, k_s, S, D, ACC))
        v = _load_matrix_block(v_ptr + b * v_b + h * v_h, rows, columns, v_s, S, D, OPERAND)
        z += tl.sum(c, 0)
        c = _rotate(c, cos_ptr, sin_ptr, rows, columns, S, D, False)
        state = _add_outer(state, c, v, cos_ptr is None, PRECISION, OPERAND, ACC)
    _store_matrix_block(state_ptr + program * D * D, state, columns, columns, D, D, D)
    tl.store(z_ptr + program * D + columns, z, mask=columns < D)


@triton.jit
def output_kernel(
    q_ptr, cos_ptr, sin_ptr, state_ptr, z_ptr, out_ptr, S, H, CHUNKS,
    q_b, q_s, q_h, table_b,
    EPS: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store each token's output in q's dtype: (R_s relu(q_s)) @ state / (relu(q_s) . z), with the rotation R."""
    _program, b, chunk, h = _locate_program(H, CHUNKS)
    if cos_ptr is not None:
        cos_ptr += b * table_b
        sin_ptr += b * table_b
    q_ptr += b * q_b + h * q_h
    out_ptr += (b * S * H + h) * D
    state_ptr += (b * H + h) * D * D
    columns = tl.arange(0, BLOCK_D)
    z = tl.load(z_ptr + (b * H + h) * D + columns, mask=columns < D, other=0.0)[None, :]
    if WHOLE:
        high, middle, _low = _split_into_bf16(_load_matrix_block(state_ptr, columns, columns, D, D, D, ACC), OPERAND)
    for block in range(BLOCKS):
        rows = (chunk * BLOCKS + block) * BLOCK_S + tl.arange(0, BLOCK_S)
        p = _relu(_load_matrix_block(q_ptr, rows, columns, q_s, S, D, ACC))
        inverse = _inverse(p, z, EPS)
        if WHOLE:
            turned = _rotate(p, cos_ptr, sin_ptr, rows, columns, S, D, False)
            output = tl.zeros((BLOCK_S, BLOCK_D), ACC)
            output = _add_turned(output, turned, high, middle, cos_ptr is not None, OPERAND)
        else:
            output = _multiply_rotated_features(
                q_ptr, cos_ptr, sin_ptr, state_ptr, rows, q_s, S, False, D,
                ACC, PRECISION, OPERAND, BLOCK_S, BLOCK_D, BLOCK_K,
            )  # fmt: skip
        _store_matrix_block(out_ptr, output * inverse, rows, columns, H * D, S, D)


@triton.jit
def query_grad_kernel(
    grad_ptr, q_ptr, cos_ptr, sin_ptr, state_ptr, z_ptr, dq_ptr, dstate_ptr, dz_ptr, S, H, CHUNKS,
    g_b, g_s, g_h, q_b, q_s, q_h, table_b,
    EPS: tl.constexpr, D: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store dq, and the program's sums over its tokens for the gradients of state and z.

    With p = relu(q), R its rotation, g the output's gradient, u = state @ g and w = 1 / (p . z): d(R p) = w u and
    d(p . z) = -w^2 (R p . u). The output is not needed.
    """
    program, b, chunk, h = _locate_program(H, CHUNKS)
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
    if WHOLE:
        high, middle, low = _split_into_bf16(_load_matrix_block(state_ptr, columns, columns, D, D, D, ACC), OPERAND)
    for block in range(BLOCKS):
        rows = (chunk * BLOCKS + block) * BLOCK_S + tl.arange(0, BLOCK_S)
        if WHOLE:
            g = _load_matrix_block(grad_ptr, rows, columns, g_s, S, D, OPERAND)
            u = _add_transposed_product(tl.zeros((BLOCK_S, BLOCK_D), ACC), g, high, middle, low)
        else:
            u = _multiply_rotated_features(
                grad_ptr, None, None, state_ptr, rows, g_s, S, True, D,
                ACC, PRECISION, OPERAND, BLOCK_S, BLOCK_D, BLOCK_K,
            )  # fmt: skip
        p = _relu(_load_matrix_block(q_ptr, rows, columns, q_s, S, D, ACC))
        w = _inverse(p, z, EPS)
        turned = _rotate(p, cos_ptr, sin_ptr, rows, columns, S, D, False)
        dden = -w * w * tl.sum(turned * u, 1)[:, None]
        if dq_ptr is not None:
            dp = _rotate(u * w, cos_ptr, sin_ptr, rows, columns, S, D, True) + dden * z
            head_ptr = dq_ptr + (b * S * H + h) * D
            _store_matrix_block(head_ptr, tl.where(p <= 0, 0.0, dp), rows, columns, H * D, S, D)
        if dstate_ptr is not None:  # null where neither k nor v wants a gradient
            dz += tl.sum(p * dden, 0)
            if not WHOLE:
                g = _load_matrix_block(grad_ptr, rows, columns, g_s, S, D, OPERAND)
            dstate = _add_outer(dstate, turned * w, g, False, PRECISION, OPERAND, ACC)
    if dstate_ptr is not None:
        _store_matrix_block(dstate_ptr + program * D * D, dstate, columns, columns, D, D, D)
        tl.store(dz_ptr + program * D + columns, dz, mask=columns < D)


@triton.jit
def key_grad_kernel(
    k_ptr, v_ptr, cos_ptr, sin_ptr, dstate_ptr, dz_ptr, dk_ptr, dv_ptr, S, H, CHUNKS,
    k_b, k_s, k_h, v_b, v_s, v_h, table_b,
    D: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store dk_t = R_t^T (dstate @ v_t) + dz where k_t > 0, and dv_t = (R_t relu(k_t)) @ dstate; R_t rotates."""
    _program, b, chunk, h = _locate_program(H, CHUNKS)
    if cos_ptr is not None:
        cos_ptr += b * table_b
        sin_ptr += b * table_b
    k_ptr += b * k_b + h * k_h
    head = (b * S * H + h) * D
    dstate_ptr += (b * H + h) * D * D
    columns = tl.arange(0, BLOCK_D)
    dz = tl.load(dz_ptr + (b * H + h) * D + columns, mask=columns < D, other=0.0)[None, :]
    v_ptr += b * v_b + h * v_h
    if WHOLE:
        high, middle, low = _split_into_bf16(_load_matrix_block(dstate_ptr, columns, columns, D, D, D, ACC), OPERAND)
    for block in range(BLOCKS):
        rows = (chunk * BLOCKS + block) * BLOCK_S + tl.arange(0, BLOCK_S)
        if WHOLE:
            c = _load_matrix_block(k_ptr, rows, columns, k_s, S, D, ACC)
        if dk_ptr is not None:
            if WHOLE:
                v = _load_matrix_block(v_ptr, rows, columns, v_s, S, D, OPERAND)
                dc = _add_transposed_product(tl.zeros((BLOCK_S, BLOCK_D), ACC), v, high, middle, low)
            else:
                dc = _multiply_rotated_features(
                    v_ptr, None, None, dstate_ptr, rows, v_s, S, True, D,
                    ACC, PRECISION, OPERAND, BLOCK_S, BLOCK_D, BLOCK_K,
                )  # fmt: skip
            dc = _rotate(dc, cos_ptr, sin_ptr, rows, columns, S, D, True) + dz
            if not WHOLE:
                c = _load_matrix_block(k_ptr, rows, columns, k_s, S, D, ACC)
            _store_matrix_block(dk_ptr + head, tl.where(c <= 0, 0.0, dc), rows, columns, H * D, S, D)
        if dv_ptr is not None:
            if WHOLE:
                turned = _rotate(_relu(c), cos_ptr, sin_ptr, rows, columns, S, D, False)
                dv = tl.zeros((BLOCK_S, BLOCK_D), ACC)
                dv = _add_turned(dv, turned, high, middle, cos_ptr is not None, OPERAND)
            else:
                dv = _multiply_rotated_features(
                    k_ptr, cos_ptr, sin_ptr, dstate_ptr, rows, k_s, S, False, D,
                    ACC, PRECISION, OPERAND, BLOCK_S, BLOCK_D, BLOCK_K,
                )  # fmt: skip
            _store_matrix_block(dv_ptr + head, dv, rows, columns, H * D, S, D)


# 3. launchers


def tokens_per_program(s: int, d: int) -> int:
    """Choose how many of `s` tokens a linear attention program takes, for heads of `d` channels: a power of two."""
    # Partials are then an eighth (D = 32) or 2/5 (112) of k's and v's bytes.
    return min(512 if d <= 64 else 1024, max(32, next_power_of_2(s)))


# Tokens of a block in bf16, with up to 32 channels and beyond: so many that registers are left for 16 warps an SM.
# query_grad's at D = 112, where the gradient of the state alone is 64 registers a thread, has 8.
_BF16_BLOCKS = {
    state_kernel: (64, 16),
    output_kernel: (64, 32),
    query_grad_kernel: (32, 16),
    key_grad_kernel: (64, 32),
}


def _get_launch_options(kernel: Any, *operands: Tensor) -> dict[str, Any]:
    """Choose the linear attention kernel's compile-time arguments; the first operand (B, S, H, D) gives the dtype."""
    _, s, _, d = operands[0].shape
    tokens, block_d = tokens_per_program(s, d), max(16, next_power_of_2(d))  # tl.dot's least
    block_k, num_warps = (block_d, 4) if block_d <= 32 else (16, 8)
    dtypes = {x.dtype for x in operands}
    acc = operand = accumulation_triton_dtype(operands[0].dtype)
    precision = "tf32x3" if all(dtype.itemsize == 2 for dtype in dtypes) else "ieee"
    # What fits at D = 128.
    block_s = 16 if accumulation_dtype(operands[0].dtype) is torch.float64 else 32
    more: dict[str, Any] = {"num_warps": num_warps}
    if dtypes == {torch.bfloat16}:
        precision = "bf16"
        operand = acc if triton.knobs.runtime.interpret else tl.bfloat16
        block_s = _BF16_BLOCKS[kernel][block_d > 32]
        if kernel is query_grad_kernel and block_d <= 32:
            more |= {"maxnreg": 128, "num_stages": 4}  # four programs an SM
    return {
        "D": d,
        "ACC": acc,
        "PRECISION": precision,
        "OPERAND": operand,
        "WHOLE": precision == "bf16" and block_k == block_d,
        "BLOCK_S": (block_s := min(block_s, tokens)),
        "BLOCK_D": block_d,
        "BLOCK_K": block_k,
        "BLOCKS": tokens // block_s,
        **more,
    }


def _prepare_tables(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None, int]:
    """Make rotary tables cos and sin contiguous; also return the distance of two samples in elements, 0 if shared."""
    if cos is None or sin is None:
        return None, None, 0
    shared = cos.ndim == 2 or cos.shape[0] == 1
    return cos.contiguous(), sin.contiguous(), 0 if shared else cos.shape[1] * cos.shape[2]


def _allocate_partials(q: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the partial sums that programs store, a (D, D) and a (D,) each, as (B, chunks of tokens, H, ...)."""
    b, s, h, d = q.shape
    chunks = cdiv(s, tokens_per_program(s, d))
    dtype = accumulation_dtype(q.dtype)
    square = torch.empty((b, chunks, h, d, d), dtype=dtype, device=q.device)
    return square, torch.empty((b, chunks, h, d), dtype=dtype, device=q.device)


def _sum_chunks(partials: Tensor) -> Tensor:
    """Add up the programs' partial sums over the chunks of tokens (dimension 1); a view if there is only one chunk."""
    return partials.squeeze(1) if partials.shape[1] == 1 else partials.sum(1)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch ReLU linear attention: output (B, S, H, D) in q's dtype, state (B, H, D, D) and z (B, H, D)."""
    q, k, v = make_rows_contiguous(q), make_rows_contiguous(k), make_rows_contiguous(v)
    cos, sin, table_b = _prepare_tables(cos, sin)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    state, z = _allocate_partials(q)
    chunks, h = z.shape[1:3]
    grid = (z.shape[0] * chunks * h,)
    if output.numel():
        launch(
            state_kernel, grid, k, v, cos, sin, state, z, q.shape[1], h, chunks,
            *k.stride()[:3], *v.stride()[:3], table_b, **_get_launch_options(state_kernel, q, k, v),
        )  # fmt: skip
    state, z = _sum_chunks(state), _sum_chunks(z)
    if output.numel():
        launch(
            output_kernel, grid, q, cos, sin, state, z, output, q.shape[1], h, chunks,
            *q.stride()[:3], table_b, EPS=eps, **_get_launch_options(output_kernel, q, k, v),
        )  # fmt: skip
    return output, state, z


def launch_backward(operands: BackwardOperands, eps: float, grads: Sequence[Tensor | None]) -> None:
    """Launch the linear attention's backward: fill the buffers `grads` with dq, dk and dv; None skips a gradient."""
    if not operands.q.numel():
        return
    dq, dk, dv = grads
    grad, q, k, v = (make_rows_contiguous(x) for x in operands[:4])
    (cos, sin, table_b), state, z = _prepare_tables(*operands[4:6]), operands.state, operands.z
    dstate, dz = _allocate_partials(q)
    chunks, h = dz.shape[1:3]
    grid = (dz.shape[0] * chunks * h,)
    keys = dk is not None or dv is not None
    launch(
        query_grad_kernel, grid, grad, q, cos, sin, state, z, dq, dstate if keys else None, dz if keys else None,
        q.shape[1], h, chunks, *grad.stride()[:3], *q.stride()[:3], table_b,
        EPS=eps, **_get_launch_options(query_grad_kernel, q, k, v),
    )  # fmt: skip
    if keys:
        launch(
            key_grad_kernel, grid, k, v, cos, sin, _sum_chunks(dstate), _sum_chunks(dz), dk, dv,
            q.shape[1], h, chunks, *k.stride()[:3], *v.stride()[:3], table_b,
            **_get_launch_options(key_grad_kernel, q, k, v),
        )  # fmt: skip


# 4. op


@op("relu_linear_attention")
def relu_linear_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward op of ReLU linear attention, unchecked: output (B, S, H, D), state (B, H, D, D) and z (B, H, D)."""
    if launches(q):
        return launch_forward(q, k, v, cos, sin, eps)
    output, state, z = _compute_reference(q, k, v, cos, sin, eps)
    return output.contiguous(), state.contiguous(), z


@relu_linear_attention_forward.register_fake
def _fake_relu_linear_attention_forward(q: Tensor, *_args: Any) -> tuple[Tensor, Tensor, Tensor]:
    b, _, h, d = q.shape
    state = q.new_empty((b, h, d, d), dtype=accumulation_dtype(q.dtype))
    return q.new_empty(q.shape), state, state.new_empty((b, h, d))


@op("relu_linear_attention_backward")
def relu_linear_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    state: Tensor,
    z: Tensor,
    eps: float,
    needed_gradients: list[bool],
) -> list[Tensor]:
    """Backward op of ReLU linear attention: those of dq, dk and dv that `needed_gradients` selects, in this order."""
    operands = BackwardOperands(grad, q, k, v, cos, sin, state, z)
    grads = _allocate_gradients(q, k, v, needed_gradients)
    if launches(q):
        launch_backward(operands, eps, grads)
    else:
        values = _backward_reference(operands, eps)
        for gradient, value in zip(grads, values, strict=True):
            if gradient is not None:
                gradient.copy_(value)
    return [gradient for gradient in grads if gradient is not None]


def _allocate_gradients(q: Tensor, k: Tensor, v: Tensor, needed_gradients: Sequence[bool]) -> list[Tensor | None]:
    """Allocate dq, dk and dv, contiguous and in the inputs' dtypes; None for a gradient that is not needed."""
    return [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if want else None
        for x, want in zip((q, k, v), needed_gradients, strict=True)
    ]


@relu_linear_attention_backward.register_fake
def _fake_relu_linear_attention_backward(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> list[Tensor]:
    grads = _allocate_gradients(q, k, v, args[-1])
    return [gradient for gradient in grads if gradient is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cos, sin, ctx.eps = inputs
    _, state, z = output
    # Outputs only so that the backward can save them: no caller sees or differentiates them.
    ctx.mark_non_differentiable(state, z)
    ctx.set_materialize_grads(False)
    # In the order of BackwardOperands, without grad.
    ctx.save_for_backward(q, k, v, cos, sin, state, z)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    if grad is None or not any(needs):
        return (None,) * 6
    computed = iter(relu_linear_attention_backward(grad, *ctx.saved_tensors, ctx.eps, needs))
    return (*(next(computed) if want else None for want in needs), None, None, None)


relu_linear_attention_forward.register_autograd(_backward, setup_context=_setup_context)


def relu_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None = None, sin: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """Compute ReLU linear attention of every head, with sums in fp32; a query that would divide by about 0 gives 0.

    q, k, v are (B, S, H, D) in any floating dtype and any strides with a contiguous last dimension (views of the
    projections). The result is a contiguous (B, S, H, D) in q's dtype. `cos` and `sin`, (S, D) or (1 or B, S, D),
    rotate relu(q) and relu(k) in the numerator only: channels (2i, 2i+1) by the angle of cos[2i], sin[2i+1], in
    diffusers' layout; they get no gradient. `eps` is the relative bound below which a row is dead (see the module).

    Raises ValueError if q, k and v differ in shape or D > 128, a table does not fit, or eps is not positive.
    """
    if q.ndim != 4 or k.shape != q.shape or v.shape != q.shape:
        shapes = [tuple(x.shape) for x in (q, k, v)]
        raise ValueError(f"q, k and v must have the same shape (B, S, H, D); got {shapes}")
    b, s, _, d = q.shape
    if d > MAX_D:
        raise ValueError(f"a head can have at most {MAX_D} channels; got {d}")
    if not eps > 0:
        raise ValueError(f"eps must be positive; got {eps}, which would divide by 0 for a query of zeros")
    if (cos is None) != (sin is None):
        raise ValueError("got only one of cos and sin; give both or neither")
    if cos is not None and sin is not None:
        fits = tuple(cos.shape) in {(s, d), (1, s, d), (b, s, d)} and d % 2 == 0
        if not fits or sin.shape != cos.shape:
            expected_shapes = f"({s}, {d}), (1, {s}, {d}) or ({b}, {s}, {d}) with an even last dimension"
            got = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
            raise ValueError(f"cos and sin must both be {expected_shapes}; got {got}")
    return relu_linear_attention_forward(q, k, v, cos, sin, eps)[0]
