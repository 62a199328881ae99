"""Places in what computes: activations, fused kernels, attention backends, the stock output."""

import math
from dataclasses import replace

import torch

from benchmarks.faults import arms
from benchmarks.faults.ops import CHECKED
from benchmarks.faults.triggers import (
    ALL_RANKS,
    Change,
    When,
    backward_of,
    divided,
    first_row,
    overflowing,
    times,
)
from benchmarks.faults.world import Overrides
from benchmarks.verdicts.cases import (
    DONE,
    REFUSED,
    SILENT,
    STOPPED,
    Case,
    Draw,
    Place,
    Result,
    Right,
    right,
)

_COMPARED: Overrides = (*CHECKED, ("guard.parity_every", 1))
"""Kernels are compared with their references before the run, and after each step of it."""
_WRONG, _FLASH = "kernel:wrong_op", "attention:flash"
_VALUES: dict[str, Change] = {
    "NaN": divided,
    "Inf": overflowing,
    "huge": times(1e30),
    "sign": times(-1.0),
    "factor": times(1.5),
}
_MODULES = ("{ff}", "{ff_out}", "{attention}.{out_proj}", "{attention}.{key}", "{final_proj}")


def _activation(draw: Draw) -> Case:
    kind, _, direction = draw.kind.partition(" ")
    module = draw.chance.choice(_MODULES)
    when = draw.when("once", "from", "at", rank=draw.rank())
    change = _VALUES[kind]
    change = backward_of(change) if direction else change
    description = f"{when.description}, of {draw.targets.named(module)}"
    allowed = _of_activation(kind, when)
    if direction and not draw.targets.encoded:  # no gradient goes through a frozen vision encoder
        allowed = replace(allowed, must_report=False)
    if "vision_tower" in draw.targets.named(module):  # its first token may be one that is dropped
        allowed = replace(allowed, must_report=False)
    return Case(description, allowed, arms.module_output(module, change, when))


def _of_activation(kind: str, when: When) -> Right:
    if kind in ("sign", "factor"):
        return replace(SILENT, ends=(DONE, REFUSED))  # it is there when the result is looked at
    causes = {"once": ("transient",), "at": ("step",), "from": ("unknown", "step")}[when.mode]
    causes += ("rank",) if when.rank != ALL_RANKS and when.mode != "once" else ()
    if kind == "huge":
        # PyTorch's flash attention cannot take such values, and its others can.
        # And some draws overflow where others do not.
        causes += ("precision", "attention_backend", "inputs")
        ends, switched_off = (DONE, REFUSED, STOPPED), frozenset({_FLASH})
        return right(*causes, must_report=False, result="bounded", ends=ends, switches=switched_off)
    if when.mode == "once":
        return right(*causes, ends=(DONE,))
    return right(*causes, result="bounded")


_KERNELS: dict[str, Change] = {
    "NaN": divided,
    "Inf": overflowing,
    "NaN backward": backward_of(divided),
    "0.1 % off": times(1.001),
    "1 % off": times(1.01),
    "first row for all": first_row,
    "weak backward": backward_of(times(0.8)),
}
_UNSTABLE = "unstable"


def _kernel(draw: Draw) -> Case:
    if draw.kind == _UNSTABLE:
        when = draw.when("random")
        allowed = _unstable("kernel", _WRONG)
        return Case(when.description, allowed, arms.kernel(divided, when))
    change = _KERNELS[draw.kind]
    if draw.kind in ("NaN", "Inf", "NaN backward"):
        when = draw.when("from")
        return Case(when.description, _always_wrong("kernel", _WRONG), arms.kernel(change, when))
    when = When("from", draw.chance.choice((0, 0, 1, 3)))
    target = "{modulation}" if draw.kind == "first row for all" else arms.OUTPUT
    if not draw.targets.modulation:
        target = arms.OUTPUT
    arm = arms.kernel(change, when, module=target)
    return Case(when.description, _always_wrong("kernel", _WRONG), arm, _COMPARED)


def _attention(draw: Draw) -> Case:
    if draw.kind == _UNSTABLE:
        when = draw.when("random")
        allowed = _unstable("attention_backend", _FLASH)
        return Case(when.description, allowed, arms.attention(divided, when))
    changes = {"NaN": divided, "NaN backward": backward_of(divided), "5 % off": times(1.05)}
    change = changes[draw.kind]
    if draw.kind != "5 % off":
        when = draw.when("from")
        return Case(when.description, _always_wrong("attention_backend", _FLASH), arms.attention(change, when))
    when = When("from", draw.chance.choice((0, 1, 3)))
    # A backend of PyTorch's that is wrong by little is met before the run or at its end, which refuses the file.
    result: Result = "clean" if when.step == 0 else "bounded"
    switched_off = frozenset({_FLASH})
    allowed = right(
        "attention_backend",
        "kernel",
        must_report=False,
        switches=switched_off,
        ends=(DONE, REFUSED),
        result=result,
    )
    return Case(when.description, allowed, arms.attention(change, when), _COMPARED)


def _always_wrong(cause: str, switch: str, result: Result = "clean") -> Right:
    """Wrong every time: switched off, and nothing else."""
    return right(cause, switches=frozenset({switch}), ends=(DONE,), result=result)


def _unstable(cause: str, switch: str) -> Right:
    """A kernel that is wrong at times: it must be named or switched off; at the end it must also refuse the file."""
    switches = frozenset({switch})
    causes = ("transient", "unknown", cause)
    ends = (DONE, REFUSED, STOPPED)
    return right(*causes, must_report=False, ends=ends, result="bounded", switches=switches)


def _stock_output(draw: Draw) -> Case:
    """A module that is wrong only where nothing is trained, as when the result is compared."""

    def change(output: torch.Tensor) -> torch.Tensor:
        return output if torch.is_grad_enabled() else output * value

    value = {"NaN": math.nan, "factor": 3.0}[draw.kind]
    when = When("from", draw.step())
    ends = (DONE, REFUSED, STOPPED) if draw.kind == "factor" else (REFUSED, STOPPED)
    allowed = right("weights", "kernel", must_report=False, ends=ends)
    arm = arms.module_output("{attention}.{out_proj}", change, when)
    return Case(f"{when.description}, without gradients", allowed, arm)


COMPUTING: dict[str, Place] = {
    "activation": Place(
        _activation,
        (*_VALUES, "NaN backward", "Inf backward", "huge backward", "factor backward"),
        "what a module gives, or its gradient",
    ),
    "kernel": Place(
        _kernel,
        (*_KERNELS, _UNSTABLE),
        "a fused kernel that has a switch",
    ),
    "attention": Place(
        _attention,
        ("NaN", "NaN backward", "5 % off", _UNSTABLE),
        "one of PyTorch's attention backends",
    ),
    "output": Place(_stock_output, ("NaN", "factor"), "the model's output where nothing is trained"),
}
