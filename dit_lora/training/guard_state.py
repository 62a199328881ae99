"""What recovery changes of a run: state of its own, which checkpoints keep, and the files of the run's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dit_lora.data.quarantine import Quarantine
from dit_lora.numerics.event import Event
from dit_lora.numerics.replay import MicroBatch


class RunFiles(Protocol):
    """What recovery changes of a run's files; called on every rank, written by one."""

    def event(self, event: Event) -> None: ...

    def rewind(self, step: int, *, other_trajectory: bool) -> None:
        """Drop what was written of the steps after `step`; of another trajectory, checkpoints too."""

    def quarantined(self, quarantine: Quarantine) -> None:
        """Write the list."""

    def left_out(self, step: int, guard: Mapping[str, Any]) -> None:
        """Save, with the guard's record, if it is due after this step, which changed nothing."""

    def set_aside_bad(self, samples: Sequence[str]) -> list[str]:
        """Rename these samples' bad cache entries and say so."""

    def save(self, step: int, guard: Mapping[str, Any]) -> None:
        """Checkpoint the weights as they are, with the guard's record; raises if they are not finite."""

    def newest_saved(self) -> int:
        """The step of the newest checkpoint, equal on all ranks; 0 without one."""

    def bundle(self, micro_batch: MicroBatch, event: Event) -> str | None:
        """Keep what `dit-lora replay` needs; its name."""

    def say(self, line: str) -> None: ...


@dataclass
class GuardState:
    """What recovery has changed of a run; goes into its checkpoints."""

    lr_scale: float = 1.0
    switched_off: list[str] = field(default_factory=list)
    passed: int | None = None
    """The step of the last comparison of kernels that found nothing, in this run or in the one that it resumes."""
