"""Kernels and attention backends that go wrong late, by little, or now and then."""

from collections.abc import Callable

import torch

from benchmarks.faults.arms import attention, kernel
from benchmarks.faults.fault import Expected, Fault, from_step
from benchmarks.faults.ops import COMPARED
from benchmarks.faults.triggers import Change, When, backward_of, divided, first_row, times
from benchmarks.faults.world import Arm


class _Stale:
    """Gives what it gave in the pass before, at the positions that both have: captions may differ in length."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        stale, self.kept = self.kept, output.detach().clone()
        if stale is None or stale.ndim != output.ndim:
            return output
        shared = tuple(slice(min(sizes)) for sizes in zip(stale.shape, output.shape, strict=True))
        difference = torch.zeros_like(output)
        difference[shared] = (stale[shared] - output[shared]).detach()
        # The stale values, with the gradient of the fresh ones: the backward stays plausible.
        return output + difference


_KERNEL = Expected("kernel", "rollback", ("kernel:wrong_op",), same_as="clean", nobody_lost=True)
_BY_CHANCE = Expected("transient", "retry", same_as="clean", nobody_lost=True, may_be_off=("kernel:wrong_op",))
_NOW_AND_THEN = Expected("transient", "retry", nobody_lost=True, may_be_off=("attention:flash",))
"""A pass with very many calls fails each time, and then the backend is rightly off."""


def _late(name: str, change: Callable[[], Change], step: int = 3, needs: tuple[str, ...] = ()) -> Fault:
    """A kernel fault whose change keeps state, which is new in each run."""

    def strike(when: When) -> Arm:
        return lambda stage: kernel(change(), when)(stage)

    return from_step(name, "kernel", _KERNEL, strike, step, overrides=COMPARED, needs=needs)


def _in_training(output: torch.Tensor) -> torch.Tensor:
    return divided(output) if torch.is_grad_enabled() else output


FAULTS: tuple[Fault, ...] = (
    _late("a fused kernel that gives every sample the first one's rows, late", lambda: first_row, needs=("batched",)),
    _late(
        "a fused kernel whose gradient is a fifth too small, late",
        lambda: backward_of(times(0.8)),
        2,
    ),
    _late("a fused kernel that gives what it gave before, late", _Stale),
    Fault(
        "a fused kernel that gives NaN now and then",
        "kernel",
        "from step 2, p = 0.2",
        _BY_CHANCE,
        kernel(_in_training, When("random", 2, p=0.2, seed=5)),
        # Models with a call for each sample fail more often.
        (("guard.max_skips", 200),),
    ),
    Fault(
        "flash attention that gives NaN now and then",
        "attention",
        "from step 2, p = 0.1",
        _NOW_AND_THEN,
        attention(_in_training, When("random", 2, p=0.1, seed=5)),
        (("guard.max_skips", 200),),
    ),
)
