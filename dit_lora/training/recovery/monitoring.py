"""Monitors every step: snapshots, module statistics, spikes, and the adaptive clip computed from them."""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from dit_lora.guard.monitor import Monitor
from dit_lora.guard.snapshots import Snapshots
from dit_lora.guard.spikes import Spike, SpikeDetector
from dit_lora.numerics.ranks import broadcast_object
from dit_lora.training.journal import LOSS_PART_KEYS, Journal


@dataclass
class StepMonitor:
    """Monitors each step of training without changing it; disabled parts are None."""

    snapshots: Snapshots
    monitor: Monitor | None = None
    spikes: SpikeDetector | None = None
    adaptive_clip: bool = False

    def record_forward_outputs(self, step: int) -> Any:
        """Context around a step's forward and backward passes that records module outputs if the step is due."""
        monitor = self._get_due_monitor(step)
        return monitor.record_outputs() if monitor else nullcontext()

    def has_statistics(self, step: int) -> bool:
        """True in steps with module statistics, which are read from the device in addition to the metrics."""
        return self._get_due_monitor(step) is not None

    def collect_gradient_statistics(self, step: int) -> None:
        """Collect gradient statistics, after backward and before clipping."""
        if monitor := self._get_due_monitor(step):
            monitor.record_gradient_norms()

    def before_update(self, step: int) -> None:
        # A snapshot's copy may still run on another stream, reading tensors that the optimizer writes next.
        self.snapshots.before_update()
        if monitor := self._get_due_monitor(step):
            monitor.before_update()

    def after_update(self, step: int) -> None:
        if monitor := self._get_due_monitor(step):
            monitor.after_update()

    def get_clip_bound(self, group: str) -> float | None:
        """Upper bound on the group's gradient norm, known before this step; None without adaptive clipping."""
        if self.spikes is None or not self.adaptive_clip:
            return None
        # From earlier steps only, so that it is known before this one and equal on all ranks.
        return self.spikes.get_spike_limit(f"grad_norm {group}")

    def collect_statistics(self, step: int) -> dict[str, dict[str, float]] | None:
        """Statistics of every module, in the steps that have them; else None."""
        monitor = self._get_due_monitor(step)
        return monitor.collect_module_statistics() if monitor else None

    def find_hidden_infinities(self, step: int) -> list[str]:
        """Modules whose output overflowed its dtype although the loss is finite."""
        monitor = self._get_due_monitor(step)
        return monitor.find_hidden_infinities() if monitor else []

    def find_metric_spikes(self, line: Mapping[str, Any]) -> list[Spike]:
        """Spikes in the values of a line of metrics.jsonl. A resumed run observes the earlier lines first."""
        if self.spikes is None:
            return []
        # Only values that are equal on every rank: medians and clips must not differ.
        series = {f"loss {part}": loss for name in LOSS_PART_KEYS for part, loss in line.get(name, {}).items()}
        series |= {f"grad_norm {name}": norm for name, norm in line["grad_norm_groups"].items()}
        spikes = [self.spikes.add_value_and_detect(name, value) for name, value in series.items()]
        return [spike for spike in spikes if spike is not None]

    def replace_history(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace the spike detector's history with these lines of metrics.jsonl."""
        if self.spikes is not None:
            self.spikes.clear_all_series()
        for line in lines:
            self.find_metric_spikes(line)

    def _get_due_monitor(self, step: int) -> Monitor | None:
        return self.monitor if self.monitor is not None and self.monitor.is_due(step) else None


def share_spike_history(watcher: StepMonitor, journal: Journal | None) -> None:
    """Give every rank's spike detector the history in metrics.jsonl, which only the main process has. Collective."""
    if watcher.spikes is None:
        return
    # Only one rank has the file, but every rank needs the same adaptive clip.
    lines = broadcast_object(journal.read_history() if journal is not None else [])
    watcher.replace_history(lines)
