"""Faults that no sample causes: the base in memory, the step, other samples, a rank, chance, too little memory."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.faults.arms import (
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
    upper_timesteps,
)
from benchmarks.faults.fault import Expected, Fault, between_steps, from_step
from benchmarks.faults.triggers import Change, Element, Find, When, divided, row, times
from benchmarks.faults.world import Arm, Engine

_FF = "{ff_out}.weight"
_HOOKED: tuple[Engine, ...] = ("ddp", "zero2")
"""Engines whose passes are a rank's own, and in which a hook sees a parameter's gradient; FSDP2 shares both out."""
_BUFFERS, _CLASSES = ("has_buffers",), ("class_table",)
_HUGE, _ONE_NAN, _NAN, _INF = Element(3e38), Element(math.nan), times(math.nan), times(math.inf)
_STEP = Expected("step", "skip", nobody_lost=True)
_RANK = Expected("rank", "stop", ("rank 1",), exit_code=3, nobody_lost=True)
_COMPANY = Expected("step", "skip", ("as a batch",), exit_code=3, nobody_lost=True)
_STOPPED = Expected("unknown", "stop", exit_code=3, nobody_lost=True)
_CHANCE = Expected("transient", "retry", same_as="clean", nobody_lost=True)
_TOO_OFTEN = Expected("transient", "stop", exit_code=3, nobody_lost=True)
_SKIPPED = Expected("unknown", "skip", ("memory",), nobody_lost=True)


def _base(name: str, find: Find, change: Change, *message_parts: str, **options: Any) -> Fault:
    """A fault of the base weights in memory, after which the run can only stop."""
    expected = Expected("weights", "stop", message_parts, exit_code=3, nobody_lost=True)
    return between_steps(name, "base", expected, find, change, **options)


def _frozen(name: str, change: Change, weight: str = _FF, **options: Any) -> Fault:
    return _base(name, parameter(weight), change, "frozen weight", weight, **options)


def _in_step(name: str, step: int, strike: Callable[[When], Arm], **options: Any) -> Fault:
    """A fault that recurs whenever its step is replayed, and in no other step."""
    when_text = f"step {step}, in replays too"
    return Fault(name, "step", when_text, _STEP, strike(When("at", step)), **options)


def _of_rank(name: str, step: int, strike: Callable[[When], Arm], **options: Any) -> Fault:
    return from_step(name, "rank", _RANK, strike, step, 1, ranks=2, **options)


def _at_random(p: float) -> Arm:
    return losses(_NAN, every_row, When("random", 1, p=p, seed=3))


def _no_memory(name: str, expected: Expected, first_pass: int, **options: Any) -> Fault:
    """The target's loss is NaN, and the guard's passes from number `first` on run out of memory."""
    loss, memory = losses(_NAN, target_rows, When("from", 3)), out_of_memory(passes_from(first_pass))
    return Fault(name, "memory", "from step 3", expected, at_once(loss, memory), **options)


_LOSSES, _INF_LOSSES = partial(losses, _NAN, every_row), partial(losses, _INF, every_row)
_MODULE, _GRADIENT = partial(module_output, OUTPUT, divided), partial(gradients, _ONE_NAN, 0)
FAULTS: tuple[Fault, ...] = (
    _frozen("a huge value in a frozen weight", _HUGE),
    _frozen("a huge value in a frozen weight at the first step", _HUGE, step=1),
    _frozen("a frozen weight with its sign turned", times(-1.0)),
    _frozen("one wrong bit of a frozen weight at the last step", Element(0.123), step=6),
    _frozen("a huge value in a frozen weight of one rank", _HUGE, rank=1),
    _frozen("a class whose embedding is huge", row(1e30), "{class_table}", step=1, needs=_CLASSES),
    _base("NaN in a buffer", buffer(0), Element(math.nan, 5), "buffer", needs=_BUFFERS),
    _base("a buffer with other values", buffer(0), times(1.5), "buffer", needs=_BUFFERS),
    _base(
        "NaN in a frozen weight that no pass of its step reads again",
        frozen(0),
        _ONE_NAN,
        "frozen weight",
        step=6,
    ),
    _in_step("NaN in one step, whatever sample is there", 3, _LOSSES),
    _in_step("Inf in the first step, whatever sample is there", 1, _INF_LOSSES),
    _in_step("a module that gives NaN in one step", 3, _MODULE),
    _in_step("a gradient that is NaN in one step", 4, _GRADIENT, engines=_HOOKED),
    from_step(
        "NaN for the second sample of a batch, whoever it is",
        "company",
        _COMPANY,
        partial(losses, _NAN, place_in_batch(1)),
        overrides=(("guard.max_skips", 2),),
        most_ranks=1,
    ),
    Fault(
        "NaN at late timesteps, whatever sample is there",
        "timestep",
        "the upper timesteps, from step 2",
        Expected("inputs", "skip", nobody_lost=True),
        losses(_NAN, upper_timesteps, When("from", 2)),
        (("guard.max_skips", 40),),
        needs=("time_proj",),
    ),
    from_step("every loss NaN from a step on", "loss", _STOPPED, _LOSSES),
    _of_rank("every loss of one rank NaN", 3, _LOSSES),
    _of_rank("every loss of one rank Inf at the first step", 1, _INF_LOSSES),
    _of_rank("a module that gives NaN on one rank", 3, _MODULE),
    _of_rank("gradients that are NaN on one rank", 4, _GRADIENT, engines=_HOOKED),
    Fault("NaN now and then", "chance", "p = 0.1", _CHANCE, _at_random(0.1)),
    Fault("NaN more often than not", "chance", "p = 0.6", _TOO_OFTEN, _at_random(0.6)),
    Fault(
        "the first three passes of every attempt NaN",
        "chance",
        "every step",
        _TOO_OFTEN,
        first_passes(3),
    ),
    # In a pass that ranks share, too little memory is the end.
    _no_memory("replays that do not fit into memory", _SKIPPED, 1, engines=_HOOKED),
    _no_memory("a trace that does not fit into memory", _SKIPPED, 2, engines=_HOOKED),
    _no_memory(
        "replays that do not fit into memory, in a pass that ranks share",
        Expected("unknown", "stop", ("does not fit into memory", "train.resume"), exit_code=3),
        1,
        ranks=2,
        engines=("fsdp2",),
    ),
)
