"""The small loop as a library's trainer runs it, guarded by its callback: Transformers' and, where it is installed,
Lightning's.
"""

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.faults.loop import ROWS, STEPS, BadData, Batch, Toy, ToyLoop, batch_of


class TrainerLoop(ToyLoop):
    """A trainer on six steps of three samples, which clips and schedules itself."""

    def begin(self) -> None:
        self.ema = None  # a trainer has none

    def sample(self, step: int, row: int) -> str:
        return f"dataset index {ROWS * (step - 1) + row}"

    def loader(self) -> DataLoader[Batch]:
        batches = [batch_of(step, 0) for step in range(1, STEPS + 1)]
        if isinstance(self.spoil, BadData):
            for step, batch in enumerate(batches, 1):
                self.spoil(self, step, batch)
        rows = [{name: t[row] for name, t in b.items()} for b in batches for row in range(ROWS)]
        dataset: Any = rows  # a list has what a loader asks for
        return DataLoader(dataset, batch_size=ROWS)

    def loss(self, model: Any, step: int, batch: Batch) -> torch.Tensor:
        if not isinstance(self.spoil, BadData):
            self.spoil(self, step, batch)
        output: torch.Tensor = model(batch["x"], labels=batch["labels"])
        return (output.float() - batch["y"]).square().mean()


class TransformersLoop(TrainerLoop):
    """A Trainer of Transformers."""

    def run(self) -> None:
        from transformers import Trainer, TrainingArguments

        from dit_lora.guard.attach.callbacks.trainer_callback import GuardCallback

        loop = self

        class ToyTrainer(Trainer):
            def get_train_dataloader(self) -> Any:
                return self.accelerator.prepare(loop.loader())

            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
                return loop.loss(model, self.state.global_step + 1, inputs)

        class Noting(GuardCallback):
            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                super().on_train_begin(*args, **kwargs)
                assert self.guard is not None
                loop.guard = self.guard

        arguments = TrainingArguments(
            output_dir=str(self.folder), max_steps=STEPS, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
            average_tokens_across_devices=False,
        )  # fmt: skip
        trainer = ToyTrainer(
            self.bare,
            arguments,
            train_dataset=[{}],
            optimizers=(self.optimizer, self.schedule),
        )
        trainer.add_callback(Noting(trainer, self.config))
        trainer.train()


class LightningLoop(TrainerLoop):
    """A Trainer of Lightning, whose module is the model."""

    def toy(self) -> Toy:
        from lightning.pytorch import LightningModule

        loop = self

        class ToyModule(Toy, LightningModule):
            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                return loop.loss(self, index + 1, batch)

            def configure_optimizers(self) -> Any:
                schedule = {"scheduler": loop.schedule, "interval": "step"}
                return {"optimizer": loop.optimizer, "lr_scheduler": schedule}

        return ToyModule()

    def run(self) -> None:
        from lightning.pytorch import Trainer

        from dit_lora.guard.attach.callbacks.lightning_callback import LightningGuard

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # its banner
        loop = self

        class Noting(LightningGuard):
            def on_train_start(self, *args: Any) -> None:
                super().on_train_start(*args)
                assert self.guard is not None
                loop.guard = self.guard

        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[Noting(self.config, folder=self.folder)],
            gradient_clip_val=1.0, default_root_dir=self.folder,
        )  # fmt: skip
        module: Any = self.bare
        trainer.fit(module, self.loader())


TRAINERS: Mapping[str, type[TrainerLoop]] = {
    "a Trainer of Transformers": TransformersLoop,
    **({"a Trainer of Lightning": LightningLoop} if find_spec("lightning") else {}),
}
"""Kinds of trainers, in words."""
