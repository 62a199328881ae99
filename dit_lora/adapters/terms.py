"""What an adapter adds to each weight, whatever file it is written in: to compare files, and to merge them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.update import product_norm
from dit_lora.errors import CheckFailedError, listed

_TOLERANCE = 1e-6  # of an update's norm: a factor rounded to fp32 once changes 6e-8


@dataclass(frozen=True)
class Term:
    """`scale` times B A, of a linear layer or a 2D convolution."""

    a: torch.Tensor
    """(rank, inputs), of a convolution (rank, inputs, height, width)."""
    b: torch.Tensor
    """(outputs, rank), of a convolution (outputs, rank, 1, 1)."""
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)

    def update(self, dtype: torch.dtype) -> torch.Tensor:
        """In the shape of the layer's weight, computed in `dtype`."""
        product = self.b.to(dtype).flatten(1) @ self.a.to(dtype).flatten(1)
        return (self.scale * product).reshape(len(self.b), *self.a.shape[1:])


Updates = Mapping[str, Sequence[Term]]
"""By the layer's name in the unadapted model: the terms whose sum is added to its weight."""


def updates_of(model: Any, adapter: str = ADAPTER_NAME, weight: float = 1.0) -> Updates:
    """Those of an attached adapter, as PEFT scales them, times `weight`."""
    adapted: dict[str, Any] = {
        name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    return {
        name: [
            Term(
                module.lora_A[adapter].weight.detach(),
                module.lora_B[adapter].weight.detach(),
                weight * module.scaling[adapter],
            )
        ]
        for name, module in adapted.items()
        if adapter in module.lora_A
    }


def summed(many: Sequence[Updates]) -> Updates:
    """The sum of several adapters' updates, each layer with the terms of those that have it."""
    names = dict.fromkeys(name for one in many for name in one)
    return {name: [term for one in many for term in one.get(name, ())] for name in names}


def update(terms: Sequence[Term], dtype: torch.dtype) -> torch.Tensor:
    """The sum of one layer's terms, computed in `dtype`."""
    first, *others = (term.update(dtype) for term in terms)
    for other in others:
        first += other
    return first


def require_same(expected: Updates, found: Updates, what: str) -> None:
    """Raise `CheckFailedError` with every layer whose update is not the expected one; in fp64, of the factors."""
    wrong = [f"{name}: not in it" for name in expected if name not in found]
    wrong += [f"{name}: not in the adapter" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        one, other = expected[name], found[name]
        if _shape(one) != _shape(other):
            wrong.append(f"{name}: {_shape(other)}, not {_shape(one)}")
            continue
        minus = [Term(term.a, term.b, -term.scale) for term in other]
        size, difference = _norm(one), _norm([*one, *minus])
        if not difference <= _TOLERANCE * size:  # NaN is wrong too
            wrong.append(f"{name}: differs by {difference:.2g}, of {size:.2g}")
    if wrong:
        raise CheckFailedError(
            listed(f"{what}, read back, is not the adapter; nothing was kept", sorted(wrong))
        )


def _shape(terms: Sequence[Term]) -> list[int]:
    return [len(terms[0].b), *terms[0].a.shape[1:]]


def _norm(terms: Sequence[Term]) -> float:
    """Frobenius norm of a sum, without the sum: a layer's update can be a thousand times its factors."""
    b = torch.cat([term.scale * term.b.double().flatten(1) for term in terms], dim=1)
    return product_norm(b, torch.cat([term.a.double().flatten(1) for term in terms]))
