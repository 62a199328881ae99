"""Context parallelism: ranks share each sample's tokens, for videos whose activations one GPU cannot hold."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import nn

from dit_lora.data.loading.training_set import TrainingData
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import Checkpoint, TrainableCheckpoint
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.distributed.token_split import (
    TOKEN_EXCHANGE_BACKENDS,
    disable_token_split,
    enable_token_split,
    find_context_problems,
    has_context_plan,
)
from dit_lora.training.session.session import Session


@dataclass
class ContextParallel(Engine):
    """Engine with replicated weights whose ranks share samples.

    Every `degree` consecutive ranks run the same samples, each on its share of the tokens.
    """

    degree: int = 1
    collective_forward: ClassVar[bool] = True

    def enable_local_forward(self) -> AbstractContextManager[None]:
        return disable_token_split(self.unwrapped_model)

    def backward(self, loss: torch.Tensor) -> None:
        # Each rank has the gradient of its own tokens: the parts must be summed, but DDP averages them.
        super().backward(loss * self.degree)


def enable_context_parallel(
    session: Session, checkpoint: TrainableCheckpoint, data: TrainingData, model: nn.Module
) -> None:
    """Split the model's tokens over ranks according to `train.context_parallel`, before DDP wraps it.

    Raises `DitLoraError` for a model, data set or option that does not support it.
    """
    recipe, accelerator = session.recipe, session.accelerator
    degree, ranks = recipe.train.context_parallel, accelerator.num_processes
    if degree == 1:
        return
    option = f"train.context_parallel={degree}"
    if not has_context_plan(model):
        raise DitLoraError(f"{option}: {type(model).__name__} is not supported; CogVideoX is")
    # Only diffusion transformers have such a plan.
    denoiser = cast(Checkpoint, checkpoint).denoiser
    tokens = {denoiser.count_tokens(entry.shape) for entry in data.training_set.entries}
    # A plan splits tokens evenly: every length in the data set has to be a multiple of `degree`.
    problems = find_context_problems(model, degree, tokens)
    # Attention that bypasses Diffusers' dispatcher would silently see only a share of the tokens.
    if recipe.kernels.attention not in ("auto", *TOKEN_EXCHANGE_BACKENDS):
        problems.append(
            f"kernels.attention={recipe.kernels.attention} does not exchange tokens; choose auto, "
            f"{', '.join(TOKEN_EXCHANGE_BACKENDS)}"
        )
    if recipe.train.offload != "none" or recipe.train.compile:
        problems.append("train.offload and train.compile, which need the same blocks; remove them")
    if recipe.lora.dropout:
        problems.append("lora.dropout draws for each rank's tokens, which no replay can repeat; 0")
    if problems:
        raise DitLoraError(format_list(f"{option} cannot be", problems))
    # The kernels are in place by now: splitting needs their attention processors.
    enable_token_split(model, degree, accelerator.device, accelerator.process_index, ranks)
