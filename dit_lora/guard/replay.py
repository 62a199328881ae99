"""One micro-batch that can be run again bit for bit, without changing gradients or weights."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

from dit_lora.guard.fallbacks import disable_compile
from dit_lora.guard.probe import OpTrace, Probe
from dit_lora.numerics.dtensors import get_local_tensor, has_collective_forward
from dit_lora.numerics.memory import convert_to_out_of_memory_error
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.ranks import gather_object


# eq=False compares by identity: comparing tensors would not give a single bool.
@dataclass(frozen=True, eq=False, kw_only=True)
class MicroBatch(ABC):
    """The inputs of one rank in one micro-step, which can be run again.

    `ReplayableBatch` (training/replayable_batch.py) is a run's: noise, timesteps and dropout follow from its seeds.
    `RecordedCallMicroBatch` (guard/attach/calls/call_batch.py) is made from a model call of another loop.
    """

    ids: tuple[str, ...]
    step: int
    micro_step: int
    rank: int
    tensors: Mapping[str, torch.Tensor]
    """The samples' tensors, each (B, ...)."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Problems found while reading the samples, by id."""
    loss_is_sum: bool = False
    """True if the step's loss is the sum of these losses, and not their mean."""
    sample_seeds: tuple[int, ...] = ()
    """Seeds of the samples' random numbers, such as noise and timestep; empty if unknown."""
    uses_autocast: bool = False
    """True if the loop calls the model under autocast."""
    can_redraw: ClassVar[bool] = False
    """True if `redraw_noise` works: noise and timesteps are drawn by the batch, and not by the loop."""

    @abstractmethod
    def forward(self) -> LossOutput:
        """Compute the micro-batch's losses, with the same bits in every call while the weights are the same.

        Runs the unwrapped model, without DDP, so it needs no other rank unless the model is sharded.
        """

    @abstractmethod
    def select_sample(self, index: int) -> "MicroBatch":
        """Extract the sample in this row as a micro-batch of one."""

    def redraw_noise(self, number: int) -> "MicroBatch":
        """Copy the micro-batch with other noise and timesteps, by number."""
        raise NotImplementedError

    def move_to_run_position(self, position: "MicroBatch", *, copies_seeds: bool = False) -> "MicroBatch":
        """Move the samples to another micro-batch's position in the run, if possible; if asked for, with its seeds.

        Dropout masks depend on the position.
        """
        return self


@dataclass(frozen=True)
class ReplayOutcome:
    """Result of replaying a micro-batch once: losses, timesteps, and what is wrong with the gradients."""

    losses: tuple[float, ...]
    timesteps: tuple[int, ...]
    bad_gradients: tuple[str, ...]
    """Names of trained parameters whose gradient is not finite."""
    has_zero_gradient: bool
    """True if every gradient of a trained parameter is zero."""
    failed_ranks: tuple[int, ...] = ()
    """For sharded models: ranks with a loss that is not finite; empty if it is finite, or not finite, on all."""

    @property
    def is_finite(self) -> bool:
        return self.has_finite_losses and not self.bad_gradients

    @property
    def has_finite_losses(self) -> bool:
        return all(loss == loss and abs(loss) != float("inf") for loss in self.losses)

    def is_healthy(self, *, needs_gradient: bool) -> bool:
        """True if the replay was finite and, with `needs_gradient`, had a gradient that is not all zero."""
        return self.is_finite and not (needs_gradient and self.has_zero_gradient)


def replay_micro_batch(micro_batch: MicroBatch, model: nn.Module) -> ReplayOutcome:
    """Run a micro-batch forward and backward once; gradients and random state are restored afterwards.

    A sharded model (FSDP2) needs every rank at the same time, with the same micro-batch. All ranks get the losses of
    the micro-batch's rank, and the bad gradients of any rank.
    """
    with preserve_gradients(model), torch.random.fork_rng(get_cuda_devices(model)):
        output = _run_forward_backward(micro_batch)
        # For sharded parameters, this rank's part of each gradient.
        named = list(model.named_parameters())
        gradients = [(n, get_local_tensor(p.grad)) for n, p in named if p.grad is not None]
        bad = [name for name, grad in gradients if not torch.isfinite(grad).all()]
        zero = not any(bool(grad.any()) for _, grad in gradients)
    outcome = ReplayOutcome(
        losses=tuple(output.losses.detach().float().tolist()),
        timesteps=tuple(int(t) for t in output.timesteps.tolist()),
        bad_gradients=tuple(bad),
        has_zero_gradient=zero,
    )
    return _merge_outcomes(outcome, micro_batch.rank) if has_collective_forward(model) else outcome


def _merge_outcomes(local_outcome: ReplayOutcome, owner_rank: int) -> ReplayOutcome:
    """Merge the replay results of all ranks, so that all of them take the same decisions."""
    # Every rank gathers, so this is also where ranks wait for each other.
    outcomes: list[ReplayOutcome] = gather_object([local_outcome])
    # A dict keeps the order of ranks, unlike a set.
    bad_gradients = {name: None for outcome in outcomes for name in outcome.bad_gradients}
    failing_ranks = tuple(rank for rank, outcome in enumerate(outcomes) if not outcome.has_finite_losses)
    # If all ranks fail, no single rank is the cause.
    return replace(
        outcomes[owner_rank],
        failed_ranks=failing_ranks if len(failing_ranks) < len(outcomes) else (),
        bad_gradients=tuple(bad_gradients),
        has_zero_gradient=all(outcome.has_zero_gradient for outcome in outcomes),
    )


def probe_micro_batch(micro_batch: MicroBatch, model: nn.Module) -> OpTrace:
    """Replay a micro-batch while every op is observed, to find the first module and op with a bad value."""
    with (
        preserve_gradients(model),
        torch.random.fork_rng(get_cuda_devices(model)),
        disable_compile(model),
        Probe(model).observe_model_ops() as trace,
    ):
        _run_forward_backward(micro_batch)
    return trace


@dataclass(frozen=True)
class RankTrace:
    """Result of observing a replay op by op, and its rank.

    The rank is that of the micro-batch, or for sharded models one with a bad value.
    """

    trace: OpTrace
    rank: int
    failing_ranks: tuple[int, ...] = ()
    """For sharded models: ranks on which a non-finite value first appears; empty if it does on all or none."""


def trace_micro_batch(micro_batch: MicroBatch, model: nn.Module) -> RankTrace:
    """Replay a micro-batch while every op is observed; for a sharded model on all ranks together."""
    local_trace, rank = probe_micro_batch(micro_batch, model), micro_batch.rank
    if not has_collective_forward(model):
        return RankTrace(local_trace, rank)
    traces: list[OpTrace] = gather_object([local_trace])
    # Ranks whose own ops made a bad value.
    failing_ranks = tuple(index for index, trace in enumerate(traces) if trace.first_bad_op or trace.hidden_origins)
    # The micro-batch's rank may hold a shard without any bad value.
    if failing_ranks and rank not in failing_ranks:
        rank = failing_ranks[0]
    return RankTrace(traces[rank], rank, failing_ranks if len(failing_ranks) < len(traces) else ())


def _run_forward_backward(micro_batch: MicroBatch) -> LossOutput:
    with convert_to_out_of_memory_error():
        output = micro_batch.forward()
        # Without a trained parameter in the graph there is nothing to differentiate.
        if output.losses.requires_grad:
            # (B,) -> scalar, reduced as the loop itself reduces it.
            loss = output.losses.sum() if micro_batch.loss_is_sum else output.losses.mean()
            loss.backward()
    return output


@contextmanager
def preserve_gradients(model: nn.Module) -> Iterator[None]:
    """Set all gradients of a model to None inside the context, and restore the previous ones on exit."""
    saved_grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in saved_grads:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in saved_grads:
            parameter.grad = grad


def get_cuda_devices(model: nn.Module) -> list[torch.device]:
    """CUDA devices whose random state a forward of this model uses, in addition to the CPU's."""
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})
