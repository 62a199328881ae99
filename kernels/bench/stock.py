"""What the models run today, in a few lines an op: the eager side of every comparison.

Each function takes a case's operands by name and returns its outputs, in the layout of ours. The order of casts is
that of Diffusers and PEFT, since those passes are what is compared; fp64 operands stay fp64, for the exact values.

Shapes: B batch, T tokens of a stream, S of all, D width, H heads, E of a head, R rank, C channels.
"""

import torch
from torch import Tensor
from torch.nn import functional

Operands = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


def wide(x: Tensor) -> Tensor:
    """Return what the stock code's `.float()` does, but leave fp64, in which the exact values are computed."""
    return x if x.dtype is torch.float64 else x.float()


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return LayerNorm over the last dimension, by PyTorch's own op."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return what Diffusers' own RMSNorm class does, over the last dimension, which is no fused op."""
    out = x * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + eps)
    return out.to(x.dtype) if weight is None else out.to(weight.dtype) * weight


def ada_norm(given: Operands, norm: str, eps: float) -> Outputs:
    """Return the norms of one or two streams (B,T,D), modulated, in one buffer (B,S,D); and each stream's residual.

    `norm`: `layer` with or without weight, `fp32` for Wan's LayerNorm, tables and residual in fp32, or `rms`.
    """
    outs, residuals = [], []
    for i in range(sum(name.startswith("x") for name in given)):
        x, shift, scale = (given[f"{name}{i}"] for name in ("x", "shift", "scale"))
        if f"y{i}" in given:
            # (B, 1, D): one row for all tokens of a sample.
            gate, y = given[f"gate{i}"][:, None], given[f"y{i}"]
            # Wan's tables are in fp32, and its block rounds the sum to the stream's dtype again.
            x = (wide(x) + y * gate).type_as(x) if norm == "fp32" else x + gate * y
        residuals.append(x)
        if norm == "fp32":
            normed = layer_norm(wide(x), None, None, eps)
        elif norm == "rms":
            normed = rms_norm(x, None, eps)
        else:
            normed = layer_norm(x, given.get("weight"), given.get("bias"), eps)
        out = normed * (1 + scale[:, None]) + shift[:, None]
        outs.append(out.type_as(x) if norm == "fp32" else out)
    # Streams follow one another along the tokens, as attention reads them.
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 1), *residuals)


def _turned(x: Tensor) -> Tensor:
    """Return (-b, a) for every pair (a, b) of the last dimension."""
    # (..., D) to (..., D / 2, 2), whose last dimension is the pair.
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-imaginary, real], dim=-1).flatten(-2)


def qk_norm_rope(given: Operands, kind: str, heads: int, first: int, eps: float) -> Outputs:
    """Return q (B,S,H*E) normed and rotated, as (B,S,H,E).

    `kind`: `layer` over a head, tokens from `first` on rotated, if there are tables (CogVideoX); `across`, RMS over
    H*E and a table per head (Wan); `inner`, the same with tables over H*E and Diffusers' RMSNorm (LTX); `split`, RMS
    over H*E, pairs of halves and tables (B,S,H,E/2) with each angle once (LTX-2).
    """
    x, weight, cos, sin = (given.get(name) for name in ("x", "weight", "cos", "sin"))
    assert x is not None
    if kind == "layer":
        q = x.unflatten(2, (heads, -1)).transpose(1, 2)
        q = layer_norm(q, weight, given["bias"], eps)
        if cos is not None and sin is not None:
            tail = q[:, :, first:]
            turned = (wide(tail) * cos + wide(_turned(tail)) * sin).to(q.dtype)
            q[:, :, first:] = turned
        return (q.transpose(1, 2),)
    assert weight is not None
    assert cos is not None
    assert sin is not None
    if kind == "inner":
        q = rms_norm(x, weight, eps)
        q = (wide(q) * cos + wide(_turned(q)) * sin).to(q.dtype)
        return (q.unflatten(2, (heads, -1)),)
    q = functional.rms_norm(x, x.shape[-1:], weight, eps).unflatten(2, (heads, -1))
    if kind == "split":
        halves = wide(q).unflatten(-1, (2, -1))
        turned = halves * cos[..., None, :]
        turned[..., 0, :].addcmul_(-sin, halves[..., 1, :])
        turned[..., 1, :].addcmul_(sin, halves[..., 0, :])
        return (turned.flatten(-2).to(q.dtype),)
    a, b = q.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[:, None, 0::2], sin[:, None, 1::2]
    out = torch.empty_like(q)
    out[..., 0::2] = a * c - b * s
    out[..., 1::2] = a * s + b * c
    return (out.type_as(q),)


def lora_projections(given: Operands, names: str, scaling: float) -> Outputs:
    """Return what PEFT's linear layer makes of x (B,S,D), for each of `names`."""
    outs = []
    for name in names:
        weight, a, b = given[f"w{name}"], given[f"a{name}"], given[f"b{name}"]
        out = functional.linear(given["x"], weight, given[f"bias{name}"])
        # PEFT casts the input to the adapter's dtype; the sum is in the wider of both, and cast back.
        low = functional.linear(given["x"].to(a.dtype), a)
        outs.append((out + functional.linear(low, b) * scaling).to(out.dtype))
    return tuple(outs)


def base_products(given: Operands, names: str) -> Outputs:
    """Return what the frozen layers alone make of x (B,S,D)."""
    return tuple(functional.linear(given["x"], given[f"w{n}"], given[f"bias{n}"]) for n in names)


def relu_linear_attention(given: Operands) -> Outputs:
    """Return what Diffusers' SanaLinearAttnProcessor2_0 does between the projections, (B,S,H,E)."""
    q, k, v = (given[name].flatten(2).transpose(1, 2) for name in "qkv")
    heads = given["q"].shape[2]
    q = wide(functional.relu(q.unflatten(1, (heads, -1))))
    k = wide(functional.relu(k.unflatten(1, (heads, -1)).transpose(2, 3)))
    # A row of ones under v: its product with k is the normaliser, so that one matmul makes numerator and denominator.
    v = functional.pad(wide(v.unflatten(1, (heads, -1))), (0, 0, 0, 1), value=1.0)
    out = wide(torch.matmul(torch.matmul(v, k), q))
    out = out[:, :, :-1] / (out[:, :, -1:] + 1e-15)
    return (out.permute(0, 3, 1, 2).to(given["q"].dtype),)


def silu_dwconv_glu(given: Operands) -> Outputs:
    """Return the middle of Diffusers' GLUMBConv, channels first as there; h (B,H,W,2C) is a view of that memory."""
    h = functional.silu(given["h"].permute(0, 3, 1, 2))
    h = functional.conv2d(h, given["weight"], given["bias"], padding=1, groups=h.shape[1])
    a, gate = h.chunk(2, dim=1)
    return ((a * functional.silu(gate)).permute(0, 2, 3, 1),)


def norms(given: Operands, count: int) -> Outputs:
    """Return the L2 norm of every `count`-th tensor (count,), with torch's foreach norm as in `clip_grad_norm_`."""
    tensors = list(given.values())
    group_norms = []
    for group in range(count):
        tensor_norms = torch._foreach_norm(tensors[group::count])
        group_norms.append(torch.linalg.vector_norm(torch.stack(tensor_norms)))
    return (torch.stack(group_norms),)
