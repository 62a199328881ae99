"""A small model of real PEFT layers, for what replaces their forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import pytest
import torch
from peft.tuners import lora as peft_lora
from torch import Tensor, nn

from dit_lora.fuse import lora
from dit_lora.fuse.patches import FusedModelState, patch_forward
from dit_lora.fuse.registry import FORWARDS

PATCH = next(patch for patch in FORWARDS if patch.target_class == "peft.tuners.lora.layer.Linear")
BF16 = torch.bfloat16


class Attention(nn.Module):
    """Three projections of one input, by `project_linear_layers` or one by one, and one of the result."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, 40)
        self.v, self.out = nn.Linear(width, 40, bias=False), nn.Linear(40, width)
        self.shared = True

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.q, self.k, self.v)
        q, k, v = lora.project_linear_layers(layers, x) if self.shared else (layer(x) for layer in layers)
        return self.out(k * v.sigmoid()) + q.tanh()


def build(dtype: torch.dtype = torch.float32, *, seed: int = 0, **config: Any) -> Attention:
    torch.manual_seed(seed)
    model = Attention().to(dtype)
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q", "k", "v", "out"]} | config
    peft.inject_adapter_in_model(peft.LoraConfig(**{"init_lora_weights": False} | config), model, "default")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return model


def fused(model: Attention) -> FusedModelState:
    fusion = FusedModelState({lora.OP: True})
    for name, module in model.named_modules():
        if isinstance(module, peft_lora.LoraLayer):
            patch_forward(name, module, fusion, PATCH)
    return fusion


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 9, 24, generator=generator).to(dtype).requires_grad_()


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, then the gradients of x and of what is trained; of the same draws each time."""
    torch.manual_seed(8)
    y = model(x)
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(y.float().square().sum(), [x, *trained], allow_unused=True)
    return [y, *(g for g in grads if g is not None)]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 1
    for our_tensor, stock in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our_tensor, stock, rtol=1e-5, atol=1e-4)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many projections each call of the op had."""
    calls: list[int] = []

    def count(x: Tensor, projections: Any, *args: Any) -> Any:
        calls.append(len(projections))
        return op(x, projections, *args)

    op = lora.lora_qkv_unchecked
    with monkeypatch.context() as patch:
        patch.setattr(lora, "lora_qkv_unchecked", count)
        yield calls
