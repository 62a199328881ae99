"""Limits the samples between the first and the last validation to a share of the steps' time."""

from dataclasses import dataclass, field

_NUM_SHOWN = 5
"""Number of steps without samples that the closing line lists."""


@dataclass
class SamplingTimeBudget:
    """The time that steps and samples have taken in this process (`validation.max_sample_share`).

    It counts from the start of the process, and does not know the samples before and after training, which are always
    generated.
    """

    max_share: float | None
    """Largest share of the steps' time; None for no limit."""
    step_s: float = 0.0
    """Wall time of the steps, in seconds."""
    sample_s: float = 0.0
    """Wall time of the samples between the first and the last validation, in seconds."""
    last_cost_s: float = 0.0
    """Wall time of the last samples, in seconds; 0 before any were generated, so that the first ones are."""
    skipped_steps: list[int] = field(default_factory=list)

    def is_affordable(self) -> bool:
        """True if samples that take as long as the last ones keep within the share of the steps so far."""
        if self.max_share is None:
            return True
        return self.sample_s + self.last_cost_s <= self.max_share * self.step_s

    def record_step_without_samples(self, step: int) -> None:
        """Add a step to those whose validation samples were left out, as they would have taken too long."""
        # A step is repeated after a rollback.
        if step not in self.skipped_steps:
            self.skipped_steps.append(step)

    def add_sampling_time(self, step: int, seconds: float, *, is_between: bool) -> None:
        """Count the samples of a step; `is_between` if they are not the first or the last ones."""
        self.last_cost_s = seconds
        # Left out before: the last step of a run that ends early, or a step that is repeated.
        if step in self.skipped_steps:
            self.skipped_steps.remove(step)
        if is_between:
            self.sample_s += seconds

    def describe_skipped(self) -> str | None:
        """Which steps have no samples, and how to get them; None if all have."""
        if not self.skipped_steps:
            return None
        # A long run may have left out hundreds.
        listed = ", ".join(map(str, self.skipped_steps[:_NUM_SHOWN]))
        num_more = len(self.skipped_steps) - _NUM_SHOWN
        more = f" and {num_more} more" if num_more > 0 else ""
        return f"no samples at steps {listed}{more}; validation.max_sample_share=null takes all"
