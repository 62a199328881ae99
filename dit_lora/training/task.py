"""What differs between the kinds of models that the one loop trains: diffusion, and chat.

The loop, the guard, checkpoints and resuming know neither. A task makes the training set and the model, says what
identifies them, looks at the model before and after, and writes what was trained.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from dit_lora.config import Recipe
from dit_lora.data.digest import Digests
from dit_lora.data.training_set import TrainingSet
from dit_lora.families import CHAT_FAMILIES
from dit_lora.numerics.streams import Streams
from dit_lora.objectives import LossOutput
from dit_lora.training.runtime import Runtime

if TYPE_CHECKING:
    from dit_lora.training.loop import StepResult
    from dit_lora.training.output_record import Stock
    from dit_lora.training.run import Run


class Trained(Protocol):
    """What the loop knows of a checkpoint."""

    @property
    def path(self) -> Path: ...

    def losses(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput: ...


@dataclass(frozen=True)
class Prepared:
    """The training set, ready to be read, and digests of what makes a run this run."""

    clips: TrainingSet
    data_digest: str
    transformer_digest: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Samples that are left out, by `data.rejects: skip`, and why."""


class Task(Protocol):
    """One kind of model."""

    def prepare_data(self, runtime: Runtime, checkpoint: Any) -> Prepared:
        """Read, check and, for diffusion, encode what the recipe trains on. Collective."""

    def load_trainable(
        self, recipe: Recipe, family: Any, checkpoint: Any, dtype: torch.dtype
    ) -> tuple[nn.Module, list[dict[str, Any]], str]:
        """Model, parameter groups, and lines that say what was attached; equal on all ranks."""

    def model_digest(self, checkpoint: Any, recipe: Recipe, digests: Digests) -> str:
        """Of the files that the model is loaded from."""

    def weight_files(self, checkpoint: Any) -> Sequence[Path]:
        """The model's safetensors files."""

    def identity(self, recipe: Recipe) -> dict[str, Any]:
        """Values of its own that a resumed run must share, named as in the recipe."""

    def provenance(self, run: "Run") -> dict[str, Any]:
        """What the result's header says beside what all tasks say."""

    def loss_parts(self, run: "Run", result: "StepResult") -> dict[str, dict[str, float]]:
        """Means of a step's losses by something that tells them apart, for metrics.jsonl."""

    def held_out_loss(self, run: "Run") -> float | None:
        """A loss on what is never trained on; None without. Collective."""

    def show(self, run: "Run", step: int) -> None:
        """Write what the model makes of the validation prompts below samples/step_NNNNNN. Collective."""

    def stock(self, checkpoint: Any) -> "Stock":
        """The checkpoint as its own library loads it, for checks of what was saved."""

    def save(
        self, run: "Run", made: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
    ) -> Path:
        """Write the result, on the main process; refused if it is not finite or without effect.

        `weights` are what was trained, whole.
        """


def task_of(family: str) -> Task:
    """The task of a family."""
    name = "chat.task" if family in CHAT_FAMILIES else "diffusion"
    return importlib.import_module(f"dit_lora.training.{name}").TASK
