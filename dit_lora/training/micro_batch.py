"""Micro-batches that can be replayed bit for bit inside the loop that ran them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from dit_lora.data.loading.batch import LOSS_WEIGHT, Batch
from dit_lora.families.base import Trained
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import Streams, fold
from dit_lora.training.preserve import trained_losses

LossFunction = Callable[[nn.Module, Batch, Streams], LossOutput]


def sample_losses(checkpoint: Trained) -> LossFunction:
    """The family's loss function, with each loss multiplied by its sample's weight."""

    def losses(model: nn.Module, batch: Batch, streams: Streams) -> LossOutput:
        output = trained_losses(checkpoint, model, batch.tensors, streams)
        # One weight per sample, (samples,).
        weights = batch.tensors.get(LOSS_WEIGHT)
        if weights is None:
            return output
        return LossOutput(output.losses * weights, output.timesteps)

    return losses


@dataclass(frozen=True)
class Place:
    """The position of a micro-batch in a run. Every random number it draws follows from it."""

    seed: int
    step: int
    micro_step: int
    rank: int


def forward(losses: LossFunction, model: nn.Module, batch: Batch, place: Place) -> LossOutput:
    """Compute a micro-batch's losses, bitwise equal at every call with equal weights."""
    # Seeded at every call: a replay draws the numbers of the original step, even if others were drawn since. Dropout
    # inside the model draws from torch's own generators.
    seed = fold(place.seed, "dropout", place.step, place.micro_step, place.rank)
    _seed_generators(seed, next(iter(batch.tensors.values())).device)
    return losses(model, batch, Streams(place.seed, batch.draws, batch.ahead))


def _seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of `device` only.

    `torch.manual_seed` seeds every kind of device, and logs a traceback at each call for a kind that is missing.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def replayable(losses: LossFunction, model: nn.Module, batch: Batch, place: Place) -> MicroBatch:
    """A micro-batch that can be run again at any time on the unwrapped model."""
    return MicroBatch(
        ids=batch.ids,
        step=place.step,
        micro_step=place.micro_step,
        rank=place.rank,
        tensors=batch.tensors,
        forward=lambda: forward(losses, model, batch, place),
        single=lambda index: replayable(losses, model, batch.single(index), place),
        faults=batch.faults,
        draws=batch.draws,
        # For the diagnosis: the same samples with noise that training never uses, to tell bad noise from bad data.
        redrawn=lambda number: replayable(losses, model, _elsewhere(batch, number), place),
        at=lambda position, draws: replayable(
            losses,
            model,
            replace(batch, draws=position.draws) if draws else batch,
            Place(place.seed, position.step, position.micro_step, position.rank),
        ),
    )


def sent(one: MicroBatch, seed: int) -> tuple[Batch, Place]:
    """A micro-batch as it is sent to another rank, which rebuilds it with `replayable`."""
    # Pickled on its way: a tensor on a device would come back on the sender's.
    tensors = {name: tensor.cpu() for name, tensor in one.tensors.items()}
    batch = Batch(one.ids, one.draws, tensors, dict(one.faults))
    return batch, Place(seed, one.step, one.micro_step, one.rank)


def _elsewhere(batch: Batch, number: int) -> Batch:
    """The same samples with random seeds that no epoch uses."""
    return replace(batch, draws=tuple(fold(draw, "redrawn", number) for draw in batch.draws))
