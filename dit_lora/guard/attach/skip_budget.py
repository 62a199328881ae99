"""Count the steps that a loop loses, by cause. A bad sample counts once, not once per epoch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dit_lora.guard.attach.samples.loaded_batches import is_sample_name
from dit_lora.guard.verdict import Verdict

_WINDOW = 100
"""Number of recent steps over which `max_skips` counts."""
_MANY_IN_A_ROW = 10
"""After this many skipped steps in a row, for any reason, nothing is being trained."""
_BAD_AS_STORED = ("data", "labels")
_MAX_NAMED = 10


@dataclass
class SkipBudget:
    """Counts of taken and skipped steps, equal on all ranks."""

    taken: int = 0
    lost: int = 0
    """Steps that were skipped or undone."""
    in_a_row: int = 0
    """Steps lost since the last taken step."""
    _incidents: list[int] = field(default_factory=list)
    """Steps that failed for a new reason: a sample that had not failed before, or no named sample."""
    _samples: Counter[str] = field(default_factory=Counter)
    """Number of steps that each named sample has cost."""
    _bad_as_stored: set[str] = field(default_factory=set)
    _last_taken: int = 0
    _num_unnamed: int = 0
    """Number of lost steps without a named sample."""

    def knows(self, verdicts: Sequence[Verdict]) -> bool:
        """True if the only causes are samples already known to be bad as stored."""
        return bool(verdicts) and all(
            diagnosis.cause in _BAD_AS_STORED
            and diagnosis.sample_ids
            and all(sample in self._bad_as_stored for sample in diagnosis.sample_ids)
            for diagnosis in verdicts
        )

    def spent(self, step: int) -> int:
        """Number of the last 100 steps that failed for a new reason, which `max_skips` limits."""
        return sum(incident > step - _WINDOW for incident in self._incidents)

    def is_stuck(self, max_skips: int) -> bool:
        """True if so many consecutive steps were lost that nothing is being trained."""
        return self.in_a_row >= max(_MANY_IN_A_ROW, max_skips)

    def skip(self, step: int, verdicts: Sequence[Verdict]) -> None:
        """Count a skipped step."""
        named = _named_samples(verdicts)
        # A known bad sample that returns in each epoch is no new incident.
        if not named or set(named) - self._samples.keys():
            self._incidents.append(step)
        self.lose(step, verdicts)
        # Only samples that are bad as stored will fail again for certain.
        self._bad_as_stored |= {
            s for v in verdicts if v.cause in _BAD_AS_STORED for s in v.sample_ids if s in named
        }

    def lose(self, step: int, verdicts: Sequence[Verdict]) -> None:
        """Count a step that not all of its optimizers have taken, for any recovery action."""
        named = _named_samples(verdicts)
        # Another optimizer took this step before this one failed: it no longer counts as taken.
        self.taken -= int(step == self._last_taken)
        self.lost += 1
        self.in_a_row += 1
        self._num_unnamed += not named
        self._samples.update(named)

    def take(self, step: int) -> None:
        """Count a taken step."""
        self._last_taken = step
        self.taken += 1
        self.in_a_row = 0

    def closing(self) -> str | None:
        """One line on the lost steps; None if none was lost."""
        if not self.lost:
            return None
        line = f"{self.lost} of {self.taken + self.lost} optimizer steps were not taken"
        if self._samples:
            worst = self._samples.most_common(_MAX_NAMED)
            samples = ", ".join(f"{sample} ({count}x)" for sample, count in worst)
            more = len(self._samples) - len(worst)
            line += f"; remove or mend the samples that cost them: {samples}"
            line += f" and {more} more" if more > 0 else ""
            if self._num_unnamed:
                line += f"; {self._num_unnamed} had another cause (events.jsonl)"
        return line


def _named_samples(verdicts: Sequence[Verdict]) -> list[str]:
    """Each named sample once, in order of appearance. A set would have a different order in each run."""
    return list(dict.fromkeys(s for v in verdicts for s in v.sample_ids if is_sample_name(s)))
