"""Faults that no sample is to blame for: the base in memory, the step, the company, a rank, chance, too little memory."""

import math

from dit_lora.faults.arms import (
    OUTPUT,
    at_once,
    buffer,
    every_row,
    first_passes,
    frozen,
    gradients,
    losses,
    module_output,
    out_of_memory,
    parameter,
    passes_from,
    place_in_batch,
    target_rows,
    timesteps_between,
)
from dit_lora.faults.fault import Expected, Fault
from dit_lora.faults.triggers import (
    ALL_RANKS,
    Change,
    Mode,
    When,
    before,
    divided,
    element,
    row,
    times,
)
from dit_lora.faults.world import Arm, Engine

_NAN, _INF = times(math.nan), times(math.inf)


def _base(name: str, change: Change, step: int = 4, rank: int = ALL_RANKS) -> Arm:
    """Alter a frozen weight, by name, in memory."""
    return before(step, lambda stage: parameter(stage, name), change, rank)


def _table(step: int) -> Arm:
    """Set one row of the table of classes: all samples of that class fail, and no other."""
    return before(step, lambda stage: parameter(stage, "{class_table}"), row(1e30), ALL_RANKS)


def _loss(change: Change, mode: Mode, step: int, rank: int = ALL_RANKS) -> Arm:
    return losses(change, every_row, When(mode, step, rank))


def _at_random(p: float) -> Arm:
    return losses(_NAN, every_row, When("random", 1, p=p, seed=3))


_FF = "{ff_out}.weight"
_HOOKED: tuple[Engine, ...] = ("ddp", "zero2")
"""Engines under which a hook sees a parameter's gradient; under FSDP2 none does, which shares it out."""


def _damaged(*words: str) -> Expected:
    return Expected("weights", "stop", words, exit_code=3, nobody_lost=True)


_STEP = Expected("step", "skip", nobody_lost=True)
_RANK = Expected("rank", "stop", ("rank 1",), exit_code=3, nobody_lost=True)
_STOPPED = Expected("unknown", "stop", exit_code=3, nobody_lost=True)
_CHANCE = Expected("transient", "retry", same_as="clean", nobody_lost=True)
_TOO_OFTEN = Expected("transient", "stop", exit_code=3, nobody_lost=True)

BASE: tuple[Fault, ...] = (
    Fault(
        "a huge value in a frozen weight",
        "base",
        "before step 4",
        _damaged("frozen weight", _FF),
        _base(_FF, element(3e38)),
    ),
    Fault(
        "a huge value in a frozen weight at the first step",
        "base",
        "before step 1",
        _damaged("frozen weight", _FF),
        _base(_FF, element(3e38), step=1),
    ),
    Fault(
        "a frozen weight with its sign turned",
        "base",
        "before step 4",
        _damaged("frozen weight", _FF),
        _base(_FF, times(-1.0)),
    ),
    Fault(
        "one wrong bit of a frozen weight at the last step",
        "base",
        "before step 6",
        _damaged("frozen weight", _FF),
        _base(_FF, element(0.123)),
    ),
    Fault(
        "a huge value in a frozen weight of one rank",
        "base",
        "before step 4, rank 1",
        _damaged("frozen weight", _FF),
        _base(_FF, element(3e38), rank=1),
    ),
    Fault(
        "a class whose embedding is huge",
        "base",
        "before step 1",
        _damaged("frozen weight", "{class_table}"),
        _table(1),
        needs=("class_table",),
    ),
    Fault(
        "NaN in a buffer",
        "base",
        "before step 4",
        _damaged("buffer"),
        before(4, buffer(0), element(math.nan, 5), ALL_RANKS),
        needs=("has_buffers",),
    ),
    Fault(
        "a buffer with other values",
        "base",
        "before step 4",
        _damaged("buffer"),
        before(4, buffer(0), times(1.5), ALL_RANKS),
        needs=("has_buffers",),
    ),
    Fault(
        "NaN in a frozen weight that no pass of its step reads again",
        "base",
        "before step 6",
        _damaged("frozen weight"),
        before(6, frozen(0), element(math.nan), ALL_RANKS),
    ),
)

PLACES: tuple[Fault, ...] = (
    Fault(
        "NaN in one step, whatever sample is there",
        "step",
        "step 3, in replays too",
        _STEP,
        _loss(_NAN, "at", 3),
    ),
    Fault(
        "Inf in the first step, whatever sample is there",
        "step",
        "step 1, in replays too",
        _STEP,
        _loss(_INF, "at", 1),
    ),
    Fault(
        "a module that gives NaN in one step",
        "step",
        "step 3, in replays too",
        _STEP,
        module_output(OUTPUT, divided, When("at", 3)),
    ),
    Fault(
        "a gradient that is NaN in one step",
        "step",
        "step 4, in replays too",
        _STEP,
        gradients(element(math.nan), 0, When("at", 4)),
        engines=_HOOKED,
    ),
    Fault(
        "NaN for the second sample of a batch, whoever it is",
        "company",
        "from step 3",
        Expected("step", "skip", ("company",), exit_code=3, nobody_lost=True),
        losses(_NAN, place_in_batch(1), When("from", 3)),
        (("guard.max_skips", 2),),
        most_ranks=1,
    ),
    Fault(
        "NaN at late timesteps, whatever sample is there",
        "timestep",
        "t > 800, from step 2",
        Expected("inputs", "skip", nobody_lost=True),
        losses(_NAN, timesteps_between(800, 10_000), When("from", 2)),
        (("guard.max_skips", 40),),
        needs=("time_proj",),
    ),
    Fault(
        "every loss NaN from a step on",
        "loss",
        "from step 3",
        _STOPPED,
        _loss(_NAN, "from", 3),
    ),
)

RANKS: tuple[Fault, ...] = (
    Fault(
        "every loss of one rank NaN",
        "rank",
        "from step 3, rank 1",
        _RANK,
        _loss(_NAN, "from", 3, rank=1),
        ranks=2,
    ),
    Fault(
        "every loss of one rank Inf at the first step",
        "rank",
        "from step 1, rank 1",
        _RANK,
        _loss(_INF, "from", 1, rank=1),
        ranks=2,
    ),
    Fault(
        "a module that gives NaN on one rank",
        "rank",
        "from step 3, rank 1",
        _RANK,
        module_output(OUTPUT, divided, When("from", 3, 1)),
        ranks=2,
    ),
    Fault(
        "gradients that are NaN on one rank",
        "rank",
        "from step 4, rank 1",
        _RANK,
        gradients(element(math.nan), 0, When("from", 4, 1)),
        engines=_HOOKED,
        ranks=2,
    ),
)

CHANCE: tuple[Fault, ...] = (
    Fault("NaN now and then", "chance", "p = 0.1", _CHANCE, _at_random(0.1)),
    Fault("NaN more often than not", "chance", "p = 0.6", _TOO_OFTEN, _at_random(0.6)),
    Fault(
        "the first three passes of every attempt NaN",
        "chance",
        "every step",
        _TOO_OFTEN,
        first_passes(3),
    ),
    Fault(
        "replays that do not fit into memory",
        "memory",
        "from step 3",
        Expected("unknown", "skip", ("memory",), nobody_lost=True),
        at_once(losses(_NAN, target_rows, When("from", 3)), out_of_memory(passes_from(1))),
        engines=("ddp", "zero2"),  # in a pass that ranks share, it is the end
    ),
    Fault(
        "a trace that does not fit into memory",
        "memory",
        "from step 3",
        Expected("unknown", "skip", ("memory",), nobody_lost=True),
        at_once(losses(_NAN, target_rows, When("from", 3)), out_of_memory(passes_from(2))),
        engines=("ddp", "zero2"),  # in a pass that ranks share, it is the end
    ),
    Fault(
        "replays that do not fit into memory, in a pass that ranks share",
        "memory",
        "from step 3",
        Expected("unknown", "stop", ("does not fit into memory", "train.resume"), exit_code=3),
        at_once(losses(_NAN, target_rows, When("from", 3)), out_of_memory(passes_from(1))),
        ranks=2,
        engines=("fsdp2",),
    ),
)
FAULTS = (*BASE, *PLACES, *RANKS, *CHANCE)
