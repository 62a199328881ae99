"""Faults of memory, of a step and of chance in loops that are not ours: no sample is to be named for them."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.faults.fault import Expected, Fault
from benchmarks.faults.loop import Batch, Spoil, Toy, ToyLoop
from benchmarks.faults.loops import at, in_loops
from benchmarks.faults.triggers import Element, times
from dit_lora.config.recovery_settings import RecoveryConfig

_BLAMING = ("data", "inputs", "labels")
_PATIENT = RecoveryConfig(max_skips=20)


def nobody_is_blamed(loop: ToyLoop) -> str | None:
    """A complaint if a diagnosis names a sample, since none caused the fault; else None."""
    named_samples = [e["sample_ids"] for e in loop.guard.events if e["verdict"]["cause"] in _BLAMING]
    return f"named, though no sample is at fault: {named_samples}" if named_samples else None


def _frozen_base(model: Toy) -> None:
    for part in (model.classes, model.first):
        part.requires_grad_(False)


def _huge_class(loop: ToyLoop, step: int, batch: Batch) -> None:
    """Spoil the row of one class before step 1, which one sample of it is the first to meet."""
    if step == 1:
        loop.bare.classes.weight.data[int(batch["labels"][1])] = 1e30


def _weight(loop: ToyLoop, batch: Batch) -> torch.Tensor:
    return loop.bare.last.weight.data


def _moment(key: str) -> Callable[[ToyLoop, Batch], torch.Tensor]:
    return lambda loop, batch: loop.optimizer.state[loop.bare.last.weight][key]


def _frozen(loop: ToyLoop, batch: Batch) -> torch.Tensor:
    return loop.bare.first.weight.data


def _buffer(loop: ToyLoop, batch: Batch) -> torch.Tensor:
    return loop.bare.get_buffer("scale").data


@torch.no_grad()
def _averaged(loop: ToyLoop, step: int, batch: Batch) -> None:
    """Move all frozen layers in every third step past their versions, as many write a teacher's average."""
    if step % 3 == 0:
        for part in (*loop.bare.first.parameters(), *loop.bare.classes.parameters()):
            part.data.mul_(0.9)


@torch.no_grad()
def _written(loop: ToyLoop, step: int, batch: Batch) -> None:
    """Write to one frozen weight in place, and give another new values."""
    if step == 4:
        loop.bare.first.weight.mul_(0.9)
        loop.bare.classes.weight.data = loop.bare.classes.weight * 0.9


def _spoiled_passes(fails: Callable[[int, int], bool]) -> Spoil:
    """Make a module give NaN where `fails` says so of the step and of how many passes there were in it."""

    def spoil(loop: ToyLoop, step: int, batch: Batch) -> None:
        passes = [0]

        def after(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            passes[0] += 1
            return output * torch.nan if fails(step, passes[0]) else None

        # The hook of the step before is replaced: each counts the passes of one step alone.
        for handle in loop.handles:
            handle.remove()
        loop.handles[:] = [loop.bare.first.register_forward_hook(after)]

    return spoil


def _by_chance(p: float) -> Callable[[int, int], bool]:
    """Strike from step 2 on with probability p, in replays too."""
    draw = random.Random()

    def fails(step: int, _number: int) -> bool:
        if step == 1:  # another loop begins
            draw.seed(p)
        return step > 1 and draw.random() < p

    return fails


def _stepped_far(loop: ToyLoop, step: int, batch: Batch) -> None:
    """Move all weights far away, as one update at a wild rate leaves them."""
    if step == 4:
        with torch.no_grad():
            for parameter in loop.bare.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=1e6)


_DAMAGED = "the checkpoint or memory is damaged"
_SAID_NOTHING = Expected("none", "none")
_SKIPPED = Expected("unknown", "skip", ("every sample fails now",))
_STOPPED = Expected("unknown", "stop", exit_code=3)
_TRANSIENT = Expected("transient", "skip")
_FAR = Expected("learning_rate", "rollback")


def _fault(name: str, when: str, expected: Expected, spoil: Spoil, **options: Any) -> tuple[Fault, ...]:
    return in_loops(f"{name},", when, expected, spoil, nobody_is_blamed, **options)


def _altered(name: str, cause: str, find: Callable[[ToyLoop, Batch], torch.Tensor]) -> tuple[Fault, ...]:
    expected = Expected(cause, "rollback", ("altered in memory",), module="last")
    return _fault(name, "before step 4", expected, at(4, find, Element(1e30, 3)))


def _base(name: str, module: str | None, spoil: Spoil, *message_parts: str, step: int = 4) -> tuple[Fault, ...]:
    """A fault of a frozen base in memory. A loop that calls `require_finite` stops; a trainer continues."""
    stopped = Expected("weights", "stop", (*message_parts, _DAMAGED), module=module, exit_code=3)
    reported = Expected("weights", "report", (*message_parts, _DAMAGED), module=module)
    return _fault(name, f"before step {step}", stopped, spoil, in_trainers=reported, change=_frozen_base)


_OTHER_SIGN = times(-1.0)
FAULTS: tuple[Fault, ...] = (
    *_altered("1e30 in one element of a weight", "weights", _weight),
    *_altered("1e30 in one element of exp_avg", "optimizer", _moment("exp_avg")),
    *_altered("1e30 in one element of exp_avg_sq", "optimizer", _moment("exp_avg_sq")),
    *_base("nan in a frozen weight", "first", at(4, _frozen, Element(math.nan, 3))),
    *_base("3e+38 in a frozen weight", "first", at(4, _frozen, Element(3e38, 3))),
    *_base("a class whose frozen embedding is huge", "classes", _huge_class, step=1),
    *_base("a frozen weight with its sign turned", "first", at(4, _frozen, _OTHER_SIGN)),
    *_base(
        "a frozen weight of one rank with its sign turned",
        "first",
        at(4, _frozen, _OTHER_SIGN, on_last_rank=True),
    ),
    *_base("a buffer with its sign turned", None, at(4, _buffer, _OTHER_SIGN), "the buffer scale"),
    *(
        fault
        for name, spoil in (
            ("frozen weights that a teacher averages", _averaged),
            ("frozen weights that code writes to", _written),
        )
        for fault in _fault(name, "from step 3", _SAID_NOTHING, spoil, change=_frozen_base)
    ),
    *_fault(
        "NaN in a buffer",
        "before step 4",
        Expected("weights", "skip", ("the buffer scale", _DAMAGED)),
        at(4, _buffer, Element(math.nan, 3)),
    ),
    *_fault(
        "a module that gives NaN in one step",
        "step 3, in replays too",
        _SKIPPED,
        _spoiled_passes(lambda step, _: step == 3),
    ),
    *_fault(
        "a module that gives NaN in every step",
        "from step 3",
        _STOPPED,
        _spoiled_passes(lambda step, _: step >= 3),
        config=RecoveryConfig(max_skips=2),
    ),
    *(
        fault
        for p in (0.3, 0.6, 0.9)
        for fault in _fault(
            f"a module that gives NaN with p = {p:g}",
            "from step 2",
            _TRANSIENT,
            _spoiled_passes(_by_chance(p)),
            config=_PATIENT,
        )
    ),
    *_fault(
        "a module whose first pass gives NaN",
        "every step from 3",
        _TRANSIENT,
        _spoiled_passes(lambda step, number: step >= 3 and number == 1),
        config=_PATIENT,
    ),
    *_fault("weights far beyond use", "before step 4", _FAR, _stepped_far),
)
