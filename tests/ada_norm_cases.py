"""What the tests of `ada_norm` share: its uses, random operands, the stock lines, outputs with gradients."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dit_lora_kernels.ada_norm import AdaNormInputs, joint_ada_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
Tensors = dict[str, Tensor]


class Case(NamedTuple):
    norm: str
    shape: tuple[int, int, int]
    groups: int = 1
    without: str = ""


CASES = [
    Case("layer", (2, 5, 1152), without="weight bias"),  # DiT, second norm
    Case("layer", (3, 3, 1920)),  # CogVideoX
    Case("layer", (1, 6, 2240), 2, "weight bias gate"),  # SanaVideo: a row a frame, cross attention's residual
    Case("rms", (2, 4, 640), 4, "weight bias"),  # LTX: a row a token
    Case("rms", (2, 7, 72), without="bias y gate"),
    Case("layer", (3, 6, 64), 3, "bias"),
    Case("layer", (2, 5, 112), without="weight shift scale y gate"),
    Case("layer", (2, 5, 40), without="weight bias scale"),
]
CASE = Case("layer", (2, 7, 40))


def make(case: Case, dtype: torch.dtype = torch.float32) -> Tensors:
    (B, T, D), G = case.shape, case.groups
    shapes = dict.fromkeys(("x", "y"), (B, T, D))
    shapes |= dict.fromkeys(("shift", "scale", "gate"), (B, G, D))
    shapes |= dict.fromkeys(("weight", "bias"), (D,))
    generator = torch.Generator().manual_seed(B * T * D)
    values = {k: torch.randn(s, generator=generator) + 0.25 for k, s in shapes.items()}
    return {k: v.to(DEVICE, dtype).requires_grad_() for k, v in values.items() if k not in case.without.split()}


def eager(norm: str, x: Tensor, **others: Tensor) -> tuple[Tensor, Tensor]:
    """The stock lines, in the dtype of the operands."""

    def rows(name: str) -> Tensor:
        table = others[name]
        return table.repeat_interleave(x.shape[1] // table.shape[1], 1)

    if "y" in others:
        x = (x + (rows("gate") * others["y"] if "gate" in others else others["y"])).type_as(x)
    weight, bias = others.get("weight"), others.get("bias")
    if norm == "layer":
        # As Wan does it: on CUDA torch's layer norm takes no rows of another dtype than its weight.
        like_weight = x if weight is None else x.type_as(weight)
        output = F.layer_norm(like_weight, x.shape[-1:], weight, bias, EPS)
    else:
        output = F.rms_norm(x, x.shape[-1:], weight, EPS)
        output = output if bias is None else output + bias
    output = output * (1 + rows("scale")) if "scale" in others else output
    return (output + rows("shift") if "shift" in others else output), x


def ours(norm: str, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    """One stream's output, and its sum; x itself without a y."""
    stream = AdaNormInputs(**{k: v for k, v in tensors.items() if k in AdaNormInputs._fields})
    affine = tensors.get("weight"), tensors.get("bias")
    output, (residual,) = joint_ada_norm([stream], *affine, norm=norm, eps=EPS)  # type: ignore[arg-type]
    return output, residual if "y" in tensors else tensors["x"]


def cotangents(like: tuple[Tensor, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(v.shape, generator=generator).to(v.device, v.dtype) for v in like]


def results(run: Callable[..., tuple[Tensor, Tensor]], norm: str, tensors: Tensors) -> Tensors:
    """Outputs, and the gradient of everything that requires one."""
    outputs = run(norm, **tensors)
    leaves = {k: v for k, v in tensors.items() if v.requires_grad}
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents(outputs))
    input_grads = {f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"out": outputs[0].detach(), "residual": outputs[1].detach(), **input_grads}


def assert_same(one: Tensors, two: Tensors) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def joint(tensors: Tensors, text: Tensors, norm: str = "layer") -> tuple[Tensor, ...]:
    """Text without a y first, then video with one."""
    affine = tensors["weight"], tensors["bias"]
    fields = AdaNormInputs._fields
    streams = [AdaNormInputs(**{k: v[k] for k in fields if k in v}) for v in (text, tensors)]
    output, residuals = joint_ada_norm(streams, *affine, norm=norm, eps=EPS)  # type: ignore[arg-type]
    return (output, *residuals)
