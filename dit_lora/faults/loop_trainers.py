"""Faults of loops that a library's trainer runs, guarded by its callback: Transformers' and, where it is installed, Lightning's."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.faults.fault import Expected, Fault
from dit_lora.faults.loops import STEPS, Toy, batch_of, forget, not_finite
from dit_lora.faults.triggers import Change, Element, write
from dit_lora.faults.world import Observation, World
from dit_lora.guard.plugin.guard import Guard

_ROWS = 3


class ToyObjective(nn.Module):
    """The toy with its loss, as a trainer calls a model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.toy = Toy()

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, y: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        output = self.toy(x, labels=labels)
        return {"loss": (output.float() - y).square().mean(), "logits": output}


class TrainerLoop(ABC):
    """A trainer on six steps of three samples; before a step `spoil` may put a fault in."""

    def __init__(self, folder: Path, spoil: "TrainerSpoil") -> None:
        self.model = ToyObjective()
        self.folder = folder
        self.spoil = spoil
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @abstractmethod
    def train(self) -> None:
        """Train to the end, or until the guard stops it."""

    @property
    @abstractmethod
    def guard(self) -> Guard:
        """The callback's guard, once training has begun."""

    def loader(self) -> DataLoader[dict[str, torch.Tensor]]:
        batches = [batch_of(step, 0) for step in range(1, STEPS + 1)]
        rows = [{name: t[row] for name, t in b.items()} for b in batches for row in range(_ROWS)]
        dataset: Any = rows  # a list has what a loader asks for
        return DataLoader(dataset, batch_size=_ROWS)


class TransformersLoop(TrainerLoop):
    def train(self) -> None:
        from transformers import Trainer, TrainingArguments

        from dit_lora.guard.plugin.callbacks.trainer_callback import GuardCallback

        loop = self

        class ToyTrainer(Trainer):
            def get_train_dataloader(self) -> Any:
                return self.accelerator.prepare(loop.loader())

            def training_step(self, model: Any, inputs: Any, *more: Any) -> torch.Tensor:
                loop.spoil(loop, self.state.global_step + 1, inputs)
                return super().training_step(model, inputs, *more)

        arguments = TrainingArguments(
            output_dir=str(self.folder), max_steps=STEPS, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
            lr_scheduler_type="constant", average_tokens_across_devices=False,
        )  # fmt: skip
        trainer = ToyTrainer(
            self.model, arguments, train_dataset=[{}], optimizers=(self.optimizer, None)
        )
        self.callback = GuardCallback(trainer)
        trainer.add_callback(self.callback)
        trainer.train()

    @property
    def guard(self) -> Guard:
        assert self.callback.guard is not None
        return self.callback.guard


class LightningLoop(TrainerLoop):
    def train(self) -> None:
        from lightning.pytorch import LightningModule, Trainer

        from dit_lora.guard.plugin.callbacks.lightning_callback import LightningGuard

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # its banner
        loop = self

        class ToyModule(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.objective = loop.model

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                loop.spoil(loop, index + 1, batch)
                loss: torch.Tensor = self.objective(**batch)["loss"]
                return loss

            def configure_optimizers(self) -> Any:
                return loop.optimizer

        self.callback = LightningGuard(folder=self.folder)
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[self.callback],
            gradient_clip_val=1.0, default_root_dir=self.folder,
        )  # fmt: skip
        trainer.fit(ToyModule(), self.loader())

    @property
    def guard(self) -> Guard:
        assert self.callback.guard is not None
        return self.callback.guard


TrainerSpoil = Callable[[TrainerLoop, int, dict[str, torch.Tensor]], None]
Find = Callable[[TrainerLoop, dict[str, torch.Tensor]], torch.Tensor]
_KINDS: dict[str, type[TrainerLoop]] = {"Transformers": TransformersLoop}
if find_spec("lightning"):
    _KINDS["Lightning"] = LightningLoop


def _at(step: int, find: Find, change: Change) -> TrainerSpoil:
    def spoil(loop: TrainerLoop, number: int, batch: dict[str, torch.Tensor]) -> None:
        if number == step:
            write(find(loop, batch), change)

    return spoil


def _played(
    kind: type[TrainerLoop], spoil: TrainerSpoil, *, taken: int
) -> Callable[[Fault, World], Observation]:
    """Play a fault; the optimizer has to have taken so many steps at the end."""

    def play(fault: Fault, world: World) -> Observation:
        folder = world.root / f"trainer {fault.name}"
        loop = kind(folder, spoil)
        error: DitLoraError | None = None
        try:
            loop.train()
            counts = {int(state["step"]) for state in loop.optimizer.state.values()}
            wrong = not_finite(loop.model) or _misnamed(loop.guard)
            if counts != {taken}:
                wrong = f"the optimizer took {counts} steps, not {taken}"
            error = CheckFailedError(wrong) if wrong else None
        except DitLoraError as problem:
            error = problem
        finally:
            forget(world.accelerator)
        return Observation(loop.guard.events, error, folder=folder)

    return play


def _misnamed(guard: Guard) -> str | None:
    """Return a complaint if a verdict on data names another row than the third of step 3."""
    named = [e["sample_ids"] for e in guard.events if e["verdict"]["cause"] == "data"]
    right = [f"dataset index {2 * _ROWS + 2}"]
    return f"named are {named}, not {right}" if any(one != right for one in named) else None


def _moment(loop: TrainerLoop, _batch: dict[str, torch.Tensor]) -> torch.Tensor:
    moment: torch.Tensor = loop.optimizer.state[loop.model.toy.last.weight]["exp_avg"]
    return moment


_DATA = Expected("data", "skip", ("1 NaN",))
_MOMENT = Expected("optimizer", "rollback", ("toy.last.weight/exp_avg",))
_ALTERED = Expected("weights", "rollback", ("altered in memory",), module="toy.last")
FAULTS: tuple[Fault, ...] = tuple(
    Fault(
        f"{name} in a Trainer of {library}",
        "plugin",
        "before step 3",
        expected,
        play=_played(kind, _at(3, find, change), taken=taken),
        most_ranks=1,
    )
    for library, kind in _KINDS.items()
    for name, expected, find, change, taken in (
        ("a NaN pixel", _DATA, lambda _, batch: batch["x"][2], Element(math.nan, 5), STEPS - 1),
        ("a NaN target", _DATA, lambda _, batch: batch["y"][2], Element(math.nan, 5), STEPS - 1),
        ("a NaN moment", _MOMENT, _moment, Element(math.nan, 3), STEPS - 4),
        (
            "1e30 in one element of a weight",
            _ALTERED,
            lambda loop, _: loop.model.toy.last.weight.data,
            Element(1e30, 3),
            STEPS - 3,
        ),
    )
)
