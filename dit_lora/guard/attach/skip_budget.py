"""Count the steps that a loop loses, by cause. A bad sample counts once, not once per epoch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dit_lora.guard.attach.samples.row_names import is_sample_name
from dit_lora.guard.diagnosis import Diagnosis

_WINDOW_STEPS = 100
"""Number of recent steps over which `max_skips` counts."""
_MIN_STUCK_STEPS = 10
"""After this many skipped steps in a row, for any reason, nothing is being trained."""
_STORED_DATA_CAUSES = ("data", "labels")
_MAX_NAMED = 10


@dataclass
class SkipBudget:
    """Counts of taken and skipped steps, equal on all ranks."""

    num_taken: int = 0
    num_lost: int = 0
    """Steps that were skipped or undone."""
    num_consecutive_lost: int = 0
    """Steps lost since the last taken step."""
    _incident_steps: list[int] = field(default_factory=list)
    """Steps that failed for a new reason: a sample that had not failed before, or no named sample."""
    _steps_by_sample: Counter[str] = field(default_factory=Counter)
    """Number of steps that each named sample has cost."""
    _known_bad_samples: set[str] = field(default_factory=set)
    _last_taken_step: int = 0
    _num_unnamed: int = 0
    """Number of lost steps without a named sample."""

    def has_known_causes(self, diagnoses: Sequence[Diagnosis]) -> bool:
        """True if all diagnoses name only samples that are already known to be bad as stored."""
        return bool(diagnoses) and all(
            diagnosis.cause in _STORED_DATA_CAUSES
            and diagnosis.sample_ids
            and all(sample in self._known_bad_samples for sample in diagnosis.sample_ids)
            for diagnosis in diagnoses
        )

    def count_recent_incidents(self, step: int) -> int:
        """Number of the last 100 steps that failed for a new reason, which `max_skips` limits."""
        return sum(incident > step - _WINDOW_STEPS for incident in self._incident_steps)

    def has_too_many_lost_steps(self, max_skips: int) -> bool:
        """True if so many consecutive steps were lost that nothing is being trained."""
        return self.num_consecutive_lost >= max(_MIN_STUCK_STEPS, max_skips)

    def count_skipped_step(self, step: int, diagnoses: Sequence[Diagnosis]) -> None:
        named = _list_named_samples(diagnoses)
        # A known bad sample that returns in each epoch is not a new incident.
        if not named or set(named) - self._steps_by_sample.keys():
            self._incident_steps.append(step)
        self.count_lost_step(step, diagnoses)
        # Only samples that are bad as stored will fail again for certain.
        self._known_bad_samples |= {
            sample
            for diagnosis in diagnoses
            if diagnosis.cause in _STORED_DATA_CAUSES
            for sample in diagnosis.sample_ids
            if sample in named
        }

    def count_lost_step(self, step: int, diagnoses: Sequence[Diagnosis]) -> None:
        """Count a step that was lost, because not all of its optimizers have taken it, for any recovery action."""
        named = _list_named_samples(diagnoses)
        # Another optimizer took this step before this one failed: it no longer counts as taken.
        self.num_taken -= int(step == self._last_taken_step)
        self.num_lost += 1
        self.num_consecutive_lost += 1
        self._num_unnamed += not named
        self._steps_by_sample.update(named)

    def count_taken_step(self, step: int) -> None:
        self._last_taken_step = step
        self.num_taken += 1
        self.num_consecutive_lost = 0

    def format_summary(self) -> str | None:
        """Summary of the lost steps on one line; None if none was lost."""
        if not self.num_lost:
            return None
        line = f"{self.num_lost} of {self.num_taken + self.num_lost} optimizer steps were not taken"
        if self._steps_by_sample:
            worst = self._steps_by_sample.most_common(_MAX_NAMED)
            samples = ", ".join(f"{sample} ({count}x)" for sample, count in worst)
            more = len(self._steps_by_sample) - len(worst)
            line += f"; remove or repair the samples that caused it: {samples}"
            line += f" and {more} more" if more > 0 else ""
            if self._num_unnamed:
                line += f"; {self._num_unnamed} had another cause (events.jsonl)"
        return line


def _list_named_samples(diagnoses: Sequence[Diagnosis]) -> list[str]:
    """Names of all samples in diagnoses, each once, in order of appearance.

    A set would have a different order in each run.
    """
    names = (sample for diagnosis in diagnoses for sample in diagnosis.sample_ids if is_sample_name(sample))
    return list(dict.fromkeys(names))
