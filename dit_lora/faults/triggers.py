"""The moment when a fault acts, and the change that it makes to a tensor: the parts that faults of every place are
put together from.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dit_lora.faults.world import Arm, Stage
from dit_lora.numerics.dtensors import local
from dit_lora.numerics.streams import fold

ALL_RANKS = -1
Mode = Literal["once", "from", "at", "random"]
Change = Callable[[torch.Tensor], torch.Tensor]
Fires = Callable[[], bool]


def here(stage: Stage, rank: int) -> bool:
    """Return True if a fault of that rank is on this one; a fault of a rank that is not there is on all."""
    return rank in (ALL_RANKS, stage.rank) or rank >= stage.ranks


@dataclass(frozen=True)
class When:
    """The moments at which a fault acts."""

    mode: Mode
    """`once`: in one pass of its step. `from` its step on, in every pass; from 0, before the run too. `at` its step, in
    replays of it too, as what is drawn by the step comes back in them. `random`: from its step on, with a chance of `p`
    a pass."""
    step: int = 3
    rank: int = ALL_RANKS
    p: float = 1.0
    seed: int = 0

    @property
    def words(self) -> str:
        where = f", rank {self.rank}" if self.rank != ALL_RANKS else ""
        if self.mode == "random":
            return f"from step {self.step}, p = {self.p:g}{where}"
        lead = {"once": "once, in", "from": "from", "at": "always in"}[self.mode]
        return f"{lead} step {self.step}{where}"

    def fires(self, stage: Stage) -> Fires:
        """Return what tells, at each pass, whether the fault acts in it; the stage counts how often it did."""
        acts = self._acts(stage)
        stage.acted = stage.acted or 0

        def counted() -> bool:
            now = acts()
            stage.acted = (stage.acted or 0) + now
            return now

        return counted

    def _acts(self, stage: Stage) -> Fires:
        if not here(stage, self.rank):
            return lambda: False
        if self.mode == "at":
            places = step_seeds(stage, self.step)
            # The seed stays that of the last pass of training while the result is looked at.
            return lambda: stage.transformer.training and torch.initial_seed() in places
        if self.mode == "from" and self.step == 0:
            return lambda: True
        armed: list[bool] = []
        stage.before_step(self.step, lambda: armed.append(True))
        if self.mode == "once":
            return lambda: bool(armed) and armed.pop()
        chance = random.Random(f"{self.seed}/{stage.rank}")
        if self.mode == "random":
            return lambda: bool(armed) and chance.random() < self.p
        return lambda: bool(armed)


def step_seeds(stage: Stage, step: int) -> set[int]:
    """Return the seeds of torch's own generator in a step's micro-steps, on any rank: they tell a pass of that step
    wherever it is run again.
    """
    recipe = stage.run.setup.recipe
    return {
        fold(recipe.train.seed, "dropout", step, micro_step, rank)
        for micro_step in range(recipe.train.accumulate)
        for rank in range(stage.ranks)
    }


def write(tensor: torch.Tensor, change: Change) -> None:
    """Change a tensor where it lies; of a sharded one this rank's part."""
    part = local(tensor.detach())
    with torch.no_grad():
        part.copy_(change(part))


def before(step: int, tensor: Callable[[Stage], torch.Tensor], change: Change, rank: int) -> Arm:
    """Change something that the run holds between two steps, once."""

    def arm(stage: Stage) -> None:
        if here(stage, rank):
            stage.before_step(step, lambda: write(tensor(stage), change))

    return arm


def element(value: float, index: int = 2) -> Change:
    """Return a change that sets one element."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        # A rank's part of a tensor may have fewer elements, or none.
        if changed.numel():
            changed.view(-1)[index % changed.numel()] = value
        return changed

    return change


def times(factor: float) -> Change:
    """Return a change that multiplies all of it."""
    return lambda tensor: tensor * factor


def row(value: float, index: int = 0) -> Change:
    """Return a change that sets one row, such as the embedding of a class."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed[index % len(changed)] = value
        return changed

    return change


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
    """Return a change of the gradient in place of the value."""
    return lambda tensor: _Backward.apply(tensor, change) if tensor.requires_grad else tensor


def divided(tensor: torch.Tensor) -> torch.Tensor:
    """Compute 0 / 0 in one place, as a kernel does: the origin is an op, not a constant."""
    scale = torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    scale.view(-1)[5 % scale.numel()] = 0.0
    return tensor * scale / scale


def overflowing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 3e38 * 3e38
