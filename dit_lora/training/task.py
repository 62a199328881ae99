"""Defines what differs between the kinds of models that the training loop supports: diffusion and chat.

The loop, the guard, checkpoints and resuming depend on neither. A task builds the training set and the model, names
what identifies them, validates the model, and writes the trained result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.digests import Digests
from dit_lora.data.loading.training_set import TrainingData
from dit_lora.families.base import TrainableCheckpoint
from dit_lora.training.check_budget import EvalSize
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.session.session import Session
from dit_lora.training.step import StepResult
from dit_lora.verify.reference_model import ReferenceModel

CheckpointT = TypeVar("CheckpointT", bound=TrainableCheckpoint, covariant=True)
TrainingDataT = TypeVar("TrainingDataT", bound=TrainingData, covariant=True)


@dataclass(frozen=True)
class Setup(Generic[TrainingDataT, CheckpointT]):
    """A run's session, task, model and data, which exist before its guard is built. `Run` adds the guard.

    They stay the same objects until the run ends.
    """

    session: Session
    task: "Task"
    checkpoint: CheckpointT
    """The model's files, opened by its family."""
    data: TrainingDataT
    engine: Engine
    """The model and its optimizer, wrapped for the ranks of the launch."""

    @property
    def recipe(self) -> Recipe:
        return self.session.recipe

    @property
    def accelerator(self) -> Accelerator:
        return self.session.accelerator

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the trained model computes in."""
        return self.session.precision.dtype

    @property
    def model(self) -> nn.Module:
        """The module to call for a training forward, possibly wrapped in DDP."""
        return self.engine.model

    @property
    def transformer(self) -> nn.Module:
        """The unwrapped model, with its original parameter names."""
        return self.engine.unwrapped_model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer


# For functions that work with every kind of model.
AnySetup: TypeAlias = Setup[TrainingData, TrainableCheckpoint]


class Task(Protocol):
    """Protocol of a training task: what differs between diffusion and chat models."""

    def prepare_data(self, session: Session, checkpoint: Any) -> TrainingData:
        """Read, check and (for diffusion) encode the training data. Collective."""

    def load_trainable(
        self, recipe: Recipe, family: Any, checkpoint: Any, dtype: torch.dtype
    ) -> tuple[nn.Module, list[dict[str, Any]], str]:
        """Load the model, equal on all ranks. Returns it, its parameter groups, and text on what trains."""

    def model_digest(self, checkpoint: Any, recipe: Recipe, digests: Digests) -> str:
        """Digest of the files that the model's weights are loaded from."""

    def trajectory_config(self, recipe: Recipe) -> dict[str, Any]:
        """The task's settings that a resumed run must share with its checkpoint, named as in the recipe."""

    def build_metadata(self, setup: Setup[Any, Any]) -> dict[str, Any]:
        """The task's metadata for the result's header, added to what all tasks record."""

    def loss_parts(self, setup: Setup[Any, Any], result: StepResult) -> dict[str, dict[str, float]]:
        """Mean losses of a step by category (for example by timestep), for metrics.jsonl."""

    def find_reduced_eval_size(self, setup: Setup[Any, Any]) -> EvalSize | None:
        """The size of this run's eval losses if it is too short for the recipe's size, else None. Collective."""

    def compute_eval_loss(self, setup: Setup[Any, Any]) -> float | None:
        """The loss at fixed noise: of training clips, or of `validation.conversations`; None without. Collective."""

    def compute_validation_loss(self, setup: Setup[Any, Any]) -> float | None:
        """The loss at fixed noise of `validation.data`, which is not trained on; None without it. Collective."""

    def write_samples(self, setup: Setup[Any, Any], step: int) -> None:
        """Write the model's outputs for the validation prompts to samples/step_NNNNNN. Collective."""

    def build_reference_model(self, checkpoint: Any) -> "ReferenceModel":
        """The checkpoint as its library loads it, for checks of the saved result against the unpatched model."""

    def save(self, setup: Setup[Any, Any], metadata: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Path:
        """Write the training result and return its path.

        Main process only; raises if it is not finite or has no effect.

        `weights` are the trained weights, unsharded.
        """

    def write_adapter(
        self, setup: Setup[Any, Any], folder: Path, metadata: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
    ) -> Path:
        """Write the adapter, and trained base weights, to `folder`; returns the path of the file.

        Reads only names and configs of the live model, so a background thread may call it while the model trains.
        Raises `CheckFailedError`, before anything is written, if it is not finite or has no effect.
        """
