"""QK-norm and rotary embedding of q or k, in one pass: ``out = rotate(norm(x) * weight + bias)``.

Shapes: B samples, S tokens, H heads, D elements per head, R rotated tokens. The R tokens from number `first` on are
rotated; the others are only normalised. The norm is LayerNorm or RMSNorm over the D elements of a head, or over all
H*D elements of a token ("across heads"), or none.

Terms of this module and of qk_norm_rope_kernels.py:

- Pair: two elements (a, b) of a head that are rotated together by one angle. They are (2i, 2i+1) if `rotation` is
  "interleaved", and (i, i+D/2) if it is "half". Rotation by an angle t gives ``a cos(t) - b sin(t)`` and
  ``b cos(t) + a sin(t)``.
- Tables: cos and sin of the angles, with a row for each rotated token. They hold a pair's angle twice, at both of its
  elements, or once, as a table of D/2 columns.
- x_hat: the normalised row, before weight and bias. rstd: ``1 / sqrt(variance + eps)`` of a row; RMSNorm takes the
  mean square for the variance.
- dout, dx and so on are gradients. dy is dout rotated back, the gradient of ``y = norm(x) * weight + bias``.

Source: RoFormer, https://arxiv.org/abs/2104.09864, section 3.2; tables and formula are those of Diffusers'
`apply_rotary_emb` and `get_1d_rotary_pos_embed(use_real=True)`.

The backward starts from the output, which attention saves anyway: ``x_hat = (rotate_back(out) - bias) / weight``. With
``g = dy * weight`` it computes ``dx = rstd * (g - x_hat * mean(g * x_hat) - mean(g))``; the last term is for LayerNorm
only.

Memory traffic in passes over x: forward 2, backward 3 (2 without a norm), in addition to the tables and rstd. Saved
for the backward in addition to the output: rstd, fp32, one number per head (or per token, across heads).
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
    """Replace every pair (a, b) of the last dimension by (-b, a).

    The pairs are the elements (2i, 2i+1) if `rotation` is "interleaved", and (i, i+D/2) if it is "half".
    """
    if rotation == "half":
        a, b = y.chunk(2, dim=-1)
        return torch.cat([-b, a], dim=-1)
    return torch.stack([-y[..., 1::2], y[..., 0::2]], dim=-1).flatten(-2)


def _count_rotated_tokens(table: Tensor) -> int:
    """Number of tokens that a rotary table (cosines or sines) has rows for: R in its shape."""
    return table.shape[1 if table.ndim == 4 else -2]


def _expand_rotation_table(table: Tensor, width: int, rotation: str) -> Tensor:
    """Reshape a table of cosines or sines to (..., R, 1 or H, D), with the angle of each pair at both of its elements.

    R is the number of rotated tokens, and `width` is D. A table of D/2 columns holds each angle once, and is repeated.
    """
    if table.ndim < 4:
        return table.unflatten(-1, (-1, width))
    if rotation == "half":
        return torch.cat([table, table], dim=-1)
    return table.repeat_interleave(2, dim=-1)


def _apply_rotation(
    y: Tensor, cos: Tensor | None, sin: Tensor | None, options: NormRopeOptions, sign: int = 1
) -> Tensor:
    """Rotate the pairs of elements of y (B, S, H, D) in the tokens that have a row in the tables `cos` and `sin`.

    `sign` -1 applies the inverse rotation. Without tables y is returned as it is.
    """
    if cos is None or sin is None:
        return y
    # The inverse rotation is the transpose, in which each sine multiplies the element at its own position, before the
    # pairs are rotated by 90 degrees.
    stop = options.first + _count_rotated_tokens(cos)
    c, s = (_expand_rotation_table(table.to(y.dtype), y.shape[-1], options.rotation) for table in (cos, sin))
    part = y[:, options.first : stop]
    if sign > 0:
        part = part * c + _rotate_pairs_by_90_degrees(part, options.rotation) * s
    else:
        part = part * c - _rotate_pairs_by_90_degrees(part * s, options.rotation)
    return torch.cat([y[:, : options.first], part, y[:, stop:]], dim=1)


def _normalize(x: Tensor, options: NormRopeOptions) -> tuple[Tensor, Tensor]:
    """Normalise q or k, x (B, S, H, D), without weight and bias.

    Also returns rstd (B, S, H, 1), or (B, S, 1, 1) across heads.

    rstd is ``1 / sqrt(variance + eps)``, for RMSNorm of the mean square.
    """
    dims = (-2, -1) if options.across_heads else (-1,)
    if options.norm == "layer":
        x = x - x.mean(dims, keepdim=True)
    rstd = torch.rsqrt(x.square().mean(dims, keepdim=True) + options.eps)
    return x * rstd, rstd


def _by_head(parameter: Tensor | None, x: Tensor, otherwise: float) -> Tensor:
    """View a norm's weight or bias (D,) or (H*D,) as (1 or H, D) in x's dtype; a row of `otherwise` if it is None."""
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
    """Normalise and rotate the heads of q or k in plain torch, differentiably, as the reference for the kernel.

    It computes in fp32 (fp64 for fp64 inputs) and rounds the result once, to x's dtype.
    """
    options = NormRopeOptions(norm, eps, across_heads, rotation, first)
    y = x.to(accumulation_dtype(x.dtype))
    if norm != "none":
        y = _normalize(y, options)[0] * _by_head(weight, y, 1.0) + _by_head(bias, y, 0.0)
    return _apply_rotation(y, cos, sin, options).to(x.dtype)


def _compute_reference_gradients(
    operands: BackwardOperands, options: NormRopeOptions, needs: Sequence[bool]
) -> Gradients:
    """Compute the gradients of norm and rotation (of x, weight and bias) in plain torch, as the kernel's reference.

    It computes in fp32 (fp64 for fp64 inputs). `needs` says which of the three are needed; the others are None.
    """
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
    """Normalise and rotate the heads of x (B, S, H, D); this is the forward op of `qk_norm_rope`.

    Returns the output, and rstd of each normalised row if the backward starts from the output (`from_output`).
    Otherwise the second result is an empty tensor.
    """
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
    """Shape of rstd, one number per normalised row: (B, S, H), or (B, S, 1) across heads, or (0,) if not saved."""
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
    """Compute the gradients of norm and rotation for x, weight and bias; this is the backward op of `qk_norm_rope`.

    `source` is the forward's output if `rstd` is passed, else its x. `needs` says which gradients are needed. An empty
    tensor is returned for one that is not.
    """
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
    """True if the backward may compute the normalised x from a 16-bit output of `qk_norm_rope` with these weights.

    It synchronizes with the GPU: call it once, when a model is patched. The backward divides by the weight, which
    amplifies the output's rounding error. No element of the weight may be below 1e-3, and rms(weight, bias) / |weight|
    may be at most 16 in the root mean square over the elements. At that limit the gradient's error equals that of
    rounding it to bf16.
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
    """Raise a ValueError that names the operand or setting that `qk_norm_rope` does not support."""
    if x.ndim != 4 or not x.is_floating_point() or x.shape[3] % 2:
        raise ValueError(f"x must be floating-point (B, S, H, D) with an even D; got {x.dtype} {tuple(x.shape)}")
    if options.norm not in ("layer", "rms", "none"):
        raise ValueError(f"norm must be 'layer', 'rms' or 'none'; got {options.norm!r}")
    if options.rotation not in ("interleaved", "half"):
        raise ValueError(f"rotation must be 'interleaved' or 'half'; got {options.rotation!r}")
    batch, tokens, heads, width = x.shape
    size = heads * width if options.across_heads else width
    for name, parameter in parameters.items():
        if parameter is None:
            continue
        if options.norm == "none":
            raise ValueError(f"{name} has no effect with norm 'none'; leave it out")
        if parameter.shape != (size,):
            raise ValueError(f"{name} must be ({size},); got {tuple(parameter.shape)}")
    if cos is None and sin is None:
        return
    if cos is None or sin is None or cos.shape != sin.shape:
        shapes = [None if t is None else tuple(t.shape) for t in (cos, sin)]
        raise ValueError(f"cos and sin must have the same shape, or both be None; got {shapes[0]} and {shapes[1]}")
    if cos.ndim == 4:
        fits = cos.shape[2] in (1, heads) and cos.shape[3] == width // 2
    else:
        fits = cos.shape[-1] in (width, heads * width) and cos.ndim in (2, 3)
    if not fits or (cos.ndim > 2 and cos.shape[0] not in (1, batch)):
        raise ValueError(
            "cos and sin must be (R, D), (1 or B, R, D), (1 or B, R, H*D) or (1 or B, R, 1 or H, D/2) for x "
            f"{tuple(x.shape)}; got {tuple(cos.shape)}"
        )
    stop = options.first + _count_rotated_tokens(cos)
    if options.first < 0 or stop > tokens:
        raise ValueError(
            f"cos and sin cover tokens {options.first} to {stop - 1}, but x has tokens 0 to {tokens - 1}; "
            "pass another `first` or fewer rows"
        )


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
    """Normalise the heads of x and rotate their pairs of elements, in one pass forward and one backward.

    The pairs are (2i, 2i+1) or (i, i+D/2). Tokens `first` to `first + R` are rotated, where R is the number of rows of
    the tables; the others are only normalised. See the module for the formulas and their source.

    Args:
        x: (B, S, H, D) with an even D; any strides with adjacent elements of D.
        weight: (D,), or (H*D,) with `across_heads`; None for a norm without it.
        bias: As weight.
        cos: Cosines of the rotation, (R, D), (1 or B, R, D) or (1 or B, R, H*D), with each pair's angle at both
            elements; or (1 or B, R, 1 or H, D/2), with each pair's angle once. They are not differentiated. None for
            no rotation.
        sin: Sines in the same shape; cos^2 + sin^2 = 1 for every pair.
        norm: "layer", "rms" or "none".
        eps: Added to the variance (or the mean square) before the square root.
        across_heads: Normalise all H*D elements of a token together, not each head.
        rotation: "interleaved" for pairs (2i, 2i+1), "half" for pairs (i, i+D/2).
        first: The first token that is rotated.
        from_output: Whether the backward may compute the normalised x from the output, which saves the memory of x.
            Pass `recoverable(weight, bias)`, computed once. x is saved if this is False, or if weight or bias is
            trained.

    Returns:
        (B, S, H, D), contiguous, in x's dtype, computed in fp32 (fp64 for fp64).

    Raises:
        ValueError: a shape, `norm` or `rotation` other than these, or a weight or bias without a norm.
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
