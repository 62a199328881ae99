"""Faults of memory, of a step and of chance in loops that are not ours: no sample is to be named for them."""

import random
from collections.abc import Callable
from typing import Any

import torch

from dit_lora.config.recipe import LadderConfig
from dit_lora.faults.fault import Expected, Fault
from dit_lora.faults.loops import Toy, ToyLoop, played

_BLAMING = ("data", "inputs", "labels")
_PATIENT = LadderConfig(max_skips=20)
Batch = dict[str, torch.Tensor]


def nobody_is_blamed(loop: ToyLoop) -> str | None:
    """Return a complaint if a sample is named for what none of them did."""
    named = [e["sample_ids"] for e in loop.guard.events if e["verdict"]["cause"] in _BLAMING]
    return f"named, though no sample is at fault: {named}" if named else None


def _frozen_base(model: Toy) -> None:
    for part in (model.classes, model.first):
        part.requires_grad_(False)


def _element(find: Callable[[ToyLoop], torch.Tensor], value: float) -> Any:
    """Set one element before step 4."""

    def spoil(loop: ToyLoop, step: int, batch: Batch) -> None:
        if step == 4:
            find(loop).view(-1)[3] = value

    return spoil


def _other_sign(find: Callable[[ToyLoop], torch.Tensor], *, on_last_rank: bool = False) -> Any:
    """Turn the sign of a tensor before step 4, which every step survives."""

    def spoil(loop: ToyLoop, step: int, batch: Batch) -> None:
        ranks = loop.accelerator.num_processes
        if step == 4 and (not on_last_rank or loop.accelerator.process_index == ranks - 1):
            find(loop).neg_()

    return spoil


def _huge_class(loop: ToyLoop, step: int, batch: Batch) -> None:
    """Spoil the row of one class before step 1, which one sample of it is the first to meet."""
    if step == 1:
        loop.bare.classes.weight.data[int(batch["labels"][1])] = 1e30


def _weight(loop: ToyLoop) -> torch.Tensor:
    return loop.bare.last.weight.data


def _moment(key: str) -> Callable[[ToyLoop], torch.Tensor]:
    return lambda loop: loop.optimizer.state[loop.bare.last.weight][key]


def _frozen(loop: ToyLoop) -> torch.Tensor:
    return loop.bare.first.weight.data


def _buffer(loop: ToyLoop) -> torch.Tensor:
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


def _spoiled_passes(fails: Callable[[int, int], bool]) -> Any:
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
    draw = random.Random(p)
    return lambda step, _: step > 1 and draw.random() < p


def _stepped_far(loop: ToyLoop, step: int, batch: Batch) -> None:
    """Move all weights far away, as one update at a wild rate leaves them."""
    if step == 4:
        with torch.no_grad():
            for parameter in loop.bare.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=1e6)


_ALTERED = ("altered in memory",)
_DAMAGED = ("the checkpoint or memory is damaged",)


def _fault(name: str, when: str, expected: Expected, spoil: Any, **how: Any) -> Fault:
    play = played(spoil, nobody_is_blamed, **how)
    return Fault(f"{name}, in a stock loop", "plugin", when, expected, play=play)


FAULTS: tuple[Fault, ...] = (
    _fault(
        "1e30 in one element of a weight",
        "before step 4",
        Expected("weights", "rollback", _ALTERED, module="last"),
        _element(_weight, 1e30),
    ),
    *(
        _fault(
            f"1e30 in one element of {key}",
            "before step 4",
            Expected("optimizer", "rollback", _ALTERED, module="last"),
            _element(_moment(key), 1e30),
        )
        for key in ("exp_avg", "exp_avg_sq")
    ),
    *(
        _fault(
            f"{value:g} in a frozen weight",
            "before step 4",
            Expected("weights", "stop", _DAMAGED, module="first", exit_code=3),
            _element(_frozen, value),
            change=_frozen_base,
        )
        for value in (torch.nan, 3e38)
    ),
    _fault(
        "a class whose frozen embedding is huge",
        "before step 1",
        Expected("weights", "stop", _DAMAGED, module="classes", exit_code=3),
        _huge_class,
        change=_frozen_base,
    ),
    *(
        _fault(
            f"{what} with its sign turned",
            "before step 4",
            Expected("weights", "stop", (*words, *_DAMAGED), module=module, exit_code=3),
            _other_sign(find, on_last_rank=on_last_rank),
            change=_frozen_base,
        )
        for what, words, module, find, on_last_rank in (
            ("a frozen weight", (), "first", _frozen, False),
            ("a frozen weight of one rank", (), "first", _frozen, True),
            ("a buffer", ("the buffer scale",), None, _buffer, False),
        )
    ),
    *(
        _fault(
            f"frozen weights that {what}",
            "from step 3",
            Expected("none", "none"),
            spoil,
            change=_frozen_base,
        )
        for what, spoil in (("a teacher averages", _averaged), ("code writes to", _written))
    ),
    _fault(
        "NaN in a buffer",
        "before step 4",
        Expected("weights", "stop", ("the buffer scale", *_DAMAGED), exit_code=3),
        _element(_buffer, torch.nan),
    ),
    _fault(
        "a module that gives NaN in one step",
        "step 3, in replays too",
        Expected("unknown", "skip", ("every sample fails now",)),
        _spoiled_passes(lambda step, _: step == 3),
    ),
    _fault(
        "a module that gives NaN in every step",
        "from step 3",
        Expected("unknown", "stop", exit_code=3),
        _spoiled_passes(lambda step, _: step >= 3),
        config=LadderConfig(max_skips=2),
    ),
    *(
        _fault(
            f"a module that gives NaN with p = {p:g}",
            "from step 2",
            Expected("transient", "skip"),
            _spoiled_passes(_by_chance(p)),
            config=_PATIENT,
        )
        for p in (0.3, 0.6, 0.9)
    ),
    _fault(
        "a module whose first pass gives NaN",
        "every step from 3",
        Expected("transient", "skip"),
        _spoiled_passes(lambda step, number: step >= 3 and number == 1),
        config=_PATIENT,
    ),
    _fault(
        "weights far beyond use",
        "before step 4",
        Expected("learning_rate", "rollback"),
        _stepped_far,
    ),
)
