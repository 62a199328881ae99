"""Holds a run as data: the objects it was set up with, and its state."""

from dataclasses import dataclass
from typing import Any

from dit_lora.training.base_fingerprint import BaseFingerprint
from dit_lora.training.checkpoint_state import Checkpoints
from dit_lora.training.ema import TrainedEMA
from dit_lora.training.journal import Journal
from dit_lora.training.recovery.kernel_parity import ParityWatch
from dit_lora.training.recovery.monitoring import StepWatcher
from dit_lora.training.recovery.run_recovery import RunRecovery
from dit_lora.training.task import Setup


@dataclass(frozen=True)
class Run:
    """Everything that a prepared run consists of. Functions that need only a part of it take that part."""

    setup: Setup[Any, Any]
    start_step: int
    """The step that it continues from; 0 at its first start."""
    ema: TrainedEMA | None
    base_fingerprint: BaseFingerprint
    recovery: RunRecovery
    watcher: StepWatcher
    parity: ParityWatch
    checkpoints: Checkpoints
    journal: Journal | None
    """The run's log files; None on all processes but the main one."""
