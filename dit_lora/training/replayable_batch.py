"""The forward pass of a micro-batch: its losses as they are trained, and replaying it bit for bit.

`forward` seeds dropout and calls `WeightedLoss`, the loss function of every run: the family's losses, plus the
preservation loss on captions without the trigger word (`train.preserve`), times each sample's weight.

The preservation loss is also known as differential output preservation. Its target is the base's own prediction, for
the same latents, noise and timestep.

With `train.target: guided` the family's losses are taken after guidance has been removed from the model's output
(`dit_lora.training.guided_target`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from dit_lora.adapters.under import disable_trained_adapter
from dit_lora.data.loading.batch import (
    EMPTY_PREFIX,
    GUIDED_SCALE,
    LOSS_WEIGHT,
    PRESERVE_PREFIX,
    PRESERVE_WEIGHT,
    Batch,
)
from dit_lora.families.base import TrainableCheckpoint
from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.stop_gradient import stop_gradient
from dit_lora.numerics.streams import RandomStreams, derive_seed
from dit_lora.training.guided_target import OutputRows, record_model_outputs, remove_guidance

LossFunction = Callable[[nn.Module, Batch, RandomStreams], LossOutput]


@dataclass(frozen=True)
class WeightedLoss:
    """A family's loss function, with each loss multiplied by its sample's weight."""

    checkpoint: TrainableCheckpoint

    def __call__(self, model: nn.Module, batch: Batch, streams: RandomStreams) -> LossOutput:
        output = compute_training_losses(self.checkpoint, model, batch.tensors, streams)
        # One weight per sample, (samples,).
        weights = batch.tensors.get(LOSS_WEIGHT)
        if weights is None:
            return output
        return LossOutput(output.losses * weights, output.timesteps)


@dataclass(frozen=True)
class BatchPosition:
    """The position of a micro-batch in a run. Every random number it draws follows from it."""

    seed: int
    step: int
    micro_step: int
    rank: int


def forward(loss_function: LossFunction, model: nn.Module, batch: Batch, batch_position: BatchPosition) -> LossOutput:
    """Compute a micro-batch's losses, bitwise equal at every call with equal weights."""
    # Seeded at every call: a replay draws the numbers of the original step, even if others were drawn since. Dropout
    # inside the model draws from torch's own generators.
    seed = derive_seed(
        batch_position.seed, "dropout", batch_position.step, batch_position.micro_step, batch_position.rank
    )
    device = next(iter(batch.tensors.values())).device
    # Not `torch.manual_seed`, which seeds every kind of device and logs a traceback for each kind that is missing.
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    return loss_function(model, batch, RandomStreams(batch_position.seed, batch.sample_seeds, batch.random_inputs))


def compute_training_losses(
    checkpoint: TrainableCheckpoint, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: RandomStreams
) -> LossOutput:
    """The family's losses of a batch, computed by `losses` of its denoiser (families/flow_matching.py for most).

    The preservation loss is added if the batch has captions without the trigger word.
    """
    # One weight per sample, (rows,).
    weight = batch.get(PRESERVE_WEIGHT)
    if weight is None:
        return compute_data_losses(checkpoint, model, batch, streams)
    main_batch, preserved_batch = _split_off_second_caption(batch, PRESERVE_PREFIX, PRESERVE_WEIGHT)
    # First: activations kept for backward would take the memory that this pass needs.
    base = _predict_without_adapter(checkpoint, model, preserved_batch, streams)
    main_output = compute_data_losses(checkpoint, model, main_batch, streams)
    preservation_loss = mean_squared_difference(
        _collect_predictions(checkpoint, model, preserved_batch, streams), base
    )
    return LossOutput(main_output.losses + weight * preservation_loss, main_output.timesteps)


def compute_data_losses(
    checkpoint: TrainableCheckpoint, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: RandomStreams
) -> LossOutput:
    """The family's losses of a batch against its data; of an output without guidance if the batch has a guided scale.

    They are comparable with those of a model that needs guidance.
    """
    scale = batch.get(GUIDED_SCALE)
    if scale is None:
        return checkpoint.losses(model, batch, streams)
    # The same latents, noise and timesteps as with its own caption.
    main_batch, empty_batch = _split_off_second_caption(batch, EMPTY_PREFIX, GUIDED_SCALE)
    base = _predict_without_adapter(checkpoint, model, empty_batch, streams)
    # Inside, the model's outputs are those of a model that was never distilled.
    with remove_guidance(model, base, scale):
        return checkpoint.losses(model, main_batch, streams)


def _split_off_second_caption(
    batch: Mapping[str, torch.Tensor], prefix: str, weight_name: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The batch without the tensors of a second caption, and the batch with that caption in place of the first."""
    main_batch = {n: t for n, t in batch.items() if n != weight_name and not n.startswith(prefix)}
    return main_batch, main_batch | {n.removeprefix(prefix): t for n, t in batch.items() if n.startswith(prefix)}


def mean_squared_difference(outputs: OutputRows, target_outputs: OutputRows) -> torch.Tensor:
    """Mean squared difference of each sample, fp32 (rows,), summed over outputs such as pictures and sound."""
    means = [
        torch.stack([(row.float() - target.float()).square().mean() for row, target in zip(*pair, strict=True)])
        for pair in zip(outputs, target_outputs, strict=True)
    ]
    return torch.stack(means).sum(0)


def _predict_without_adapter(
    checkpoint: TrainableCheckpoint, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: RandomStreams
) -> OutputRows:
    """The model's outputs without the trained adapter, which get no gradient."""
    with disable_trained_adapter(model), torch.no_grad():
        predictions = _collect_predictions(checkpoint, model, batch, streams)
    # Trained weights outside of the adapter may change them.
    return [[stop_gradient(row) for row in rows] for rows in predictions]


def _collect_predictions(
    checkpoint: TrainableCheckpoint, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: RandomStreams
) -> OutputRows:
    """The model's outputs during the family's loss computation, which uses the batch's random seeds."""
    outputs: OutputRows = []
    with record_model_outputs(model, outputs):
        checkpoint.losses(model, batch, streams)
    return outputs


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayableBatch(MicroBatch):
    """A micro-batch of a run, which can be run again at any time on the unwrapped model."""

    loss_function: LossFunction
    model: nn.Module
    batch: Batch
    seed: int
    """The run's seed, from which all random numbers follow with the position and the sample seeds."""
    can_redraw: ClassVar[bool] = True

    @classmethod
    def from_batch(
        cls, loss_function: LossFunction, model: nn.Module, batch: Batch, position: BatchPosition
    ) -> "ReplayableBatch":
        return cls(
            ids=batch.ids,
            step=position.step,
            micro_step=position.micro_step,
            rank=position.rank,
            tensors=batch.tensors,
            faults=batch.faults,
            sample_seeds=batch.sample_seeds,
            loss_function=loss_function,
            model=model,
            batch=batch,
            seed=position.seed,
        )

    def forward(self) -> LossOutput:
        return forward(self.loss_function, self.model, self.batch, self._get_position(self))

    def select_sample(self, index: int) -> "ReplayableBatch":
        return self._replace_batch(self.batch.select_sample(index))

    def redraw_noise(self, number: int) -> "ReplayableBatch":
        # For the diagnosis: noise that training never uses, to tell bad noise from bad data.
        return self._replace_batch(replace_sample_seeds(self.batch, number))

    def move_to_run_position(self, position: MicroBatch, *, copies_seeds: bool = False) -> "ReplayableBatch":
        batch = replace(self.batch, sample_seeds=position.sample_seeds) if copies_seeds else self.batch
        return self.from_batch(self.loss_function, self.model, batch, self._get_position(position))

    def _replace_batch(self, batch: Batch) -> "ReplayableBatch":
        return self.from_batch(self.loss_function, self.model, batch, self._get_position(self))

    def _get_position(self, micro_batch: MicroBatch) -> BatchPosition:
        return BatchPosition(self.seed, micro_batch.step, micro_batch.micro_step, micro_batch.rank)


def serialize_micro_batch(micro_batch: MicroBatch, seed: int) -> tuple[Batch, BatchPosition]:
    """Convert a micro-batch to tensors and values that can be sent to another rank.

    That rank rebuilds it with `ReplayableBatch.from_batch`.
    """
    # Pickled on its way: a tensor on a device would come back on the sender's.
    tensors = {name: tensor.cpu() for name, tensor in micro_batch.tensors.items()}
    batch = Batch(micro_batch.ids, micro_batch.sample_seeds, tensors, dict(micro_batch.faults))
    return batch, BatchPosition(seed, micro_batch.step, micro_batch.micro_step, micro_batch.rank)


def replace_sample_seeds(batch: Batch, number: int) -> Batch:
    """The batch's samples with random seeds that no epoch uses."""
    return replace(batch, sample_seeds=tuple(derive_seed(seed, "redrawn", number) for seed in batch.sample_seeds))
