"""Uses of qk_norm_rope in real models, random operands for each, and the stock lines they replace."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from kernel_checks import (
    assert_as_good_as_eager,
)
from torch import Tensor

from dit_lora_kernels.qk_norm_rope import qk_norm_rope

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Layer:
    """A use of the op. `tables`: leading size of cos and sin (0: (R, D)); `wide`: of H*D; `once`: each angle once."""

    norm: str
    batch: int = 2
    tokens: int = 5
    heads: int = 3
    width: int = 64
    across: bool = False
    weight: bool = True
    bias: bool = False
    rotation: str = "interleaved"
    rows: int = 5
    first: int = 0
    tables: int = 0
    wide: bool = False
    once: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {
            "norm": self.norm,
            "eps": EPS,
            "across_heads": self.across,
            "rotation": self.rotation,
            "first": self.first,
        }


LAYERS = {
    "cogvideox, text first": Layer("layer", bias=True, rows=3, first=2),
    "text last": Layer("rms", heads=5, width=112, rows=3),
    "text on both sides, halves": Layer(
        "layer", bias=True, width=72, rotation="half", rows=2, first=1, tables=1, wide=True
    ),
    "wan": Layer("rms", batch=1, across=True, heads=5),
    "ltx, tables of each sample": Layer("rms", batch=3, across=True, tables=3, wide=True),
    "layer across heads, halves": Layer("layer", across=True, bias=True, width=72, rotation="half", tables=2),
    "ltx-2, an angle once": Layer("rms", across=True, rotation="half", tables=2, wide=True, once=True),
    "an angle once for all heads": Layer("layer", bias=True, width=72, rows=3, first=1, tables=1, once=True),
    "mistral": Layer("none", weight=False, rotation="half", tables=2),
    "flux without a norm": Layer("none", weight=False, rows=3, first=2),
    "sana, no rotation": Layer("rms", across=True, width=112, rows=0),
    "nothing affine": Layer("layer", weight=False, rows=0, heads=2),
}
TRAINED = [name for name, layer in LAYERS.items() if layer.weight]
COGVIDEOX = LAYERS["cogvideox, text first"]
SMALL = replace(COGVIDEOX, tokens=3, rows=2, first=1)


@dataclass
class Operands:
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    grad: Tensor

    def inputs(self) -> tuple[Tensor | None, ...]:
        return self.x, self.weight, self.bias, self.cos, self.sin

    def to(self, dtype: torch.dtype, train: bool = False) -> "Operands":
        """Leaves of another dtype; tables stay fp32, except for fp64."""
        rotary_dtype = torch.float64 if dtype is torch.float64 else torch.float32

        def cast(tensor: Tensor | None, kind: torch.dtype, train: bool = False) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(kind).requires_grad_(train)

        x, grad = self.x.detach().to(dtype).requires_grad_(), self.grad.to(dtype)
        weight, bias = (cast(t, dtype, train) for t in (self.weight, self.bias))
        return Operands(x, weight, bias, cast(self.cos, rotary_dtype), cast(self.sin, rotary_dtype), grad)


def angles(layer: Layer, generator: torch.Generator) -> Tensor:
    """Of each element of a table's row, alike for the two of a pair."""
    lead = (layer.tables,) if layer.tables else ((1,) if layer.once else ())
    heads = layer.heads if layer.wide else 1
    size = (*lead, layer.rows, heads, layer.width // 2)
    half = torch.rand(size, generator=generator, dtype=torch.float64) * 6.3
    if layer.once:
        return half
    pairs = (
        half.repeat_interleave(2, -1)
        if layer.rotation == "interleaved"
        else half.repeat(*(1 for _ in half.shape[:-1]), 2)
    )
    return pairs.flatten(-2)


def operands(layer: Layer, seed: int = 0) -> Operands:
    """Random fp64 values that bf16 holds, none of them neutral: weights around 1 of both signs, biases around 0.5."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().double().to(DEVICE)

    shape = (layer.batch, layer.tokens, layer.heads, layer.width)
    size = layer.heads * layer.width if layer.across else layer.width
    x = random(*shape) * (1 + torch.arange(layer.batch, device=DEVICE)[:, None, None, None])
    weight = random(size)
    weight = weight.sign() * (weight.abs() / 2 + 0.5)
    bias = random(size) / 4 + 0.5
    turns = angles(layer, generator).to(DEVICE)
    rotated = layer.rows > 0
    return Operands(
        x + 0.5,
        weight if layer.weight else None,
        bias if layer.bias else None,
        turns.cos().float().double() if rotated else None,
        turns.sin().float().double() if rotated else None,
        random(*shape),
    )


def stock(
    layer: Layer,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> Tensor:
    """The lines of Diffusers: a norm module, then apply_rotary_emb on some of the tokens."""
    y = x.flatten(2) if layer.across else x
    if layer.norm == "layer":
        y = F.layer_norm(y, y.shape[-1:], weight, bias, EPS)
    elif layer.norm == "rms":
        y = F.rms_norm(y, y.shape[-1:], weight, EPS)
    y = y.view(x.shape)
    if cos is None or sin is None:
        return y
    stop = layer.first + layer.rows
    part = y[:, layer.first : stop]
    if layer.once:
        rotated_part = _turned_once(layer, part.to(cos.dtype), cos, sin).to(x.dtype)
        return torch.cat([y[:, : layer.first], rotated_part, y[:, stop:]], dim=1)
    if layer.rotation == "interleaved":
        real, imaginary = part.unflatten(-1, (-1, 2)).unbind(-1)
        rotated_part = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    else:
        real, imaginary = part.unflatten(-1, (2, -1)).unbind(-2)
        rotated_part = torch.cat([-imaginary, real], dim=-1)
    cos, sin = (t.unflatten(-1, (-1, layer.width)) for t in (cos, sin))
    part = (part.to(cos.dtype) * cos + rotated_part.to(cos.dtype) * sin).to(x.dtype)
    return torch.cat([y[:, : layer.first], part, y[:, stop:]], dim=1)


def _turned_once(layer: Layer, part: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The lines of transformer_ltx2.py, apply_split_rotary_emb, and the same of neighbours."""
    pair_shape = 2 if layer.rotation == "half" else -1, -1 if layer.rotation == "half" else 2
    pairs = part.unflatten(-1, pair_shape)
    dim = -2 if layer.rotation == "half" else -1
    first_half, second = pairs.unbind(dim)
    rotated_pair = [first_half * cos - second * sin, second * cos + first_half * sin]
    return torch.stack(rotated_pair, dim=dim).flatten(-2)


def ours(layer: Layer, *inputs: Tensor | None, from_output: bool = True) -> Tensor:
    x, weight, bias, cos, sin = inputs
    assert x is not None
    return qk_norm_rope(x, weight, bias, cos, sin, from_output=from_output, **layer.options)


def results(run: Callable[..., Tensor], given: Operands) -> dict[str, Tensor]:
    """The output and the gradient of everything that asks for one."""
    output = run(*given.inputs())
    leaves = {"x": given.x, "weight": given.weight, "bias": given.bias}
    trained = {n: t for n, t in leaves.items() if t is not None and t.requires_grad}
    grads = torch.autograd.grad(output, list(trained.values()), given.grad)
    return {"out": output.detach()} | {f"d{n}": g for n, g in zip(trained, grads, strict=True)}


def check(layer: Layer, dtype: torch.dtype, train: bool, from_output: bool = True) -> None:
    inputs = operands(layer)
    exact = results(lambda *t: stock(layer, *t), inputs.to(torch.float64, train))
    eager = results(lambda *t: stock(layer, *t), inputs.to(dtype, train))
    our_results = results(lambda *t: ours(layer, *t, from_output=from_output), inputs.to(dtype, train))
    assert our_results.keys() == exact.keys()
    for name, value in our_results.items():
        assert value.dtype is dtype
        assert_as_good_as_eager(name, value, eager[name], exact[name])


def alike(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
