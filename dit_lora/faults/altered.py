"""Faults of what is trained and of what comes out: altered elements, norms at the ends of their range, results."""

import math
from typing import Any

import torch
from torch import nn

from dit_lora.faults.arms import ADAPTED, all_trained, losses, parameter, target_rows
from dit_lora.faults.arms import average as average_of
from dit_lora.faults.arms import every_row as all_rows
from dit_lora.faults.arms import moment as moment_of
from dit_lora.faults.fault import Expected, Fault
from dit_lora.faults.triggers import ALL_RANKS, When, before, element, times, write
from dit_lora.faults.world import Arm, Stage

_EMA = (("train.ema", 0.9),)


def _weight(value: float, step: int, rank: int = ALL_RANKS) -> Arm:
    """Set one element of an adapter's weight."""
    return all_trained(step, element(value), rank, ADAPTED)


def _moment(value: float, key: str, rank: int = ALL_RANKS) -> Arm:
    return before(4, moment_of(1, key), element(value), rank)


def _average(value: float, step: int) -> Arm:
    return before(step, average_of(1), element(value), ALL_RANKS)


def _moved(stage: Stage) -> None:
    """Add 0.5 to one element of rank 1: finite, plausible, and not what the other rank has."""
    if stage.rank != 1:
        return

    def add(values: torch.Tensor) -> torch.Tensor:
        changed = values.clone()
        changed.view(-1)[2] += 0.5
        return changed

    stage.before_step(2, lambda: write(parameter(stage, ADAPTED), add))


def _bad_output(stage: Stage) -> None:
    """Make a module's output NaN only where nothing is trained, as when the result is compared."""

    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output if torch.is_grad_enabled() else output * math.nan

    module = stage.transformer.get_submodule(stage.site.named("{attention}.{out}"))
    module.register_forward_hook(hook)


def _altered(cause: str) -> Expected:
    """Expect a return to the snapshot with the rates as they were: the adapter is that of the clean run."""
    words = ("altered in memory",)
    return Expected(cause, "rollback", words, same_as="clean", nobody_lost=True)


_WEIGHT, _MOMENT = _altered("weights"), _altered("optimizer")
_AVERAGE = Expected("weights", "rollback", ("moving average",), same_as="clean", nobody_lost=True)
_SAID_NOTHING = Expected("none", "none", nobody_lost=True)
_GROUPS = "optim.groups"
ELEMENTS: tuple[Fault, ...] = (
    *(
        Fault(
            f"{value:g} in one element of an adapter weight{where}",
            "weights",
            f"before step {step}{where}",
            _WEIGHT,
            _weight(value, step, rank),
        )
        for value, step, rank, where in (
            (1e30, 4, ALL_RANKS, ""),
            (5000.0, 4, ALL_RANKS, ""),
            (1e30, 1, ALL_RANKS, " at the first step"),
            (5000.0, 6, ALL_RANKS, " at the last step"),
        )
    ),
    Fault(
        "1e30 in one element of a first moment",
        "optimizer",
        "before step 4",
        _MOMENT,
        _moment(1e30, "exp_avg"),
    ),
    Fault(
        "1e30 in one element of a second moment",
        "optimizer",
        "before step 4",
        _MOMENT,
        _moment(1e30, "exp_avg_sq"),
    ),
    Fault(
        "1e30 in the moving average",
        "EMA",
        "before step 4",
        _AVERAGE,
        _average(1e30, 4),
        _EMA,
    ),
    Fault(
        "5000 in the moving average at the last step",
        "EMA",
        "before step 6",
        _AVERAGE,
        _average(5000.0, 6),
        _EMA,
    ),
    Fault(
        "5000 in an adapter weight of one rank",
        "weights",
        "before step 4, rank 1",
        Expected("weights", "rollback", same_as="clean", nobody_lost=True),
        _weight(5000.0, 4, rank=1),
        ranks=2,
        engines=("ddp", "fsdp2"),  # ZeRO-2 gathers the weights anew with every step
    ),
    Fault(
        "an adapter weight of one rank that is not the others'",
        "weights",
        "before step 2, rank 1",
        Expected("weights", "rollback", ("rank 1",), same_as="clean", nobody_lost=True),
        _moved,
        ranks=2,
        engines=("ddp",),  # FSDP2 has no other copy, and ZeRO-2 gathers anew with every step
    ),
    Fault(
        "all adapter weights grown",
        "learning rate",
        "before step 4",
        Expected("learning_rate", "rollback", nobody_lost=True),
        all_trained(4, times(1e6)),
    ),
    Fault(
        "a weight decay of 1e6",
        "optimizer",
        "from the start",
        Expected("optimizer", "stop", ("weight decay",), exit_code=3, nobody_lost=True),
        None,
        ((_GROUPS, {"adapter": {"lr": 1e-3, "weight_decay": 1e6}}),),
    ),
)

RANGES: tuple[Fault, ...] = (
    Fault(
        "losses of a sample of 1e25",
        "gradient",
        "every time",
        _SAID_NOTHING,
        losses(times(1e25), target_rows, When("from", 1)),
    ),
    Fault(
        "losses of 1e-25",
        "gradient",
        "from step 3",
        _SAID_NOTHING,
        losses(times(1e-25), all_rows, When("from", 3)),
    ),
)

RESULTS: tuple[Fault, ...] = (
    Fault(
        "an output that is NaN where nothing is trained",
        "result",
        "at the end",
        Expected("refused", "refused", ("output", "not finite"), exit_code=1, nobody_lost=True),
        _bad_output,
    ),
    Fault(
        "an update far beyond its weights",
        "result",
        "from the start",
        Expected("refused", "refused", ("effect",), exit_code=1, nobody_lost=True),
        None,
        ((_GROUPS, {"adapter": {"lr": 10.0}}),),
    ),
)
FAULTS = (*ELEMENTS, *RANGES, *RESULTS)
