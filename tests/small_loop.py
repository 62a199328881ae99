"""A loop on a model small enough to check by hand, with data and a recovery that notes its calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from dit_lora.config.optim import GroupConfig, GroupsConfig, OptimConfig
from dit_lora.data.loading.batch import Batch
from dit_lora.guard.replay import MicroBatch
from dit_lora.guard.snapshots import Snapshots
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import RandomStreams, draw_integers
from dit_lora.training.distributed.engine import Engine
from dit_lora.training.loop import LoopCallbacks, TrainingLoopComponents, train
from dit_lora.training.optim.build import LearningRateSchedule, build_optimizer
from dit_lora.training.recovery.monitoring import StepMonitor
from dit_lora.training.recovery.run_recovery import RunFailure
from dit_lora.training.step import StepResult


def batches(count: int, size: int = 2) -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    return [
        Batch(
            ids=tuple(f"{k}-{row}" for row in range(size)),
            sample_seeds=tuple(range(k * size, (k + 1) * size)),
            tensors={"x": torch.randn(size, 3, generator=g)},
        )
        for k in range(count)
    ]


def losses_of(model: nn.Module, batch: Batch, streams: RandomStreams) -> LossOutput:
    timesteps = draw_integers(0, 1000, streams("timestep"))
    return LossOutput(model(batch.tensors["x"]).square().flatten(1).mean(1) + 1, timesteps)


@dataclass
class Callbacks(LoopCallbacks):
    """Calls the functions of a test."""

    batches: Callable[[int], Iterable[Batch]] = lambda step: ()
    on_result: Callable[[StepResult], None] = lambda result: None
    log: Callable[[StepResult], None] = lambda result: None
    sync_after: Callable[[int], bool] = lambda step: False
    stop_code: int = 0

    def load_batches(self, start_step: int) -> Iterable[Batch]:
        return self.batches(start_step)

    def on_step(self, result: StepResult) -> None:
        self.on_result(result)

    def log_step(self, result: StepResult) -> None:
        self.log(result)

    def should_sync_after(self, step: int) -> bool:
        return self.sync_after(step)

    def get_stop_code(self) -> int:
        return self.stop_code


def with_callbacks(loop: TrainingLoopComponents, **changes: Any) -> TrainingLoopComponents:
    assert isinstance(loop.callbacks, Callbacks)
    return replace(loop, callbacks=replace(loop.callbacks, **changes))


class TrippedError(Exception):
    """What a recovery raises that was not told where to go on."""


@dataclass
class FakeRecovery:
    """Notes its calls and answers with the steps that it was given; then it raises."""

    lr_scale = 1.0
    answers: list[int] = field(default_factory=list)
    trips: list[tuple[Any, ...]] = field(default_factory=list)
    ids: list[list[tuple[str, ...]]] = field(default_factory=list)
    controls: list[MicroBatch | None] = field(default_factory=list)

    def recover(self, failure: RunFailure) -> int:
        self.trips.append((failure.step, failure.kind, failure.failed_positions))
        self.ids.append([batch.ids for batch in failure.micro_batches])
        self.controls.append(failure.control)
        if not self.answers:
            raise TrippedError
        return self.answers.pop(0)


def build(
    accumulate: int = 1,
    clip: float | None = 1.0,
    losses: Callable = losses_of,
    answers: Sequence[int] = (),
    groups: Mapping[str, Sequence[str]] = {"adapter": ("weight", "bias")},
) -> TrainingLoopComponents:
    """A loop over a linear layer.

    `groups` has the names of the layer's parameters by parameter group.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    parameters = [
        {
            "name": group,
            "params": [model.get_parameter(name) for name in names],
            "param_names": list(names),
            "lr": 0.1,
        }
        for group, names in groups.items()
    ]
    rates = GroupsConfig(**dict.fromkeys(groups, GroupConfig(lr=0.1)))
    optim = OptimConfig(groups=rates, clip=clip, weight_decay=0)
    prepared_model, optimizer = accelerator.prepare(model, build_optimizer(parameters, optim))
    return TrainingLoopComponents(
        engine=Engine(accelerator, prepared_model, optimizer),
        loss_function=losses,
        schedule=LearningRateSchedule(optim, 10),
        optim=optim,
        accumulate=accumulate,
        seed=7,
        recovery=FakeRecovery(list(answers)),
        watcher=StepMonitor(Snapshots(lambda: {}, interval_steps=10)),
        callbacks=Callbacks(),
    )


def run(
    loop: TrainingLoopComponents,
    steps: int,
    data: list[Batch],
    *,
    on_step: Callable[[StepResult], None] = lambda result: None,
) -> list[StepResult]:
    results: list[StepResult] = []

    def note(result: StepResult) -> None:
        on_step(result)
        results.append(result)

    followed = with_callbacks(loop, batches=lambda step: data[step * loop.accumulate :], on_result=note)
    train(followed, start_step=0, steps=steps)
    return results


def state_of(loop: TrainingLoopComponents) -> list[torch.Tensor]:
    """Weights, and what AdamW keeps of them."""
    inner = loop.engine.optimizer.optimizer
    weights = list(loop.engine.model.parameters())
    moments = [t for p in weights for t in inner.state.get(p, {}).values()]
    return [tensor.detach().clone() for tensor in [*weights, *moments]]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def failing_first(faults: Mapping[str, Any]) -> Callable:
    """Losses of which those of some samples, by the first's name, are spoiled when they are first computed.

    A fault is a factor, or an error that is raised.
    """
    remaining = dict(faults)

    def losses(model: nn.Module, batch: Batch, streams: RandomStreams) -> LossOutput:
        output, fault = losses_of(model, batch, streams), remaining.pop(batch.ids[0], 1.0)
        if isinstance(fault, Exception):
            raise fault
        return output._replace(losses=output.losses * fault)

    return losses
