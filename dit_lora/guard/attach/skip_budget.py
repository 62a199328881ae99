"""Count what a loop that is not ours loses: distinct samples and incidents, not one bad sample in each epoch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dit_lora.guard.attach.sample_ids import identifies
from dit_lora.guard.verdict import Verdict

# Steps over which `max_skips` counts.
_WINDOW = 100
# Steps in a row, none of them taken: at least so many, whatever they were, and nothing is trained.
_BARREN = 10
_FOR_GOOD = ("data", "labels")


@dataclass
class SkipBudget:
    """Counts of what was not taken, equal on all ranks."""

    taken: int = 0
    lost: int = 0
    """Steps that were not taken."""
    in_a_row: int = 0
    """Steps that were not taken since the last that was."""
    _blamed: dict[str, int] = field(default_factory=dict)
    """Sample to the step in which it was first blamed."""
    _incidents: list[int] = field(default_factory=list)
    """Steps that no sample of a name is to blame for."""
    _bad: Counter[str] = field(default_factory=Counter)
    """Samples that are bad where they are stored, and how often they came."""

    def knows(self, verdicts: Sequence[Verdict]) -> bool:
        """Return True if all that is wrong is samples that are known to be bad."""
        return all(
            verdict.cause in _FOR_GOOD
            and verdict.sample_ids
            and all(sample in self._bad for sample in verdict.sample_ids)
            for verdict in verdicts
        )

    def spent(self, step: int) -> int:
        """Return what counts against `max_skips`: distinct samples and other incidents of the last 100 steps."""
        recent = [*self._blamed.values(), *self._incidents]
        return sum(blamed_in > step - _WINDOW for blamed_in in recent)

    def barren(self, most: int) -> bool:
        """Return True if so many steps in a row were lost that nothing is trained."""
        return self.in_a_row >= max(_BARREN, most)

    def skip(self, kind: str, step: int, verdicts: Sequence[Verdict]) -> None:
        """Count a step that is skipped. One without a gradient counts only while no other is taken."""
        self.lose()
        self._bad.update(
            {s for v in verdicts if v.cause in _FOR_GOOD for s in v.sample_ids if identifies(s)}
        )
        # A numbered row is another sample in each epoch: it must not count as one that was seen before.
        blamed = {sample for verdict in verdicts for sample in verdict.sample_ids}
        named = set(filter(identifies, blamed))
        for sample in named:
            self._blamed.setdefault(sample, step)
        if kind != "zero_gradient" and not named:
            self._incidents.append(step)

    def lose(self) -> None:
        """Count a step that is not taken."""
        self.lost += 1
        self.in_a_row += 1

    def take(self) -> None:
        """Count a step that is taken."""
        self.taken += 1
        self.in_a_row = 0

    def closing(self) -> str | None:
        """Return what was lost, in words; None if nothing was."""
        if not self.lost:
            return None
        words = f"{self.lost} of {self.taken + self.lost} optimizer steps were not taken"
        if not self._bad:
            return words
        worst = ", ".join(f"{sample} ({count}x)" for sample, count in self._bad.most_common(10))
        more = f" and {len(self._bad) - 10} more" if len(self._bad) > 10 else ""
        return f"{words}; remove or mend the samples that cost them: {worst}{more}"
