"""Holds a run as data: its session, model and data, its guard and its files."""

from dataclasses import dataclass, field
from typing import Any

from dit_lora.training.base_fingerprint import BaseFingerprint
from dit_lora.training.checkpoint_state import CheckpointManager
from dit_lora.training.early_stopping import EarlyStop
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.journal import Journal
from dit_lora.training.recovery.kernel_parity import PeriodicKernelComparison
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.training.recovery.run_recovery import RunRecovery
from dit_lora.training.session.sample_budget import SamplingTimeBudget
from dit_lora.training.task import Setup


@dataclass(frozen=True)
class Run(Setup[Any, Any]):
    """A run that is ready to train: a `Setup` with its guard, saved checkpoints and log files.

    Functions that are also called before the guard is built take a `Setup`: pass them the run itself.
    """

    start_step: int
    """The step that it continues from; 0 at its first start."""
    ema: TrainedEMA | None
    base_fingerprint: BaseFingerprint
    recovery: RunRecovery
    watcher: StepMonitor
    parity: PeriodicKernelComparison
    saved_checkpoints: CheckpointManager
    journal: Journal | None
    """The run's log files; None on all processes but the main one."""
    sample_budget: SamplingTimeBudget
    early_stop: EarlyStop = field(default_factory=EarlyStop)

    @property
    def last_step(self) -> int:
        """The step after which training ends: the recipe's last one, or an earlier one (`train.stop_after`)."""
        return self.recipe.train.steps if self.early_stop.step is None else self.early_stop.step
