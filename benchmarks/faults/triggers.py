"""The moment when a fault acts, and the change that it makes to a tensor: the parts that faults of every place are
put together from.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from benchmarks.faults.world import Arm, Stage
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.streams import derive_seed

ALL_RANKS = -1
Mode = Literal["once", "from", "at", "random"]
Change = Callable[[torch.Tensor], torch.Tensor]
Fires = Callable[[], bool]
Find = Callable[[Stage], Sequence[torch.Tensor]]


def has_fault(stage: Stage, rank: int) -> bool:
    """True if this rank has the fault. A fault of a rank that does not exist applies to all ranks."""
    return rank in (ALL_RANKS, stage.rank) or rank >= stage.ranks


@dataclass(frozen=True)
class When:
    """The moments at which a fault acts."""

    mode: Mode
    """`once`: in one pass of its step. `from`: in every pass from its step on; from step 0, before the run too.
    `at`: at its step and in its replays, which repeat the step's random numbers. `random`: from its step on, in each
    pass with probability `p`."""
    step: int = 3
    rank: int = ALL_RANKS
    p: float = 1.0
    seed: int = 0
    skipped: int = 0
    """Number of passes of its step that `once` lets go by first."""

    @property
    def description(self) -> str:
        rank_note = f", rank {self.rank}" if self.rank != ALL_RANKS else ""
        if self.mode == "random":
            return f"from step {self.step}, p = {self.p:g}{rank_note}"
        lead = {"once": "once, in", "from": "from", "at": "always in"}[self.mode]
        return f"{lead} step {self.step}{rank_note}"

    def fires(self, stage: Stage) -> Fires:
        """A function that is called at each pass and says if the fault acts in it.

        `stage.acted` counts how often it did.
        """
        acts = self._acts(stage)
        stage.acted = stage.acted or 0

        def counted() -> bool:
            does_act = acts()
            stage.acted = (stage.acted or 0) + does_act
            return does_act

        return counted

    def _acts(self, stage: Stage) -> Fires:
        if not has_fault(stage, self.rank):
            return lambda: False
        if self.mode == "at":
            seeds = step_seeds(stage, self.step)
            # The seed stays that of the last pass of training while the result is looked at.
            return lambda: stage.transformer.training and torch.initial_seed() in seeds
        if self.mode == "from" and self.step == 0:
            return lambda: True
        armed: list[bool] = []
        stage.before_step(self.step, lambda: armed.append(True))
        if self.mode == "once":
            passes = count()
            return lambda: bool(armed) and next(passes) == self.skipped
        chance = random.Random(f"{self.seed}/{stage.rank}")
        if self.mode == "random":
            return lambda: bool(armed) and chance.random() < self.p
        return lambda: bool(armed)


def step_seeds(stage: Stage, step: int) -> set[int]:
    """Seeds of torch's default generator in the step's micro-steps, on all ranks.

    They identify a pass of that step in replays too.
    """
    recipe = stage.run.recipe
    return {
        derive_seed(recipe.train.seed, "dropout", step, micro_step, rank)
        for micro_step in range(recipe.train.accumulate)
        for rank in range(stage.ranks)
    }


@dataclass(frozen=True)
class Element:
    """A change that sets one element."""

    value: float
    index: int = 2
    of_whole: bool = False
    """True if of a sharded tensor the first rank's part alone is changed, and not each rank's."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        # A rank's part of a tensor may have fewer elements, or none.
        if changed.numel():
            changed.view(-1)[self.index % changed.numel()] = self.value
        return changed


def write(tensor: torch.Tensor, change: Change) -> None:
    """Change a tensor where it lies; of a sharded one this rank's part."""
    part = get_local_tensor(tensor.detach())
    with torch.no_grad():
        part.copy_(change(part))


def before(step: int, find: Find, change: Change, rank: int = ALL_RANKS) -> Arm:
    """Change something that the run holds between two steps, once."""

    def arm(stage: Stage) -> None:
        def act() -> None:
            for tensor in find(stage):
                is_part = rank == ALL_RANKS and isinstance(tensor, DTensor)
                of_whole = isinstance(change, Element) and change.of_whole
                if not (is_part and of_whole and stage.rank):
                    write(tensor, change)

        if has_fault(stage, rank):
            stage.before_step(step, act)

    return arm


def times(factor: float) -> Change:
    """A change that multiplies the tensor by a factor."""
    return lambda tensor: tensor * factor


def in_turn(share: float) -> Change:
    """Scale elements up and down alternately along the last dimension, by a share. A norm cannot undo it."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        signs = torch.ones_like(tensor)
        signs[..., 1::2] = -1
        return tensor * (1 + share * signs)

    return change


def row(value: float) -> Change:
    """A change that fills the first row, such as the embedding of a class, with one value."""
    return lambda tensor: tensor.index_fill(0, torch.tensor([0], device=tensor.device), value)


class _Backward(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Change) -> torch.Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(grad), None


def backward_of(change: Change) -> Change:
    """A change of the gradient instead of the value."""
    return lambda tensor: _Backward.apply(tensor, change) if tensor.requires_grad else tensor


def divided(tensor: torch.Tensor) -> torch.Tensor:
    """Compute 0 / 0 in one place, as a kernel does: the origin is an op, not a constant."""
    scale = _ones_with_zero(tensor, 5)
    return tensor * scale / scale


def by_zero(tensor: torch.Tensor) -> torch.Tensor:
    """Divide by zero in one place."""
    return tensor / _ones_with_zero(tensor, 3)


def _ones_with_zero(like: torch.Tensor, index: int) -> torch.Tensor:
    ones = torch.ones(like.shape, dtype=like.dtype, device=like.device)
    return Element(0.0, index)(ones)


def first_row(tensor: torch.Tensor) -> torch.Tensor:
    """Give every sample the first one's row."""
    return tensor[:1].expand_as(tensor)


def overflowing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 3e38 * 3e38
