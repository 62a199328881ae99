"""LoRA projections to test `lora_linear` with, and the lines of PEFT's own layer to compare with."""

from collections.abc import Sequence
from typing import Any

import torch
from kernel_checks import assert_as_good_as_eager
from torch import Tensor
from torch.nn.functional import dropout as torch_dropout
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from dit_lora_kernels.lora_linear import Adapter, Projection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def projection(inside: int, outside: int, rank: int, scaling: float, dtype: torch.dtype, seed: int = 0) -> Projection:
    """Unit-sized outputs, the adapter's part as large as the base's; masters in fp32, or in fp64."""
    master = torch.promote_types(dtype, torch.float32)
    a = (randn(rank, inside, seed=seed) * inside**-0.5).to(master)
    b = (randn(outside, rank, seed=seed) * rank**-0.5 / scaling).to(master)
    weight = (randn(outside, inside, seed=seed + 1) * inside**-0.5).to(dtype)
    bias = randn(outside, seed=seed).to(dtype)
    return Projection(weight, bias, Adapter(a.requires_grad_(), b.requires_grad_(), scaling), None)


def qkv(inside: int, dtype: torch.dtype) -> list[Projection]:
    """Three that differ in everything: outputs, ranks, scalings, a bias or none."""
    return [
        projection(inside, 24, 4, 2.0, dtype, seed=3),
        projection(inside, 40, 3, 0.3, dtype, seed=4),
        projection(inside, 24, 5, 1.0, dtype, seed=5)._replace(bias=None),
    ]


def eager(x: Tensor, p: Projection, dropout: float = 0.0) -> Tensor:
    """What PEFT's layer computes (tuners/lora/layer.py, Linear.forward)."""
    result = linear(x, p.weight, p.bias)
    dtype = result.dtype
    dropped = torch_dropout(x.to(p.adapter.a.dtype), dropout)
    result = result + linear(linear(dropped, p.adapter.a), p.adapter.b) * p.adapter.scaling
    return result.to(dtype)


def in_fp64(projections: Sequence[Projection]) -> list[Projection]:
    def wide(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.detach().double().requires_grad_(t.requires_grad)

    return [Projection(wide(w), wide(b), Adapter(wide(m.a), wide(m.b), m.scaling)) for w, b, m, *_ in projections]


def gradients(outputs: Sequence[Tensor], x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
    """dx, then dA and dB of each, for one gradient of the outputs."""
    wrt = [x, *(t for p in projections for t in p.adapter[:2])]
    grads = [randn(*y.shape, seed=7).to(y.dtype) for y in outputs]
    return list(torch.autograd.grad(list(outputs), wrt, grads))


def compare(
    x: Tensor,
    projections: Sequence[Projection],
    ours: Sequence[Tensor],
    theirs: Sequence[Tensor],
) -> None:
    """Outputs and gradients of both against fp64."""
    exact_x, exact = x.detach().double().requires_grad_(), in_fp64(projections)
    # Autograd's `grads` are rounded to the outputs' dtype: what fp64 gets must be those.
    outputs = [eager(exact_x, p) for p in exact]
    wrt = [exact_x, *(t for p in exact for t in p.adapter[:2])]
    output_grads = [randn(*y.shape, seed=7).to(y.dtype) for y in ours]
    exact_grads = torch.autograd.grad(outputs, wrt, [g.double() for g in output_grads])
    for i, values in enumerate(zip(ours, theirs, outputs, strict=True)):
        assert values[0].dtype == values[1].dtype
        assert_as_good_as_eager(f"y{i}", *values)
    names = ["dx", *(f"{name}{i}" for i in range(len(projections)) for name in ("dA", "dB"))]
    all_gradients = gradients(ours, x, projections), gradients(theirs, x, projections)
    for name, our_grad, stock, true in zip(names, *all_gradients, exact_grads, strict=True):
        assert our_grad.dtype == stock.dtype
        assert_as_good_as_eager(name, our_grad, stock, true)


class Products(TorchDispatchMode):
    """Shapes (m, k, n) of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            operand, right = args[-2:]
            self.shapes.append((*operand.shape, right.shape[1]))
        return func(*args, **(kwargs or {}))
