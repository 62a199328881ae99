"""QK-norm and rotary embedding of q or k, in one pass: ``out = R(norm(x) * weight + bias)``.

Shapes: B samples, S tokens, H heads, D elements per head; R tokens from `first` on are rotated, the others only
normed. `norm` is LayerNorm or RMSNorm over D, or over H*D (across heads), or none. With the pairs (a, b) = (2i, 2i+1)
or (i, i+D/2), ``R(y)[a] = y[a] cos[a] - y[b] sin[a]`` and ``R(y)[b] = y[b] cos[b] + y[a] sin[b]``. Tables hold each
angle twice, at a and at b, or once, at i.

Source: RoFormer, https://arxiv.org/abs/2104.09864, section 3.2; tables and formula are those of Diffusers'
`apply_rotary_emb` and `get_1d_rotary_pos_embed(use_real=True)`.

The backward starts from the output, which attention saves anyway: ``x_hat = (R^-1(out) - bias) / weight``, and with
``g = R^T(dout) * weight``: ``dx = rstd * (g - x_hat * mean(g * x_hat) - mean(g))``, the last term only for LayerNorm.

Traffic in passes over x: forward 2, backward 3 (2 without a norm), in addition to the tables and rstd. Saved for the
backward in addition to `output`: rstd, fp32, one number per head (or per token, across heads).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dit_lora_kernels.qk_norm_rope_kernels import (
    BackwardOperands,
    Gradients,
    NormRopeOptions,
    launch_backward,
    launch_forward,
)
from dit_lora_kernels.support import accumulation_dtype, launches, op

# 1. reference


def _rotate_pairs_by_90_degrees(y: Tensor, rotation: str) -> Tensor:
    """(-b, a) for every pair (a, b) of the last dimension, at the pairs' positions."""
    if rotation == "half":
        a, b = y.chunk(2, dim=-1)
        return torch.cat([-b, a], dim=-1)
    return torch.stack([-y[..., 1::2], y[..., 0::2]], dim=-1).flatten(-2)


def _count_rotated_tokens(table: Tensor) -> int:
    """Number of tokens that a table rotates."""
    return table.shape[1 if table.ndim == 4 else -2]


def _expand_table(table: Tensor, width: int, rotation: str) -> Tensor:
    """Expand a table to (..., R, 1 or H, D), with each angle at both elements of its pair."""
    if table.ndim < 4:
        return table.unflatten(-1, (-1, width))
    if rotation == "half":
        return torch.cat([table, table], dim=-1)
    return table.repeat_interleave(2, dim=-1)


def _apply_rotation(
    y: Tensor, cos: Tensor | None, sin: Tensor | None, options: NormRopeOptions, sign: int = 1
) -> Tensor:
    """Apply R to the tokens of y (B,S,H,D) that have a row in the tables; with `sign` -1 its inverse."""
    if cos is None or sin is None:
        return y
    # The inverse is the transpose, in which each sine goes with the element that it is in a row with: before the turn.
    stop = options.first + _count_rotated_tokens(cos)
    c, s = (_expand_table(table.to(y.dtype), y.shape[-1], options.rotation) for table in (cos, sin))
    part = y[:, options.first : stop]
    if sign > 0:
        part = part * c + _rotate_pairs_by_90_degrees(part, options.rotation) * s
    else:
        part = part * c - _rotate_pairs_by_90_degrees(part * s, options.rotation)
    return torch.cat([y[:, : options.first], part, y[:, stop:]], dim=1)


def _normalize(x: Tensor, options: NormRopeOptions) -> tuple[Tensor, Tensor]:
    """Compute x_hat (B,S,H,D) and rstd (B,S,H or 1,1) of x (B,S,H,D)."""
    dims = (-2, -1) if options.across_heads else (-1,)
    if options.norm == "layer":
        x = x - x.mean(dims, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + options.eps)
    return x * rstd, rstd


def _by_head(parameter: Tensor | None, x: Tensor, otherwise: float) -> Tensor:
    """A parameter (D,) or (H*D,) as (1 or H, D) in x's dtype; filled with `otherwise` if it is missing."""
    if parameter is None:
        return x.new_full((1, x.shape[-1]), otherwise)
    return parameter.to(x.dtype).view(-1, x.shape[-1])


def qk_norm_rope_reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    norm: str,
    eps: float,
    across_heads: bool = False,
    rotation: str = "interleaved",
    first: int = 0,
) -> Tensor:
    """Reference of `qk_norm_rope`: plain torch, differentiable, fp32 inside (fp64 for fp64), rounded once."""
    options = NormRopeOptions(norm, eps, across_heads, rotation, first)
    y = x.to(accumulation_dtype(x.dtype))
    if norm != "none":
        y = _normalize(y, options)[0] * _by_head(weight, y, 1.0) + _by_head(bias, y, 0.0)
    return _apply_rotation(y, cos, sin, options).to(x.dtype)


def _compute_reference_gradients(
    operands: BackwardOperands, options: NormRopeOptions, needs: Sequence[bool]
) -> Gradients:
    """`launch_backward` in plain torch: fp32 inside (fp64 for fp64)."""
    grad, source, rstd, weight, bias, cos, sin = operands
    wide = accumulation_dtype(grad.dtype)
    dy = _apply_rotation(grad.to(wide), cos, sin, options, sign=-1)
    if source is None:
        return dy.to(grad.dtype), None, None
    w = _by_head(weight, dy, 1.0)
    if rstd is None:
        x_hat, rstd = _normalize(source.to(wide), options)
    else:
        y = _apply_rotation(source.to(wide), cos, sin, options, sign=-1)
        x_hat, rstd = (y - _by_head(bias, y, 0.0)) / w, rstd[..., None]
    dims = (-2, -1) if options.across_heads else (-1,)
    g = dy * w
    dx = g - x_hat * (g * x_hat).mean(dims, keepdim=True)
    if options.norm == "layer":
        dx = dx - g.mean(dims, keepdim=True)
    rows = (0, 1) if options.across_heads else (0, 1, 2)
    dweight = dbias = None
    if needs[1] and weight is not None:
        dweight = (dy * x_hat).sum(rows).flatten().to(weight.dtype)
    if needs[2] and bias is not None:
        dbias = dy.sum(rows).flatten().to(bias.dtype)
    return (dx * rstd).to(grad.dtype) if needs[0] else None, dweight, dbias


# 2. op


@op("qk_norm_rope")
def _forward_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    norm: str,
    eps: float,
    across_heads: bool,
    rotation: str,
    first: int,
    from_output: bool,
) -> tuple[Tensor, Tensor]:
    """The forward op: the output, and rstd if the backward starts from the output (else an empty tensor)."""
    options = NormRopeOptions(norm, eps, across_heads, rotation, first)
    rstd = torch.empty(_get_rstd_shape(x, options, from_output), dtype=accumulation_dtype(x.dtype), device=x.device)
    if launches(x):
        output = launch_forward(x, weight, bias, cos, sin, options, rstd if from_output else None)
        return output, rstd
    if from_output:
        rstd = _normalize(x.to(rstd.dtype), options)[1].squeeze(-1)
    output = qk_norm_rope_reference(x, weight, bias, cos, sin, **options._asdict())
    return output.contiguous(), rstd


def _get_rstd_shape(x: Tensor, options: NormRopeOptions, from_output: bool) -> tuple[int, ...]:
    """Shape of rstd: (B,S,H), (B,S,1) across heads, or (0,) if it is not saved."""
    if not from_output:
        return (0,)
    return (*x.shape[:2], 1 if options.across_heads else x.shape[2])


@_forward_op.register_fake
def _fake_forward(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *_parameters, norm, eps, across_heads, rotation, first, from_output = args
    options = NormRopeOptions(norm, eps, across_heads, rotation, first)
    rstd = x.new_empty(_get_rstd_shape(x, options, from_output), dtype=accumulation_dtype(x.dtype))
    return x.new_empty(x.shape), rstd


@op("qk_norm_rope_backward")
def _backward_op(
    grad: Tensor,
    source: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    norm: str,
    eps: float,
    across_heads: bool,
    rotation: str,
    first: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward op: gradients of x, weight and bias; an empty tensor for one that is not needed."""
    options = NormRopeOptions(norm, eps, across_heads, rotation, first)
    operands = BackwardOperands(grad, source, rstd, weight, bias, cos, sin)
    compute = launch_backward if launches(grad) else _compute_reference_gradients
    gradients = compute(operands, options, needs)
    # An op's schema has no optional results: an empty tensor stands for a gradient that is not needed.
    dx, dweight, dbias = (grad.new_empty(0) if g is None else g for g in gradients)
    return dx, dweight, dbias


@_backward_op.register_fake
def _fake_backward(
    grad: Tensor, _source: Tensor | None, _rstd: Tensor | None, weight: Tensor | None, bias: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needs = args[-1]
    return (
        grad.new_empty(grad.shape if needs[0] else (0,)),
        grad.new_empty(0) if weight is None or not needs[1] else torch.empty_like(weight),
        grad.new_empty(0) if bias is None or not needs[2] else torch.empty_like(bias),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, cos, sin, norm, *options, from_output = inputs
    normed, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.options = (norm, *options)
    # In the order of BackwardOperands, without grad. A rotation without a norm is undone with its tables; a norm needs
    # its output, which attention keeps anyway, or x.
    if norm == "none":
        ctx.save_for_backward(None, None, None, None, cos, sin)
    elif from_output:
        ctx.save_for_backward(normed, rstd, weight, bias, cos, sin)
    else:
        ctx.save_for_backward(x, None, weight, bias, cos, sin)


def _backward(ctx: Any, grad: Tensor, _grad_rstd: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])
    computed = _backward_op(grad, *ctx.saved_tensors, *ctx.options, needs)
    gradients = [g if need else None for g, need in zip(computed, needs, strict=True)]
    return (*gradients, *(None for _ in range(8)))  # none for the tables and the settings


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def recoverable(weight: Tensor | None, bias: Tensor | None = None) -> bool:
    """True if x_hat can be computed from a 16-bit output. Synchronizes with the GPU: call it once, when a model is
    patched.

    The output's rounding error, relative to the row, is divided by each weight: no weight may be below 1e-3, and
    rms(weight, bias) / |weight| may be at most 16 in the root mean square over the elements. At that limit the
    gradient's error equals that of rounding it to bf16.
    """
    if weight is None:
        return True
    size = weight.detach().double().abs()
    if not bool((size > 1e-3).all()):
        return False
    power = size.square().mean()
    if bias is not None:
        power = power + bias.detach().double().square().mean()
    return bool((power / size.square()).mean().sqrt() <= 16)


def _check_operands(
    x: Tensor, parameters: dict[str, Tensor | None], cos: Tensor | None, sin: Tensor | None, options: NormRopeOptions
) -> None:
    """Raise a ValueError that names the operand or setting that the kernels do not support."""
    if x.ndim != 4 or not x.is_floating_point() or x.shape[3] % 2:
        raise ValueError(f"x is (B, S, H, D), floating, with an even D; got {x.dtype} {tuple(x.shape)}")
    if options.norm not in ("layer", "rms", "none"):
        raise ValueError(f"norm is 'layer', 'rms' or 'none', not {options.norm!r}")
    if options.rotation not in ("interleaved", "half"):
        raise ValueError(f"rotation is 'interleaved' or 'half', not {options.rotation!r}")
    batch, tokens, heads, width = x.shape
    size = heads * width if options.across_heads else width
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if options.norm == "none":
            raise ValueError(f"{name} is given, but norm is 'none': there is nothing to scale")
        if parameter.shape != (size,):
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}; this norm needs ({size},)")
    if cos is None and sin is None:
        return
    if cos is None or sin is None or cos.shape != sin.shape:
        shapes = [None if t is None else tuple(t.shape) for t in (cos, sin)]
        raise ValueError(f"cos and sin come together, in one shape; got {shapes[0]} and {shapes[1]}")
    if cos.ndim == 4:
        fits = cos.shape[2] in (1, heads) and cos.shape[3] == width // 2
    else:
        fits = cos.shape[-1] in (width, heads * width) and cos.ndim in (2, 3)
    if not fits or (cos.ndim > 2 and cos.shape[0] not in (1, batch)):
        raise ValueError(
            "cos and sin are (R, D), (1 or B, R, D), (1 or B, R, H*D) or (1 or B, R, 1 or H, D/2) for x "
            f"{tuple(x.shape)}; got {tuple(cos.shape)}"
        )
    stop = options.first + _count_rotated_tokens(cos)
    if options.first < 0 or stop > tokens:
        raise ValueError(f"the tables rotate tokens {options.first} to {stop}, but x has {tokens}")


def qk_norm_rope(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    norm: str,
    eps: float,
    across_heads: bool = False,
    rotation: str = "interleaved",
    first: int = 0,
    from_output: bool = True,
) -> Tensor:
    """Normalise the heads of x and rotate tokens `first` to `first + R`, in one pass each way.

    x: (B, S, H, D), any strides with a contiguous D, even. weight, bias: (D,), or (H*D,) across heads. cos, sin: (R,
    D), (1 or B, R, D) or (1 or B, R, H*D), rotations (cos^2 + sin^2 = 1 in every pair), not differentiated; or (1 or
    B, R, 1 or H, D/2), which holds the angle of a pair once. Returns (B, S, H, D) contiguous, in x's dtype; fp32
    inside, fp64 for fp64.

    `from_output`: the backward computes x_hat from the output; pass `recoverable(weight, bias)`, computed
    once. If False, or if weight or bias is trained, x is saved instead. Source: see the module.

    Raises:
        ValueError: a shape, `norm` or `rotation` other than these; a weight or bias without a norm.
    """
    options = NormRopeOptions(norm, eps, across_heads, rotation, first)
    _check_operands(x, {"weight": weight, "bias": bias}, cos, sin, options)
    if norm == "none" and cos is None:
        return x.contiguous()
    # Trained parameters move away from the values that `recoverable` saw.
    trained = any(t is not None and t.requires_grad for t in (weight, bias))
    from_output = from_output and norm != "none" and not trained
    output, _rstd = _forward_op(x, weight, bias, cos, sin, *options, from_output)
    return output
