"""Micro-batches that can be run again, bit for bit, in the loop that ran them."""

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
    """Return the function of the family's losses of a batch, each times its sample's weight."""

    def losses(model: nn.Module, batch: Batch, streams: Streams) -> LossOutput:
        output = trained_losses(checkpoint, model, batch.tensors, streams)
        weights = batch.tensors.get(LOSS_WEIGHT)
        if weights is None:
            return output
        return LossOutput(output.losses * weights, output.timesteps)

    return losses


@dataclass(frozen=True)
class Place:
    """The place of a micro-batch in a run: with it, every draw is known."""

    seed: int
    step: int
    micro_step: int
    rank: int


def forward(losses: LossFunction, model: nn.Module, batch: Batch, place: Place) -> LossOutput:
    """Compute a micro-batch's losses, equal bit for bit at every call with equal weights."""
    # Seeded at every call: a replay draws what the step drew, whatever was drawn in between.
    # Dropout inside the model draws from torch's own generators.
    seed = fold(place.seed, "dropout", place.step, place.micro_step, place.rank)
    _seed_generators(seed, next(iter(batch.tensors.values())).device)
    return losses(model, batch, Streams(place.seed, batch.draws, batch.ahead))


def _seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of the device, and no other.

    `torch.manual_seed` does it for every kind of device; one that is not there writes down a traceback at each call.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def replayable(losses: LossFunction, model: nn.Module, batch: Batch, place: Place) -> MicroBatch:
    """Return the micro-batch, to be run on the bare model whenever it is wanted."""
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
        # For trials: the same samples at draws that training never uses, so that a bad draw is told from bad data.
        redrawn=lambda number: replayable(losses, model, _elsewhere(batch, number), place),
        at=lambda other, draws: replayable(
            losses,
            model,
            replace(batch, draws=other.draws) if draws else batch,
            Place(place.seed, other.step, other.micro_step, other.rank),
        ),
    )


def sent(one: MicroBatch, seed: int) -> tuple[Batch, Place]:
    """Return a micro-batch as it is sent to another rank, which makes an equal one of it by `replayable`."""
    # Pickled on its way: a tensor on a device would come back on the sender's.
    tensors = {name: tensor.cpu() for name, tensor in one.tensors.items()}
    batch = Batch(one.ids, one.draws, tensors, dict(one.faults))
    return batch, Place(seed, one.step, one.micro_step, one.rank)


def _elsewhere(batch: Batch, number: int) -> Batch:
    """Return the same samples with draws that no epoch gives them."""
    return replace(batch, draws=tuple(fold(draw, "redrawn", number) for draw in batch.draws))
