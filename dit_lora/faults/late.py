"""Kernels and attention backends that go wrong late, by little, or now and then."""

from collections.abc import Callable, Sequence

import torch

from dit_lora.faults.arms import attention, kernel
from dit_lora.faults.fault import Expected, Fault
from dit_lora.faults.ops import CHECKED
from dit_lora.faults.triggers import Change, When, backward_of, divided, times
from dit_lora.faults.world import Arm, Overrides


def _first_row(output: torch.Tensor) -> torch.Tensor:
    return output[:1].expand_as(output)


class _Stale:
    """Gives what it gave in the pass before, where the shape is the same."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        stale, self.kept = self.kept, output.detach().clone()
        if stale is None or stale.shape != output.shape:
            return output
        # The stale values, with the gradient of the fresh ones: the backward stays plausible.
        return output + (stale - output).detach()


_COMPARED: Overrides = (*CHECKED, ("guard.parity_every", 2))
_KERNEL = Expected("kernel", "rollback", ("kernel:wrong_op",), same_as="clean", nobody_lost=True)
_BY_CHANCE = Expected(
    "transient", "retry", same_as="clean", nobody_lost=True, may_be_off=("kernel:wrong_op",)
)
_NOW_AND_THEN = Expected("transient", "retry", nobody_lost=True, may_be_off=("attention:flash",))
"""A pass with very many calls fails each time, and then the backend is rightly off."""
_WRONG: Sequence[tuple[str, Callable[[], Change], int]] = (
    ("that gives every sample the first one's rows", lambda: _first_row, 3),
    ("whose gradient is a fifth too small", lambda: backward_of(times(0.8)), 2),
    ("that gives what it gave before", _Stale, 3),
)


def _late(change: Callable[[], Change], step: int) -> Arm:
    """Return an arm whose kernel has a state of its own in each run."""
    return lambda stage: kernel(change(), When("from", step))(stage)


def _in_training(output: torch.Tensor) -> torch.Tensor:
    return divided(output) if torch.is_grad_enabled() else output


FAULTS: tuple[Fault, ...] = (
    *(
        Fault(
            f"a fused kernel {words}, late",
            "kernel",
            f"from step {step}",
            _KERNEL,
            _late(change, step),
            _COMPARED,
        )
        for words, change, step in _WRONG
    ),
    Fault(
        "a fused kernel that gives NaN now and then",
        "kernel",
        "from step 2, p = 0.2",
        _BY_CHANCE,
        kernel(_in_training, When("random", 2, p=0.2, seed=5)),
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
