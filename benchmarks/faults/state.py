"""Faults of the training state: weights, moments, gradients, the learning rate, the base."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.faults.arms import (
    ADAPTED,
    adapter,
    at_once,
    averages,
    every_row,
    losses,
    moment,
    moment_of,
    parameter,
)
from benchmarks.faults.fault import Expected, Fault, between_steps
from benchmarks.faults.triggers import ALL_RANKS, Change, Element, When, before, has_fault, times
from benchmarks.faults.world import Arm, Stage, Tensors
from dit_lora.fuse.gradient_norms import NormFunction
from dit_lora.numerics.dtensors import get_local_tensor, is_sharded
from dit_lora.numerics.streams import RandomStreams

_LAYER = "{key}.{idle_module}"
_NAN, _INF = Element(math.nan, of_whole=True), Element(math.inf, of_whole=True)
_ROLLED = Expected("weights", "rollback", ("1 NaN",), module=_LAYER, same_as="clean")
_ROLLED_INF = Expected("weights", "rollback", ("1 Inf",), module=_LAYER, same_as="clean")
_MOMENT = Expected("optimizer", "rollback", module=_LAYER, same_as="clean")
_NEGATIVE = Expected("optimizer", "rollback", ("not be negative",), same_as="clean")
_AVERAGE = Expected("weights", "rollback", ("moving average",), module=_LAYER, same_as="clean")
_FROZEN = Expected("weights", "stop", ("frozen weight",), module="{ff_out}", exit_code=3)
_RETRIED = Expected("transient", "retry", same_as="clean")
_DIVERGED = Expected("learning_rate", "rollback", ("learning rate is too high",), exit_code=3)


def _weight(name: str, change: Change = _NAN, expected: Expected = _ROLLED, **options: Any) -> Fault:
    return between_steps(name, "weights", expected, adapter(), change, **options)


def _moment(name: str, key: str, change: Change = _NAN) -> Fault:
    return between_steps(name, "optimizer", _MOMENT, moment_of(ADAPTED, key), change)


def _average(stage: Stage) -> list[torch.Tensor]:
    return [averages(stage)[f"ema/{stage.targets.named(ADAPTED)}"]]


def _second_moment(stage: Stage) -> Sequence[torch.Tensor]:
    """Find the adapted weight's second moment; where ranks share moments out, the first of this rank's."""
    key = "exp_avg_sq"
    return moment_of(ADAPTED, key)(stage) or moment(0, key)(stage)


def _gradient(name: str, change: Change, weight: str | None = None, rank: int = ALL_RANKS) -> Fault:
    """A fault of one weight's gradient, or of all gradients, as it arrives in step 3.

    It lasts until the guard recovers: the replays and the step's second attempt find healthy gradients.
    """

    def arm(stage: Stage) -> None:
        armed: list[bool] = []

        def hook(grad: torch.Tensor) -> torch.Tensor:
            return change(grad) if armed else grad

        def disarmed(recover: Callable[..., int], *args: Any) -> int:
            armed.clear()
            return recover(*args)

        weight_name = weight and stage.targets.named(weight)
        parameters = [p for n, p in stage.trained().items() if weight_name in (None, n)]
        if is_sharded(stage.transformer):
            _hook_parts(stage, parameters, hook)
        else:
            for tensor in parameters:
                tensor.register_hook(hook)
        if has_fault(stage, rank):
            stage.before_step(3, lambda: armed.append(True))
        stage.wrap(stage.run.recovery, "recover", disarmed)

    when_text = "step 3" if rank == ALL_RANKS else f"step 3, rank {rank}"
    return Fault(name, "gradient", when_text, _RETRIED, arm)


def _hook_parts(stage: Stage, parameters: Sequence[nn.Parameter], hook: Change) -> None:
    """Change this rank's parts of gradients before the step reads them, because only FSDP2 sees whole gradients."""

    def norms(inner: Callable[[NormFunction | None], Tensors], by: NormFunction | None) -> Tensors:
        for tensor in parameters:
            if tensor.grad is not None and get_local_tensor(tensor.grad).numel():
                part = get_local_tensor(tensor.grad)
                part.copy_(hook(part))
        return inner(by)

    stage.wrap(stage.run.engine, "compute_gradient_norms", norms)


def _spoiled(*, neighbours: bool) -> Arm:
    """Give the target values that make its loss NaN; with `neighbours`, all samples of its micro-batch too."""

    def arm(stage: Stage) -> None:
        key = stage.targets.id_tensor

        def change(batch: Tensors, streams: RandomStreams) -> Tensors:
            rows = torch.tensor(stage.is_target(batch))
            rows |= rows.any() & neighbours
            batch[key] = batch[key].clone()
            batch[key][rows] = stage.targets.bad
            return batch

        stage.checkpoint.before.append(change)

    return arm


_EMA = (("train.ema", 0.9),)
_HIGH = (("optim.clip", None), ("optim.groups", {"adapter": {"lr": 1e3}}))
_HUGE = (("optim.clip", None), ("optim.groups", {"adapter": {"lr": 1e38}}))
_OWN_WEIGHTS = ("ddp", "fsdp2")
"""ZeRO-2 gathers the weights anew with every step."""
_ONE = Element(math.nan, 1)
FAULTS: tuple[Fault, ...] = (
    _weight("NaN in an adapter weight"),
    _weight("Inf in an adapter weight", _INF, _ROLLED_INF),
    _weight("NaN in an adapter weight of one rank", rank=1, engines=_OWN_WEIGHTS),
    _weight("NaN in an adapter weight at the last step", step=6),
    _weight("NaN in an adapter weight at the first step", step=1),
    _moment("NaN in AdamW's first moment", "exp_avg"),
    _moment("NaN in AdamW's second moment", "exp_avg_sq"),
    _moment("Inf in AdamW's first moment", "exp_avg", _INF),
    between_steps(
        "a negative second moment of one rank",
        "optimizer",
        _NEGATIVE,
        _second_moment,
        Element(-1.0),
        step=5,
        rank=1,
    ),
    _gradient("NaN in one gradient element, once", _ONE, ADAPTED),
    _gradient("NaN in one gradient element of one rank", _ONE, ADAPTED, rank=1),
    _gradient("Inf in all gradients, once", times(math.inf)),
    _gradient("NaN in all gradients, once", times(math.nan)),
    _gradient("all gradients zero, once", torch.zeros_like),
    Fault(
        "a loss that no longer depends on the model",
        "gradient",
        "from step 3",
        Expected("unknown", "stop", exit_code=3),
        losses(times(0.0), every_row, When("from", 3)),
    ),
    between_steps("NaN in a frozen weight", "base", _FROZEN, parameter("{ff_out}.weight"), _NAN),
    between_steps("NaN in the moving average", "EMA", _AVERAGE, _average, _NAN, overrides=_EMA),
    Fault(
        "NaN loss under a moving average",
        "EMA",
        "step 3",
        _RETRIED,
        losses(times(math.nan), every_row, When("once", 3)),
        _EMA,
    ),
    Fault("learning rate 1e3", "learning rate", "from the start", _DIVERGED, None, _HIGH),
    Fault("learning rate 1e38", "learning rate", "from the start", _DIVERGED, None, _HUGE),
    Fault(
        "a micro-batch of which every sample is bad",
        "latent",
        "every time",
        Expected("data", "quarantine"),
        _spoiled(neighbours=True),
    ),
    Fault(
        "a weight and a sample at once",
        "weights",
        "before step 4",
        Expected("weights", "rollback", same_as="without"),
        at_once(before(4, adapter(), _NAN), _spoiled(neighbours=False)),
    ),
)
