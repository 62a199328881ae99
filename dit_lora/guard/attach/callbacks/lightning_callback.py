"""The guard as a callback for Lightning's Trainer, from `lightning` or `pytorch_lightning`."""

import sys
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.containment import try_or_warn
from dit_lora.guard.attach.finite_checks import CHECKS
from dit_lora.guard.attach.guard import Guard
from dit_lora.guard.attach.interception import MethodInterceptions
from dit_lora.guard.attach.loop_events import EVENTS

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    # Use the package that the script has imported: both may be installed, and each takes seconds to import.
    _installed = [name for name in ("lightning", "pytorch_lightning") if find_spec(name)]
    _package = next((name for name in _installed if name in sys.modules), _installed[0] if _installed else None)
    if _package is None:
        raise DitLoraError("LightningGuard needs lightning or pytorch_lightning; pip install lightning")
    if _package == "lightning":
        from lightning.pytorch import Callback
    else:
        from pytorch_lightning import Callback


class LightningGuard(Callback):
    """Callback that guards a Lightning `Trainer`: `Trainer(callbacks=[LightningGuard()])`.

    Events go to `events.jsonl` in the trainer's log folder. A skipped step leaves weights, optimizers and schedules as
    they were. Before each checkpoint, the trained state is checked and restored if it is not finite.

    Args:
        config: A `LoopConfig` or `RecoveryConfig`, as in `Guard.attach`.
        folder: Where events go instead of the log folder.
        checks: As in `Guard.attach`.
    """

    def __init__(
        self,
        config: RecoveryConfig | None = None,
        *,
        folder: str | Path | None = None,
        checks: Collection[str] = CHECKS,
    ) -> None:
        super().__init__()
        self.config = config
        self.folder = folder
        self.checks = checks
        self.guard: Guard | None = None
        """The guard; None before training starts."""
        self._interceptions = MethodInterceptions()
        self._is_following = False

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Start following the data loaders, which Lightning creates before `on_train_start`."""
        # `fit` may be called again with the same callback.
        self._detach()
        EVENTS.install_interceptions()
        self._is_following = True
        # The model gets the copy that this method returns.
        self._interceptions.intercept_method(trainer.strategy, "batch_to_device", self._intercept_batch_transfer)

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        # Read on every rank: Lightning broadcasts the log folder.
        log_folder = trainer.log_dir or trainer.default_root_dir
        self.guard = Guard.create(
            None,
            [pl_module],
            trainer.optimizers,
            lr_scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
            config=self.config,
            folder=self.folder if self.folder is not None else log_folder,
            checks=self.checks,
        )
        self._interceptions.intercept_method(trainer, "save_checkpoint", self._intercept_save)

    def on_train_batch_start(
        self, trainer: "Trainer", pl_module: "LightningModule", batch: Any, batch_idx: int
    ) -> None:
        try_or_warn(lambda: EVENTS.batches.set_current_batch(batch), "following a batch")

    def on_before_optimizer_step(self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Any) -> None:
        if self.guard is not None:  # the trainer clips right after this
            self.guard.before_clipping()

    def on_train_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if self.guard is not None:
            self.guard.check_state()

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Detach the guard from Lightning's trainer. Its last checkpoints are written by now."""
        self._detach()

    def _intercept_save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Check before the checkpoint is assembled: `on_save_checkpoint` runs too late.
        if self.guard is not None:
            self.guard.check_state()
        return original(*args, **kwargs)

    def _intercept_batch_transfer(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        copy = original(batch, *args, **kwargs)
        try_or_warn(lambda: EVENTS.batches.record_batch_copy(batch, copy), "following a batch")
        return copy

    def _detach(self) -> None:
        if self.guard is not None:
            self.guard.detach()
        self._interceptions.restore_originals()
        if self._is_following:
            self._is_following = False
            EVENTS.release_interceptions()
