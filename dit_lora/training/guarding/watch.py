"""Monitors every step: snapshots, module statistics, spikes, and the adaptive clip computed from them."""

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
    """Monitors each step without changing it; disabled parts are None."""

    snapshots: Snapshots
    monitor: Monitor | None = None
    spikes: SpikeDetector | None = None
    adaptive_clip: bool = False

    def forward(self, step: int) -> Any:
        """Context around a step's micro-steps."""
        monitor = self._due(step)
        return monitor.watching() if monitor else nullcontext()

    def looks_at(self, step: int) -> bool:
        """True in steps with module statistics, which are read from the device in addition to the metrics."""
        return self._due(step) is not None

    def gradients(self, step: int) -> None:
        """Collect gradient statistics, after backward and before clipping."""
        if monitor := self._due(step):
            monitor.gradients()

    def before_update(self, step: int) -> None:
        # A snapshot's copy may still run on another stream, reading tensors that the optimizer writes next.
        self.snapshots.before_update()
        if monitor := self._due(step):
            monitor.before_update()

    def after_update(self, step: int) -> None:
        if monitor := self._due(step):
            monitor.after_update()

    def clip(self, group: str) -> float | None:
        """Upper bound on the group's gradient norm, known before this step; None without adaptive clipping."""
        if self.spikes is None or not self.adaptive_clip:
            return None
        # From earlier steps only, so that it is known before this one and equal on all ranks.
        return self.spikes.limit(f"grad_norm {group}")

    def statistics(self, step: int) -> dict[str, dict[str, float]] | None:
        """Every module's statistics, in the steps that have them; else None."""
        monitor = self._due(step)
        return monitor.collect() if monitor else None

    def hidden_infinities(self, step: int) -> list[str]:
        """Modules whose output overflowed its dtype although the loss is finite."""
        monitor = self._due(step)
        return monitor.hidden_infinities() if monitor else []

    def observe(self, line: Mapping[str, Any]) -> list[Spike]:
        """Spikes in a line of metrics.jsonl; a resumed run observes the earlier lines first."""
        if self.spikes is None:
            return []
        # Only values that are equal on every rank: medians and clips must not differ.
        series = {
            f"loss {part}": loss for name in LOSS_PARTS for part, loss in line.get(name, {}).items()
        }
        series |= {f"grad_norm {name}": norm for name, norm in line["grad_norm_groups"].items()}
        spikes = [self.spikes.observe(name, value) for name, value in series.items()]
        return [spike for spike in spikes if spike is not None]

    def prime(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace the observed history with these lines of metrics.jsonl."""
        if self.spikes is not None:
            self.spikes.forget()
        for line in lines:
            self.observe(line)

    def _due(self, step: int) -> Monitor | None:
        return self.monitor if self.monitor is not None and self.monitor.due(step) else None


def prime_spikes(watcher: StepWatcher, journal: Journal | None) -> None:
    """Give every rank's watcher the history in metrics.jsonl, which only the main process has. Collective."""
    if watcher.spikes is None:
        return
    # Only one rank has the file, but every rank needs the same adaptive clip.
    (lines,) = broadcast_object_list([journal.history() if journal is not None else None])
    watcher.prime(lines)
