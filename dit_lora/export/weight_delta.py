"""The updates that an adapter adds to each weight, in a form that is independent of the file format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.update_norms import compute_product_norm
from dit_lora.errors import CheckFailedError, format_list

# Relative to an update's norm. Rounding a factor to fp32 once changes it by 6e-8.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class LoraTerm:
    """A layer's update as a product B A times `scale`, for a linear layer or a 2D convolution."""

    a: torch.Tensor
    """Matrix A: (rank, inputs), for a convolution (rank, inputs, height, width)."""
    b: torch.Tensor
    """Matrix B: (outputs, rank), for a convolution (outputs, rank, 1, 1)."""
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


Updates = Mapping[str, Sequence[LoraTerm]]
"""Layer names, as in the unadapted model, to the terms whose sum is added to the weight."""


def collect_weight_updates(model: Any, adapter: str = ADAPTER_NAME, weight: float = 1.0) -> Updates:
    """Factors A, B and scale of an attached adapter's weight updates, by layer; `weight` multiplies PEFT's scaling."""
    # Detached: the terms are compared and written, never trained.
    adapted: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    updates = {}
    for name, module in adapted.items():
        if adapter in module.lora_A:
            a, b = module.lora_A[adapter].weight.detach(), module.lora_B[adapter].weight.detach()
            updates[name] = [LoraTerm(a, b, weight * module.scaling[adapter])]
    return updates


def sum_lora_updates(adapter_updates: Sequence[Updates]) -> Updates:
    """The sum of several adapters' updates: each layer gets the terms of all adapters that have it."""
    names = dict.fromkeys(name for updates in adapter_updates for name in updates)
    return {name: [term for updates in adapter_updates for term in updates.get(name, ())] for name in names}


def require_same_updates(expected: Updates, actual: Updates, description: str) -> None:
    """Raise `CheckFailedError` with every layer whose update differs from the expected one, compared in fp64."""
    faults = [f"{name}: not in it" for name in expected if name not in actual]
    faults += [f"{name}: not in the adapter" for name in actual if name not in expected]
    for name in expected.keys() & actual.keys():
        expected_terms, actual_terms = expected[name], actual[name]
        if _get_weight_shape(expected_terms) != _get_weight_shape(actual_terms):
            faults.append(f"{name}: {_get_weight_shape(actual_terms)}, not {_get_weight_shape(expected_terms)}")
            continue
        # The difference is again a sum of products, so that its norm needs no full matrix.
        minus = [LoraTerm(term.a, term.b, -term.scale) for term in actual_terms]
        size, difference = _compute_norm(expected_terms), _compute_norm([*expected_terms, *minus])
        # `not <=` instead of `>`, so that NaN counts as a difference.
        if not difference <= _TOLERANCE * size:
            faults.append(f"{name}: differs by {difference:.2g}, of {size:.2g}")
    if faults:
        summary = f"{description}, read back, is not the adapter; nothing was kept"
        raise CheckFailedError(format_list(summary, sorted(faults)))


def _get_weight_shape(terms: Sequence[LoraTerm]) -> list[int]:
    return [len(terms[0].b), *terms[0].a.shape[1:]]


def _compute_norm(terms: Sequence[LoraTerm]) -> float:
    """Frobenius norm of a sum of products without computing the sum, which can be 1000 times as large as they are."""
    # A sum of products is one product of concatenated factors: [s1 B1, s2 B2] [A1; A2].
    b = torch.cat([term.scale * term.b.double().flatten(1) for term in terms], dim=1)
    return compute_product_norm(b, torch.cat([term.a.double().flatten(1) for term in terms]))
