"""Output preservation: a second loss on captions without the trigger word, whose target is the base's own prediction.

Also known as differential output preservation. Both predictions use the same latents, noise and timestep.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dit_lora.adapters.under import disable_trained_adapter
from dit_lora.data.loading.batch import PRESERVE_PREFIX, PRESERVE_WEIGHT
from dit_lora.families.base import TrainableCheckpoint
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import RandomStreams


def compute_training_losses(
    checkpoint: TrainableCheckpoint, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: RandomStreams
) -> LossOutput:
    """The family's losses of a batch.

    The preservation loss is added if the batch has captions without the trigger word.
    """
    # One weight per sample, (rows,).
    weight = batch.get(PRESERVE_WEIGHT)
    if weight is None:
        return checkpoint.losses(model, batch, streams)
    main_batch = {n: t for n, t in batch.items() if n != PRESERVE_WEIGHT and not n.startswith(PRESERVE_PREFIX)}
    # First: activations kept for backward would take the memory that this pass needs.
    preserved_batch = main_batch | {
        n.removeprefix(PRESERVE_PREFIX): t for n, t in batch.items() if n.startswith(PRESERVE_PREFIX)
    }
    with disable_trained_adapter(model), torch.no_grad():
        base = _collect_predictions(checkpoint, model, preserved_batch, streams)
    main_output = checkpoint.losses(model, main_batch, streams)
    preservation_loss = mean_squared_difference(
        _collect_predictions(checkpoint, model, preserved_batch, streams), base, len(weight)
    )
    return LossOutput(main_output.losses + weight * preservation_loss, main_output.timesteps)


def mean_squared_difference(
    outputs: list[torch.Tensor], target_outputs: list[torch.Tensor], num_samples: int
) -> torch.Tensor:
    """Mean squared difference of each sample, fp32 (rows,), summed over outputs such as pictures and sound.

    Each list holds one tensor per output, (rows, ...), or one tensor per sample and output.
    """
    # One entry per output: (rows, ...), or (...) for models that return one tensor per sample.
    pairs = zip(outputs, target_outputs, strict=True)
    squares = [(output.float() - target.float()).square() for output, target in pairs]
    # Batched outputs: the mean over all but the sample, then the sum over outputs.
    if all(len(square) == num_samples for square in squares):
        return torch.stack([square.flatten(1).mean(1) for square in squares]).sum(0)
    # One tensor per sample: (outputs * rows,) to (outputs, rows), summed over outputs.
    return torch.stack([square.mean() for square in squares]).view(-1, num_samples).sum(0)


def _collect_predictions(
    checkpoint: TrainableCheckpoint, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: RandomStreams
) -> list[torch.Tensor]:
    """The tensors that the model outputs during the family's loss computation, which uses the batch's random seeds."""
    outputs: list[torch.Tensor] = []

    def record_output(_module: nn.Module, _args: object, output: object) -> None:
        outputs.extend(
            leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        )

    with model.register_forward_hook(record_output):
        checkpoint.losses(model, batch, streams)
    return outputs
