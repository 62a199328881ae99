"""The guard for Transformers' Trainer."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.guard.attach.finite_checks import CHECKS
from dit_lora.guard.attach.guard import Guard

if TYPE_CHECKING:  # seconds to import, for an annotation
    from transformers import Trainer, TrainingArguments


class GuardCallback(TrainerCallback):
    """Callback that guards a Transformers `Trainer`: `trainer.add_callback(GuardCallback(trainer))`.

    Events go to `events.jsonl` in the trainer's output folder. A skipped step leaves weights, optimizer and schedule
    unchanged; its loss still reaches the trainer's log. The end of training reports the number of skipped steps.

    Args:
        trainer: The `Trainer` that the callback is added to.
        config: A `LoopConfig` or `RecoveryConfig`, as in `Guard.attach`.
        checks: As in `Guard.attach`.
    """

    def __init__(
        self, trainer: "Trainer", config: RecoveryConfig | None = None, *, checks: Collection[str] = CHECKS
    ) -> None:
        self.trainer = trainer
        self.config = config
        self.checks = checks
        self.guard: Guard | None = None
        """The guard; None before training starts."""

    def on_train_begin(
        self, args: "TrainingArguments", state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.guard = Guard.attach(
            self.trainer.accelerator,
            self.trainer.model_wrapped,
            self.trainer.optimizer,
            lr_scheduler=self.trainer.lr_scheduler,
            config=self.config,
            # `output_dir` may be empty: then nothing is written.
            folder=Path(args.output_dir) if args.output_dir else None,
            checks=self.checks,
        )

    def on_step_end(
        self, args: "TrainingArguments", state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the trained state before Transformers' `Trainer` saves a checkpoint.

        It saves after its callbacks if `should_save` is still set.
        """
        if self.guard is not None and control.should_save:
            self.guard.check_state()

    on_epoch_end = on_step_end

    def on_evaluate(
        self, args: "TrainingArguments", state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.guard is not None:  # save_strategy="best" decides to save right after this
            self.guard.check_state()

    def on_train_end(
        self, args: "TrainingArguments", state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.guard is not None:
            self.guard.check_state()
            self.guard.detach()
