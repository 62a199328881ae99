"""Attention of Sana and SanaVideo, linear in the number of tokens, for training::

    p, c = relu(q), relu(k);   state = sum_t (R c_t) v_t',   z = sum_t c_t
    out_s = (R p_s) @ state / (p_s . z),   or 0 where the row is dead

Shapes: B batch, S tokens, H heads, D channels of a head; R rotates the pairs (2i, 2i+1) by the token's angle,
or is absent. The state is D x D and z is D per sample and head, in fp32 whatever autocast says.

Dead rows. Row s is dead where ``p_s . z <= eps * max(sum p_s, sum z)``, the sums over the channels in which p_s
and z are both positive (the others add nothing to p_s . z and take no gradient): where the mean of its query,
weighted by z, or the mean of z, weighted by its query, is at most eps. A dead row attends to nothing: its output
and every gradient through it are 0. Neither other queries nor the number of tokens decide. Any other row is divided
by p_s . z itself, which is then more than eps^2. The stock processors add 1e-15 to it instead: below rounding in
fp32 where p_s . z > 1e-8, 0 in fp16, and the gradient of a tiny query grows to 1e13 and more. Here, without R,
|dq| <= 2 |dout| |v| / eps. A NaN or an Inf in a row's query is not hidden: its output is NaN.

Source: Sana, https://arxiv.org/abs/2410.10629 (diffusers `SanaLinearAttnProcessor2_0`); SanaVideo,
https://arxiv.org/abs/2509.24695 (`SanaLinearAttnProcessor3_0`: numerator rotated, denominator not).
Traffic, in u = B*S*H*D elements: forward reads k, v, q and writes out, 4u; backward reads q, dout, k, v and
writes dq, dk, dv, 7u. Beside q, k, v themselves only state and z are kept.
"""

from typing import Any

import torch
from torch import Tensor

from dit_lora_kernels.relu_linear_attention_kernels import (
    MAX_D,
    launch_backward,
    launch_forward,
)
from dit_lora_kernels.support import launches

# 1. the reference: the definition, and the path without Triton


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _table(table: Tensor) -> Tensor:
    """(S,D) or (1|B,S,D) as (1|B,S,D)."""
    return table if table.ndim == 3 else table[None]


def _rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    if cos is None or sin is None:
        return x
    c = _table(cos)[:, :, None, 0::2].to(x.dtype)
    s = _table(sin)[:, :, None, 1::2].to(x.dtype)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([first * c - second * s, first * s + second * c], -1).flatten(-2)


def _inverse(p: Tensor, z: Tensor, eps: float) -> Tensor:
    """1 / (p . z) of each row (B,S,H,1), 0 of a dead row."""
    z = z[:, None]
    den = (p * z).sum(-1, keepdim=True)
    shared = (p > 0) & (z > 0)
    p_sum = torch.where(shared, p, 0).sum(-1, keepdim=True)
    z_sum = torch.where(shared, z, 0).sum(-1, keepdim=True)
    dead = den <= eps * torch.maximum(p_sum, z_sum)
    return torch.where(dead, 0, 1 / torch.where(dead, 1, den))


def _reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        p, c, v = q.to(_wide(q)).relu(), k.to(_wide(q)).relu(), v.to(_wide(q))
        z = c.sum(1)
        state = torch.einsum("bshd,bshe->bhde", _rotate(c, cos, sin), v)
        out = torch.einsum("bshd,bhde->bshe", _rotate(p, cos, sin), state) * _inverse(p, z, eps)
        return out.to(q.dtype), state, z


def relu_linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """`relu_linear_attention` in plain torch: differentiable, fp32 inside (fp64 of fp64), rounded once."""
    return _reference(q, k, v, cos, sin, eps)[0]


def _backward_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    state: Tensor,
    z: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    back = None if sin is None else -sin
    with torch.autocast(q.device.type, enabled=False):
        p, c = q.to(state.dtype).relu(), k.to(state.dtype).relu()
        inverse = _inverse(p, z, eps)
        g = grad.to(state.dtype) * inverse
        turned = _rotate(p, cos, sin)
        u = torch.einsum("bshe,bhde->bshd", g, state)
        dden = -inverse * (turned * u).sum(-1, keepdim=True)
        dp = _rotate(u, cos, back) + dden * z[:, None]
        dstate = torch.einsum("bshd,bshe->bhde", turned, g)
        dz = (p * dden).sum(1)
        dc = torch.einsum("bshe,bhde->bshd", v.to(state.dtype), dstate)
        dc = _rotate(dc, cos, back) + dz[:, None]
        dv = torch.einsum("bshd,bhde->bshe", _rotate(c, cos, sin), dstate)
        return torch.where(p <= 0, 0, dp), torch.where(c <= 0, 0, dc), dv


# 4. the op; the kernels (2) and their launchers (3) are in relu_linear_attention_kernels.py


def _allocate(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b, _, h, d = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    state = torch.empty((b, h, d, d), dtype=_wide(q), device=q.device)
    return out, state, torch.empty((b, h, d), dtype=_wide(q), device=q.device)


@torch.library.custom_op(
    "dit_lora::relu_linear_attention", mutates_args=(), device_types=("cuda", "cpu")
)
def relu_linear_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `state` (B,H,D,D) and `z` (B,H,D)."""
    if launches(q):
        return launch_forward(q, k, v, cos, sin, eps)
    out, state, z = _reference(q, k, v, cos, sin, eps)
    return out.contiguous(), state.contiguous(), z


@relu_linear_attention_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _allocate(q)


@torch.library.custom_op(
    "dit_lora::relu_linear_attention_backward", mutates_args=(), device_types=("cuda", "cpu")
)
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
    wanted: list[bool],
) -> list[Tensor]:
    """Those that are wanted of dq, dk, dv."""
    grads = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if want else None
        for x, want in zip((q, k, v), wanted, strict=True)
    ]
    if launches(q):
        launch_backward(grad, q, k, v, cos, sin, state, z, eps, grads)
    else:
        values = _backward_reference(grad, q, k, v, cos, sin, state, z, eps)
        for own, value in zip(grads, values, strict=True):
            if own is not None:
                own.copy_(value)
    return [own for own in grads if own is not None]


@relu_linear_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    state: Tensor,
    z: Tensor,
    eps: float,
    wanted: list[bool],
) -> list[Tensor]:
    pairs = zip((q, k, v), wanted, strict=True)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x, want in pairs if want]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cos, sin, ctx.eps = inputs
    _, state, z = output
    ctx.mark_non_differentiable(state, z)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, cos, sin, state, z)


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    if grad is None or not any(wanted):
        return (None,) * 6
    found = iter(relu_linear_attention_backward(grad, *ctx.saved_tensors, ctx.eps, wanted))
    return (*(next(found) if want else None for want in wanted), None, None, None)


relu_linear_attention_forward.register_autograd(_backward, setup_context=_setup_context)


def relu_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """ReLU linear attention of every head, its state and its normaliser in fp32; no NaN from dead queries.

    q, k, v are (B,S,H,D) of any float dtype and any strides with a contiguous last dimension (views of the
    projections); the result is a contiguous (B,S,H,D) of q's dtype. `cos` and `sin`, (S,D) or (1|B,S,D), rotate
    relu(q) and relu(k) in the numerator only: channels (2i, 2i+1) by the angle of cos[2i], sin[2i+1], as diffusers
    lays them out; they take no gradient. `eps` is the relative bound of a dead row, see the top of this file.

    Raises ValueError where q, k and v differ in shape or D > 128, a table does not fit, or eps is not positive.
    """
    if q.ndim != 4 or k.shape != q.shape or v.shape != q.shape:
        shapes = [tuple(x.shape) for x in (q, k, v)]
        raise ValueError(f"q, k and v must have one shape (B,S,H,D), got {shapes}")
    b, s, _, d = q.shape
    if d > MAX_D:
        raise ValueError(f"a head may have at most {MAX_D} channels, got {d}")
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}: a query of zeros would divide by 0")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin go together: give both or neither")
    if cos is not None and sin is not None:
        fits = tuple(cos.shape) in {(s, d), (1, s, d), (b, s, d)} and d % 2 == 0
        if not fits or sin.shape != cos.shape:
            wanted = f"({s},{d}), (1,{s},{d}) or ({b},{s},{d}), the last dimension even"
            got = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
            raise ValueError(f"cos and sin must both be {wanted}; got {got}")
    return relu_linear_attention_forward(q, k, v, cos, sin, eps)[0]
