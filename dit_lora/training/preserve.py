"""Output preservation: a second loss, on captions without the trigger, whose target is the base's own prediction.

Known as differential output preservation. Both predictions use the same latents, noise and timestep.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dit_lora.adapters.under import trained_off
from dit_lora.data.loading.batch import PRESERVE, PRESERVE_WEIGHT
from dit_lora.families.base import Trained
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import Streams


def trained_losses(
    checkpoint: Trained, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
) -> LossOutput:
    """Return the family's losses of a batch and, where it has captions without the trigger, the second loss on top."""
    weight = batch.get(PRESERVE_WEIGHT)
    if weight is None:
        return checkpoint.losses(model, batch, streams)
    own = {n: t for n, t in batch.items() if n != PRESERVE_WEIGHT and not n.startswith(PRESERVE)}
    # Before the others: what is kept for backward is not in the way of these activations.
    other = own | {n.removeprefix(PRESERVE): t for n, t in batch.items() if n.startswith(PRESERVE)}
    with trained_off(model), torch.no_grad():
        base = _predicted(checkpoint, model, other, streams)
    learned = checkpoint.losses(model, own, streams)
    moved = difference(_predicted(checkpoint, model, other, streams), base, len(weight))
    return LossOutput(learned.losses + weight * moved, learned.timesteps)


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor], rows: int) -> torch.Tensor:
    """Return each sample's mean squared difference, fp32 (rows,), summed over tensors such as pictures and sound.

    A model may give each sample a tensor of its own.
    """
    squares = [
        (one.float() - other.float()).square() for one, other in zip(ours, theirs, strict=True)
    ]
    if all(len(one) == rows for one in squares):
        return torch.stack([one.flatten(1).mean(1) for one in squares]).sum(0)
    return torch.stack([one.mean() for one in squares]).view(-1, rows).sum(0)


def _predicted(
    checkpoint: Trained, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
) -> list[torch.Tensor]:
    """Return what the model gives in the family's own call, which is made with the batch's draws."""
    kept: list[torch.Tensor] = []

    def note(_module: nn.Module, _args: object, output: object) -> None:
        kept.extend(
            leaf
            for leaf in tree_leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        )

    with model.register_forward_hook(note):
        checkpoint.losses(model, batch, streams)
    return kept
