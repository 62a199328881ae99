"""One micro-batch that can be run again, alone and bit for bit, without touching gradients or weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from dit_lora.numerics.probe import Probe, Trace
from dit_lora.objectives import LossOutput


@dataclass(frozen=True)
class MicroBatch:
    """What one rank ran in one micro-step.

    `forward` draws from named generators only, so every call gives the same bits while the weights are the
    same; it runs the bare model, without DDP, so it needs no other rank.
    """

    ids: tuple[str, ...]
    step: int
    micro_step: int
    rank: int
    tensors: Mapping[str, torch.Tensor]
    """What the samples are made of, each (B, ...)."""
    forward: Callable[[], LossOutput]
    single: Callable[[int], "MicroBatch"]
    """The micro-batch of one of its samples alone."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """What reading the samples found wrong, by id."""
    loss_is_sum: bool = False
    """Whether the step's loss is the sum of these losses, and not their mean."""
    draws: tuple[int, ...] = ()
    """What seeds the samples' random draws, where that is known."""
    redrawn: Callable[[int], "MicroBatch"] | None = None
    """The same samples with other noise and timesteps, numbered; None where they cannot be drawn anew."""


@dataclass(frozen=True)
class Outcome:
    """What one run of a micro-batch gave."""

    losses: tuple[float, ...]
    timesteps: tuple[int, ...]
    bad_gradients: tuple[str, ...]
    """Names of trained parameters whose gradient is not finite."""
    gradient_is_zero: bool
    """No trained parameter got a gradient other than zero."""

    @property
    def finite(self) -> bool:
        return self.finite_losses and not self.bad_gradients

    @property
    def finite_losses(self) -> bool:
        return all(loss == loss and abs(loss) != float("inf") for loss in self.losses)

    def is_healthy(self, *, needs_gradient: bool) -> bool:
        """Finite, and (if asked for) with a gradient that is not zero everywhere."""
        return self.finite and not (needs_gradient and self.gradient_is_zero)


def run(micro_batch: MicroBatch, model: nn.Module) -> Outcome:
    """Forward and backward once; gradients and random state are afterwards as before."""
    with _kept_gradients(model), torch.random.fork_rng(cuda_devices(model)):
        output = _forward_backward(micro_batch)
        gradients = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        bad = [name for name, grad in gradients if not torch.isfinite(grad).all()]
        zero = not any(bool(grad.any()) for _, grad in gradients)
    return Outcome(
        losses=tuple(output.losses.detach().float().tolist()),
        timesteps=tuple(int(t) for t in output.timesteps.tolist()),
        bad_gradients=tuple(bad),
        gradient_is_zero=zero,
    )


def probe(micro_batch: MicroBatch, model: nn.Module) -> Trace:
    """The same run under a probe, which names the first module and op to go wrong."""
    with (
        _kept_gradients(model),
        torch.random.fork_rng(cuda_devices(model)),
        Probe(model).watching() as trace,
    ):
        _forward_backward(micro_batch)
    return trace


def _forward_backward(micro_batch: MicroBatch) -> LossOutput:
    output = micro_batch.forward()
    if output.losses.requires_grad:
        loss = output.losses.sum() if micro_batch.loss_is_sum else output.losses.mean()
        loss.backward()
    return output


@contextmanager
def _kept_gradients(model: nn.Module) -> Iterator[None]:
    """Start from no gradients, and give back those that were there."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


def cuda_devices(model: nn.Module) -> list[torch.device]:
    """Whose random state a forward of this model draws from, beside the CPU's."""
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})
