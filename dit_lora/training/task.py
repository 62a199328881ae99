"""Says what differs between the kinds of models that the one loop trains: diffusion, and chat.

The loop, the guard, checkpoints and resuming know neither. A task makes the training set and the model, says what
identifies them, looks at the model before and after, and writes what was trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import nn

from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.digests import Digests
from dit_lora.data.loading.training_set import Prepared
from dit_lora.families.base import Trained
from dit_lora.results.verify.reference_model import ReferenceModel
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.session.session import Session
from dit_lora.training.step import StepResult

CheckpointT = TypeVar("CheckpointT", bound=Trained, covariant=True)
PreparedT = TypeVar("PreparedT", bound=Prepared, covariant=True)


@dataclass(frozen=True)
class Setup(Generic[PreparedT, CheckpointT]):
    """The objects that a run was set up with, the same from before its first step to its end."""

    session: Session
    task: "Task"
    checkpoint: CheckpointT
    data: PreparedT
    engine: Engine

    @property
    def recipe(self) -> Recipe:
        return self.session.recipe

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self.session.precision.dtype

    @property
    def model(self) -> nn.Module:
        """The module that a training forward goes through."""
        return self.engine.model

    @property
    def transformer(self) -> nn.Module:
        """The model with its own names, without DDP around it."""
        return self.engine.bare

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer


# For the many functions to which the kind of model is all the same.
AnySetup: TypeAlias = Setup[Prepared, Trained]


class Task(Protocol):
    """One kind of model."""

    def prepare_data(self, session: Session, checkpoint: Any) -> Prepared:
        """Read, check and, for diffusion, encode what the recipe trains on. Collective."""

    def load_trainable(
        self, recipe: Recipe, family: Any, checkpoint: Any, dtype: torch.dtype
    ) -> tuple[nn.Module, list[dict[str, Any]], str]:
        """Return model, parameter groups, and lines that say what was attached; equal on all ranks."""

    def model_digest(self, checkpoint: Any, recipe: Recipe, digests: Digests) -> str:
        """Return the digest of the files that the model is loaded from."""

    def identity(self, recipe: Recipe) -> dict[str, Any]:
        """Return the task's own values that a resumed run must share, named as in the recipe."""

    def provenance(self, setup: Setup[Any, Any]) -> dict[str, Any]:
        """Return what the result's header says beside what all tasks say."""

    def loss_parts(self, setup: Setup[Any, Any], result: StepResult) -> dict[str, dict[str, float]]:
        """Return means of a step's losses by something that tells them apart, for metrics.jsonl."""

    def held_out_loss(self, setup: Setup[Any, Any]) -> float | None:
        """Return a loss on what is never trained on; None without. Collective."""

    def show(self, setup: Setup[Any, Any], step: int) -> None:
        """Write what the model makes of the validation prompts below samples/step_NNNNNN. Collective."""

    def stock(self, checkpoint: Any) -> "ReferenceModel":
        """Return the checkpoint as its own library loads it, for checks of what was saved."""

    def save(
        self, setup: Setup[Any, Any], made: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
    ) -> Path:
        """Write the result, on the main process, and return its path; refused if it is not finite or without effect.

        `weights` are what was trained, whole.
        """
