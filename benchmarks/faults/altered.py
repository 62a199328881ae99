"""Faults of trained tensors and of results: altered elements, extreme norms, outputs."""

import math

import torch

from benchmarks.faults.arms import (
    ADAPTED,
    OUTPUT,
    adapter,
    average,
    every_row,
    losses,
    module_output,
    moment,
    parameter,
    target_rows,
)
from benchmarks.faults.fault import Expected, Fault, between_steps
from benchmarks.faults.triggers import Element, When, before, times


def _half_more(values: torch.Tensor) -> torch.Tensor:
    """Add 0.5 to one element: finite, plausible, and not what the other rank has."""
    changed = values.clone()
    changed.view(-1)[2] += 0.5
    return changed


def _untrained_nan(output: torch.Tensor) -> torch.Tensor:
    """Spoil an output only where nothing is trained, as when the result is compared."""
    return output if torch.is_grad_enabled() else output * math.nan


def _rolled(cause: str, *message_parts: str) -> Expected:
    """Expect a return to the snapshot with the rates as they were: the adapter is that of the clean run."""
    return Expected(cause, "rollback", message_parts, same_as="clean", nobody_lost=True)


_WEIGHT, _MOMENT = (
    _rolled("weights", "altered in memory"),
    _rolled("optimizer", "altered in memory"),
)
_AVERAGE = _rolled("weights", "moving average")
_GROWN = Expected("learning_rate", "rollback", nobody_lost=True)
_SAID_NOTHING = Expected("none", "none", nobody_lost=True)
_HUGE, _LARGE = Element(1e30), Element(5000.0)
_EMA = (("train.ema", 0.9),)
_GROUPS = "optim.groups"
FAULTS: tuple[Fault, ...] = (
    *(
        Fault(
            f"{change.value:g} in one element of an adapter weight{rank_note}",
            "weights",
            f"before step {step}{rank_note}",
            _WEIGHT,
            before(step, adapter(), change),
        )
        for change, step, rank_note in (
            (_HUGE, 4, ""),
            (_LARGE, 4, ""),
            (_HUGE, 1, " at the first step"),
            (_LARGE, 6, " at the last step"),
        )
    ),
    *(
        between_steps(f"1e30 in one element of a {order} moment", "optimizer", _MOMENT, moment(1, key), _HUGE)
        for order, key in (("first", "exp_avg"), ("second", "exp_avg_sq"))
    ),
    *(
        between_steps(name, "EMA", _AVERAGE, average(1), change, step, overrides=_EMA)
        for name, change, step in (
            ("1e30 in the moving average", _HUGE, 4),
            ("5000 in the moving average at the last step", _LARGE, 6),
        )
    ),
    between_steps(
        "5000 in an adapter weight of one rank",
        "weights",
        _rolled("weights"),
        adapter(),
        _LARGE,
        rank=1,
        ranks=2,
        engines=("ddp", "fsdp2"),  # ZeRO-2 gathers the weights anew with every step
    ),
    between_steps(
        "an adapter weight of one rank that is not the others'",
        "weights",
        _rolled("weights", "rank 1"),
        parameter(ADAPTED),
        _half_more,
        step=2,
        rank=1,
        ranks=2,
        engines=("ddp",),  # FSDP2 has no other copy, and ZeRO-2 gathers anew with every step
    ),
    between_steps("all adapter weights grown", "learning rate", _GROWN, adapter(None), times(1e6)),
    Fault(
        "a weight decay of 1e6",
        "optimizer",
        "from the start",
        Expected("optimizer", "stop", ("weight decay",), exit_code=3, nobody_lost=True),
        overrides=((_GROUPS, {"adapter": {"lr": 1e-3, "weight_decay": 1e6}}),),
    ),
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
        losses(times(1e-25), every_row, When("from", 3)),
    ),
    Fault(
        "an output that is NaN where nothing is trained",
        "result",
        "at the end",
        Expected("refused", "refused", ("output", "not finite"), exit_code=1, nobody_lost=True),
        module_output(OUTPUT, _untrained_nan, When("from", 0)),
    ),
    Fault(
        "an update far beyond its weights",
        "result",
        "from the start",
        Expected("refused", "refused", ("effect",), exit_code=1, nobody_lost=True),
        overrides=((_GROUPS, {"adapter": {"lr": 10.0}}),),
    ),
)
