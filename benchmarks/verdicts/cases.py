"""What a drawn fault is, and what may rightly come of it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.faults.targets import FaultTargets
from benchmarks.faults.triggers import ALL_RANKS, Mode, When
from benchmarks.faults.world import STEPS, Arm, Overrides

STOPPED, REFUSED, DONE = 3, 1, 0
Result = Literal["clean", "bounded"]


@dataclass(frozen=True)
class Right:
    """What may come of a fault: anything else is a verdict that cannot be trusted."""

    causes: frozenset[str] = frozenset()
    """That a verdict may name; none where the fault is no matter of the guard."""
    must_report: bool = True
    """Whether something must be said of it."""
    touches: bool = False
    """Whether the target may be left out for good; no other sample may, ever."""
    switches: frozenset[str] = frozenset()
    """What is wrong and may be switched off."""
    ends: tuple[int, ...] = (DONE, STOPPED)
    """Exit codes."""
    result: Result = "clean"
    """What a certified file must be: the clean run's without left-out samples, within rounding. Where the
    fault changed the training and nobody could know, finite, bounded and of an unchanged base."""
    message_parts: tuple[str, ...] = ()
    """One of them must be in what is said."""


def right(
    *causes: str,
    must_report: bool = True,
    touches: bool = False,
    switches: frozenset[str] = frozenset(),
    ends: tuple[int, ...] = (DONE, STOPPED),
    result: Result = "clean",
    message_parts: tuple[str, ...] = (),
) -> Right:
    return Right(frozenset(causes), must_report, touches, switches, ends, result, message_parts)


SILENT = right(must_report=False, ends=(DONE,), result="bounded")
"""A finite and plausible change: to be trained through, and nobody blamed."""


@dataclass(frozen=True)
class Case:
    """A fault, put together: how it is put into a run, and what may come of it."""

    when: str
    right: Right
    arm: Arm | None = None
    overrides: Overrides = ()
    before_start: Callable[[Path], None] | None = None
    """Done to the cache."""


@dataclass(frozen=True)
class Draw:
    """What was drawn before the place makes its case of it."""

    chance: random.Random
    targets: FaultTargets
    ranks: int
    target_clip: str
    """The clip that is to be at fault."""
    kind: str

    def step(self, min_step: int = 1, max_step: int = STEPS) -> int:
        return self.chance.randint(min_step, max_step)

    def number(self) -> int:
        """The number of a tensor or an element, taken modulo how many there are."""
        return self.chance.randrange(1_000_000)

    def rank(self) -> int:
        """One of two ranks, or all; always all on one."""
        return self.chance.choice((ALL_RANKS, 0, 1)) if self.ranks > 1 else ALL_RANKS

    def when(self, *modes: Mode, min_step: int = 1, max_step: int = STEPS, rank: int = ALL_RANKS) -> When:
        p = round(self.chance.uniform(0.1, 0.9), 2)
        return When(self.chance.choice(modes), self.step(min_step, max_step), rank, p, self.number())

    def when_it_comes(self, *modes: Mode) -> When:
        """Draw a moment after which every sample still comes once at least."""
        return self.when(*modes, max_step=STEPS - 2)


@dataclass(frozen=True)
class Place:
    """Where faults are put, the kinds that there are, and how one is made."""

    make: Callable[[Draw], Case]
    kinds: tuple[str, ...]
    description: str
    """What it is, for `--describe`."""
    fits: Callable[[FaultTargets, int], bool] = field(default=lambda targets, ranks: True)


@dataclass(frozen=True)
class Drawn:
    """One fault of a sweep."""

    number: int
    place_name: str
    kind: str
    variant: str
    ranks: int
    aim: str
    """What the target's name begins with."""
    seed: str
    """What everything that its place draws is seeded with."""

    @property
    def name(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.number:03d} {self.place_name}: {self.kind} ({self.variant}, {ranks})"
