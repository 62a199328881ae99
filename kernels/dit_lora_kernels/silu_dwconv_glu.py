"""SiLU, depthwise 3x3 convolution and gated linear unit in one pass: the middle of Sana's Mix-FFN.

    s = silu(h)
    a, g = halves of conv3x3(s) + bias, a filter a channel, zero padding 1
    out = a * silu(g)

Shapes: B samples, H rows, W columns; h has 2C channels, out has C; channels last. In this layout the 1x1
convolutions on either side are linear layers, and a video is its frames as samples.
Source: section 2.2 of https://arxiv.org/abs/2410.10629 (SANA), and between `conv_inverted` and `conv_point` of
`GLUMBConv.forward` in diffusers' models/transformers/sana_transformer.py.
Traffic, with u = B*H*W*C elements: forward reads h and writes out, 3u (eager 13u). Backward reads h and the
gradient of out and writes dc, the gradient of (a, g), 5u, then reads dc and h and writes dh, 6u (eager 23u).
Without the dc buffer it would move 5u, and compute a and g again around every tile from s two columns further out:
by count as much time in arithmetic as is saved in traffic, and twice the registers. Kept for the backward: h, 2u
(eager 7u).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dit_lora_kernels.silu_dwconv_glu_kernels import (
    last_contiguous,
    launch_convolution,
    launch_filter,
    launch_input,
)
from dit_lora_kernels.support import launches

# 1. reference


def silu_dwconv_glu_reference(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The op in plain torch, differentiable: fp32 inside (fp64 for fp64), rounded once, to h's dtype."""
    a, g = _halves(functional.silu(_wide(h)), weight, bias)
    return (a * functional.silu(g)).to(h.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _shifted(x: Tensor) -> list[Tensor]:
    """x (B,H,W,2C) at the pixel that each tap of the filter reads, zero beyond the edges."""
    H, W = x.shape[1:3]
    padded = functional.pad(x, (0, 0, 1, 1, 1, 1))
    return [padded[:, i : i + H, j : j + W] for i in range(3) for j in range(3)]


def _convolved(x: Tensor, filters: Tensor) -> Tensor:
    # A sum of products, not conv2d: autocast would round its operands, cuDNN use TF32.
    total = torch.zeros_like(x)
    for tap, neighbour in zip(filters.unbind(1), _shifted(x), strict=True):
        total = total + tap * neighbour
    return total


def _halves(s: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    c = _convolved(s, _wide(weight).flatten(1))
    a, g = (c if bias is None else c + _wide(bias)).chunk(2, dim=-1)
    return a, g


def _silu_gradient(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * (1 + x * (1 - gate))


def _backward_reference(
    dout: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, taps: slice
) -> tuple[Tensor, list[Tensor]]:
    """dh, and the gradients (2C,) of the taps, of which the tenth is the bias; fp32 (fp64 for fp64)."""
    wide, dout = _wide(h), _wide(dout)
    s = functional.silu(wide)
    a, g = _halves(s, weight, bias)
    dc = torch.cat([dout * functional.silu(g), dout * a * _silu_gradient(g)], dim=-1)
    ds = _convolved(dc, _wide(weight).flatten(1).flip(1))
    sums = [(dc * x).sum((0, 1, 2)) for x in [*_shifted(s), torch.ones_like(s)][taps]]
    return ds * _silu_gradient(wide), sums


# 2. kernels and 3. launchers are in silu_dwconv_glu_kernels.py. 4. op


@torch.library.custom_op("dit_lora::silu_dwconv_glu", mutates_args=(), device_types=("cpu", "cuda"))
def silu_dwconv_glu_forward(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`silu_dwconv_glu` of checked operands."""
    if launches(h):
        return launch_convolution(last_contiguous(h), weight, bias, None)
    return silu_dwconv_glu_reference(h, weight, bias).contiguous()


@silu_dwconv_glu_forward.register_fake
def _(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return h.new_empty((*h.shape[:3], h.shape[3] // 2))


@torch.library.custom_op(
    "dit_lora::silu_dwconv_glu_backward", mutates_args=(), device_types=("cpu", "cuda")
)
def silu_dwconv_glu_backward(
    dout: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    """The wanted ones of the gradients of h, weight and bias."""
    of_h, of_weight, of_bias = wanted
    taps = slice(0 if of_weight else 9, 10 if of_bias else 9)
    dh, sums = None, []
    if launches(h):
        h = last_contiguous(h)
        dc = launch_convolution(h, weight, bias, dout)
        if of_h:
            dh = launch_input(dc, h, weight)
        if of_weight or of_bias:
            sums = list(launch_filter(dc, h, taps.start, taps.stop))
    else:
        dh, sums = _backward_reference(dout, h, weight, bias, taps)
    found = []
    if dh is not None and of_h:
        found.append(dh.to(h.dtype).contiguous())
    if of_weight:
        found.append(torch.stack(sums[:9], dim=1).view(weight.shape).to(weight.dtype))
    if bias is not None and of_bias:
        found.append(sums[-1].to(bias.dtype, copy=True))
    return found


@silu_dwconv_glu_backward.register_fake
def _(
    dout: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    operands = zip((h, weight, bias), wanted, strict=True)
    return [
        tensor.new_empty(tensor.shape) for tensor, want in operands if want and tensor is not None
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad)
    made = iter(silu_dwconv_glu_backward(dout, *ctx.saved_tensors, wanted))
    return tuple(next(made) if want else None for want in wanted)


silu_dwconv_glu_forward.register_autograd(_backward, setup_context=_setup_context)


def silu_dwconv_glu(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a * silu(g)`` of the halves a, g of the depthwise 3x3 convolution of ``silu(h)``: (B,H,W,C), h's dtype.

    h (B,H,W,2C) may have any strides; without a contiguous last dimension it is copied. weight (2C,1,3,3) and bias
    (2C,) are those of `torch.nn.Conv2d(2C, 2C, 3, padding=1, groups=2C)`, in any float dtypes. Computed in fp32
    (fp64 for fp64) and rounded once. Only h is kept for the backward. Gradients of weight and bias, where they are
    wanted, take a pass of their own.

    Raises ValueError if a shape does not fit.
    """
    if h.ndim != 4 or h.shape[3] % 2:
        raise ValueError(
            f"h must be (B, H, W, 2C), channels last; received {tuple(h.shape)}. "
            "Permute (B, 2C, H, W) to (0, 2, 3, 1)."
        )
    channels = h.shape[3]
    for name, tensor, shape in (
        ("weight", weight, (channels, 1, 3, 3)),
        ("bias", bias, (channels,)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must be {shape} for h {tuple(h.shape)}; received {tuple(tensor.shape)}."
            )
    out: Tensor = silu_dwconv_glu_forward(h, weight, bias)
    return out
