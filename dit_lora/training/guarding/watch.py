"""Watches every step: snapshots, statistics of the modules, spikes, and the adaptive clip they give."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from accelerate.utils import broadcast_object_list

from dit_lora.guard.monitor import Monitor
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.spikes import Spike, SpikeDetector
from dit_lora.training.journal import LOSS_PARTS, Journal


@dataclass
class StepWatcher:
    """Looks at each step without changing it; parts that are switched off are None."""

    snapshots: Snapshots
    monitor: Monitor | None = None
    spikes: SpikeDetector | None = None
    adaptive_clip: bool = False

    def forward(self, step: int) -> Any:
        """Return a context that holds around a step's micro-steps."""
        monitor = self._due(step)
        return monitor.watching() if monitor else nullcontext()

    def looks_at(self, step: int) -> bool:
        """Return true in the steps that have statistics, which are read from the device beside the step's row."""
        return self._due(step) is not None

    def gradients(self, step: int) -> None:
        """Look at the gradients after backward and before clipping."""
        if monitor := self._due(step):
            monitor.gradients()

    def before_update(self, step: int) -> None:
        # Its copy may still be under way on another stream, and reads what the optimizer writes next.
        self.snapshots.before_update()
        if monitor := self._due(step):
            monitor.before_update()

    def after_update(self, step: int) -> None:
        if monitor := self._due(step):
            monitor.after_update()

    def clip(self, group: str) -> float | None:
        """Return a bound on the gradient norm that is known before this step, or None."""
        if self.spikes is None or not self.adaptive_clip:
            return None
        # From earlier steps alone, so that it is known before this one and equal on all ranks.
        return self.spikes.limit(f"grad_norm {group}")

    def statistics(self, step: int) -> dict[str, dict[str, float]] | None:
        """Return every module's statistics in the steps that are due; None in the others."""
        monitor = self._due(step)
        return monitor.collect() if monitor else None

    def hidden_infinities(self, step: int) -> list[str]:
        """Return the modules whose output left the range of its dtype although the loss is finite."""
        monitor = self._due(step)
        return monitor.hidden_infinities() if monitor else []

    def observe(self, line: Mapping[str, Any]) -> list[Spike]:
        """Return what stands out in a line of metrics.jsonl; a resumed run observes the earlier lines first."""
        if self.spikes is None:
            return []
        # Only what every rank has alike: medians and clips must not differ between ranks.
        series = {
            f"loss {part}": loss for name in LOSS_PARTS for part, loss in line.get(name, {}).items()
        }
        series |= {f"grad_norm {name}": norm for name, norm in line["grad_norm_groups"].items()}
        spikes = [self.spikes.observe(name, value) for name, value in series.items()]
        return [spike for spike in spikes if spike is not None]

    def prime(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Forget everything observed, and observe these lines of metrics.jsonl instead."""
        if self.spikes is not None:
            self.spikes.forget()
        for line in lines:
            self.observe(line)

    def _due(self, step: int) -> Monitor | None:
        return self.monitor if self.monitor is not None and self.monitor.due(step) else None


def prime_spikes(watcher: StepWatcher, journal: Journal | None) -> None:
    """Give every rank's watcher the history in metrics.jsonl, which the main process reads. Collective."""
    if watcher.spikes is None:
        return
    # One rank alone has the file, and every rank's adaptive clip has to be the same number.
    (lines,) = broadcast_object_list([journal.history() if journal is not None else None])
    watcher.prime(lines)
