"""Holds what recovery changes of a run: state that checkpoints keep, and the files of the run's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.guard.event import Event
from dit_lora.guard.replay import MicroBatch


class RunFiles(Protocol):
    """Changes a run's files for recovery; called on every rank, written by one."""

    def event(self, event: Event) -> None: ...

    def rewind(self, step: int, *, other_trajectory: bool) -> None:
        """Drop the lines of the steps after `step`; if another trajectory follows, their checkpoints too."""

    def quarantined(self, quarantine: Quarantine) -> None:
        """Write the list of samples that are left out."""

    def left_out(self, step: int, guard: Mapping[str, Any]) -> None:
        """Save, with the guard's record, if it is due after this step, which changed nothing."""

    def set_aside_bad(self, samples: Sequence[str]) -> list[str]:
        """Rename these samples' bad cache entries and say so."""

    def save(self, step: int, guard: Mapping[str, Any]) -> None:
        """Checkpoint the weights as they are, with the guard's record; raises if they are not finite."""

    def newest_saved(self) -> int:
        """Return the step of the newest checkpoint, equal on all ranks; 0 without one."""

    def bundle(self, micro_batch: MicroBatch, event: Event) -> str | None:
        """Write what `dit-lora replay` needs; return its path in the run's folder, or None."""

    def say(self, line: str) -> None: ...


@dataclass
class GuardState:
    """Changes that recovery has made to a run; they go into its checkpoints."""

    lr_scale: float = 1.0
    switched_off: list[str] = field(default_factory=list)
    passed: int | None = None
    """The step of the last comparison of kernels that found nothing, in this run or in the one that it resumes."""
