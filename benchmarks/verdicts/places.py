"""The places that faults are drawn for, and the allowed outcomes of each."""

import math
from dataclasses import replace
from functools import partial

from benchmarks.faults import arms
from benchmarks.faults.media.cache import damaged, poisoned
from benchmarks.faults.targets import FaultTargets
from benchmarks.faults.triggers import ALL_RANKS, Change, Element, When, before, row, times
from benchmarks.faults.world import Arm
from benchmarks.verdicts.cases import (
    DONE,
    REFUSED,
    SILENT,
    STOPPED,
    Case,
    Draw,
    Place,
    Right,
    right,
)
from benchmarks.verdicts.computing import COMPUTING

_LOSSES: dict[str, Change] = {
    "NaN": times(math.nan),
    "Inf": times(math.inf),
    "huge": times(1e30),
    "tiny": times(1e-25),
    "sign": times(-1.0),
    "factor": times(3.0),
}
_ROWS: dict[str, Change] = {
    "NaN": Element(math.nan, 3),
    "Inf": Element(math.inf, 3),
    "huge": times(1e15),
    "sign": times(-1.0),
    "factor": times(1.5),
}
_VALUES = {"NaN": math.nan, "Inf": math.inf, "1e30": 1e30, "5000": 5000.0, "negative": -1.0}
_NOT_FINITE = ("NaN", "Inf")
_TRANSIENT = right("transient", ends=(DONE,))
_OF_SAMPLE = right("data", touches=True, ends=(DONE,))
_PERHAPS = right("data", "inputs", must_report=False, touches=True, result="bounded")
"""So large that it may overflow, or may be clipped and trained on."""
_MEMORY = right("memory", "weights", ends=(DONE,))
_MOMENT = right("memory", "optimizer", "weights", ends=(DONE,))
_BASE = right("weights", ends=(DONE, REFUSED, STOPPED))
_STEP = right("step", result="bounded")


def _of_sample(draw: Draw, when: When) -> Right:
    if draw.kind in ("sign", "factor", "tiny"):
        return SILENT
    if draw.kind == "huge":
        transient_causes = {"transient"} if when.mode == "once" else set()
        return replace(_PERHAPS, causes=_PERHAPS.causes | transient_causes)
    return _TRANSIENT if when.mode == "once" else _OF_SAMPLE


def _sample_tensor(name: str, draw: Draw) -> Case:
    when = draw.when_it_comes("once", "from", "from")
    arm = arms.sample_tensor(name, _ROWS[draw.kind], when)
    return Case(when.description, _of_sample(draw, when), arm)


def _cache(draw: Draw) -> Case:
    value = {"huge": 3e30, "finite": 0.5, **_VALUES}[draw.kind]
    change = damaged("videos", draw.target_clip, poisoned("latent_mean", value))
    return Case("on the disk, before the run", _OF_SAMPLE, before_start=change)


def _loss_of_sample(draw: Draw) -> Case:
    when = draw.when_it_comes("once", "from", "from")
    arm = arms.losses(_LOSSES[draw.kind], arms.target_rows, when)
    return Case(when.description, _of_sample(draw, when), arm)


def _loss_of_step(draw: Draw) -> Case:
    when = draw.when("at")
    arm = arms.losses(_LOSSES[draw.kind], arms.every_row, when)
    return Case(f"{when.description}, whatever sample is there", _STEP, arm)


def _loss_of_row(draw: Draw) -> Case:
    when, index = draw.when("from"), draw.chance.choice((0, 1))
    arm = arms.losses(_LOSSES[draw.kind], arms.place_in_batch(index), when)
    # A sample alone is always in row 0, so that there every pass fails, whatever is changed.
    causes = ("step",) if index else ("step", "unknown")
    # In every step from the first on, nothing is ever trained, and the file is refused.
    allowed = right(*causes, ends=(DONE, REFUSED, STOPPED), result="bounded")
    return Case(f"{when.description}, in row {index}", allowed, arm)


def _loss_of_timesteps(draw: Draw) -> Case:
    first_timestep = draw.chance.choice((0, 200, 400, 600, 800))
    when, rows = draw.when("from"), arms.timesteps_between(first_timestep, first_timestep + 200)
    arm = arms.losses(_LOSSES[draw.kind], rows, when)
    allowed = right("inputs", "step", must_report=False, result="bounded")
    return Case(f"{when.description}, at t of {first_timestep} to {first_timestep + 200}", allowed, arm)


def _random_loss(draw: Draw) -> Case:
    p = float(draw.kind.removeprefix("p = "))
    when = When("random", draw.step(), draw.rank(), p, draw.number())
    arm = arms.losses(times(math.nan), arms.every_row, when)
    # The fault of one rank is that rank's, however often it strikes.
    causes = ("transient", "unknown", *(["rank"] if when.rank != ALL_RANKS else []))
    return Case(when.description, right(*causes, must_report=False), arm)


def _first_passes(draw: Draw) -> Case:
    count = int(draw.kind.split()[0])
    allowed = right("transient", "unknown")
    return Case("in every attempt at a step", allowed, arms.first_passes(count))


_BASE_CHANGES: dict[str, Change] = {
    "NaN": Element(math.nan),
    "Inf": Element(math.inf),
    "huge": Element(3e38),
    "sign": times(-1.0),
    "zero": times(0.0),
    "factor": times(1.5),
    "row": row(1e30),
}


def _frozen(draw: Draw) -> Case:
    step, rank, number = draw.step(), draw.rank(), draw.number()
    change = _BASE_CHANGES[draw.kind]
    if draw.kind in ("NaN", "Inf", "huge"):
        change = Element({"huge": 3e38, **_VALUES}[draw.kind], draw.number())
    dimensions = 2 if draw.kind == "row" else 1
    arm = before(step, arms.frozen(number, dimensions), change, rank)
    return Case(_before(step, rank), _of_rank(_BASE, rank), arm)


def _buffer(draw: Draw) -> Case:
    step, rank = draw.step(), draw.rank()
    arm = before(step, arms.buffer(draw.number()), _BASE_CHANGES[draw.kind], rank)
    allowed = _of_rank(_BASE, rank)
    if rank > 0:  # DDP puts the first rank's in its place before the next pass
        allowed = replace(allowed, must_report=False)
    return Case(_before(step, rank), allowed, arm)


def _weight(draw: Draw) -> Case:
    step, rank = draw.step(), draw.rank()
    change = Element(_VALUES[draw.kind], draw.number())
    arm = before(step, arms.trained(draw.number()), change, rank)
    return Case(_before(step, rank), _of_rank(_MEMORY, rank), arm)


def _all_weights(draw: Draw) -> Case:
    step = draw.step()
    if draw.kind == "grown":
        allowed = right("learning_rate", "weights", "memory", result="bounded")
        return Case(_before(step), allowed, before(step, arms.adapter(None), times(1e5)))
    if draw.ranks == 1:
        return Case(_before(step), SILENT, before(step, arms.adapter(None), times(-1.0)))
    allowed = right("rank", "weights", "memory")
    return Case(_before(step, 1), allowed, before(step, arms.adapter(None), times(-1.0), 1))


def _moment(draw: Draw) -> Case:
    step, rank = draw.step(2), draw.rank()
    key = "exp_avg_sq" if draw.kind == "negative" else draw.chance.choice(("exp_avg", "exp_avg_sq"))
    change = Element(_VALUES[draw.kind], draw.number())
    arm = before(step, arms.moment(draw.number(), key), change, rank)
    return Case(f"{_before(step, rank)}, in {key}", _of_rank(_MOMENT, rank), arm)


def _average(draw: Draw) -> Case:
    step, rank = draw.step(2), draw.rank()
    change = Element(_VALUES[draw.kind], draw.number())
    arm = before(step, arms.average(draw.number()), change, rank)
    allowed = _of_rank(_MEMORY, rank)
    return Case(_before(step, rank), allowed, arm, (("train.ema", 0.9),))


def _gradient(draw: Draw) -> Case:
    rank = draw.rank()
    when = draw.when("once", "from", "at", rank=rank)
    number = draw.number() if draw.kind.startswith("one") else None
    change = {
        "one NaN": Element(math.nan, draw.number()),
        "one Inf": Element(math.inf, draw.number()),
        "all NaN": times(math.nan),
        "one 1e30": Element(1e30, draw.number()),
        "all x 1e30": times(1e30),
        "all x 1e-25": times(1e-25),
    }[draw.kind]
    arm = arms.gradients(change, number, when)
    if draw.kind == "one 1e30":  # finite; what it leaves in a moment is an altered element
        allowed = right(*_MOMENT.causes, must_report=False, ends=_BASE.ends, result="bounded")
        return Case(when.description, allowed, arm)
    if "1e" in draw.kind:  # finite, and so is its norm
        return Case(when.description, right(must_report=False, ends=(DONE, REFUSED), result="bounded"), arm)
    return Case(when.description, of_pass(when), arm)


def of_pass(when: When) -> Right:
    """The allowed outcomes of a fault that spoils whole passes, independent of their samples."""
    if when.mode == "once":
        return _TRANSIENT
    if when.rank != ALL_RANKS:
        return right("rank", "step", result="bounded")
    return _STEP if when.mode == "at" else right("unknown", "step", ends=(STOPPED,))


def _device(draw: Draw) -> Case:
    when = draw.when("from", rank=draw.chance.choice((0, 1)))
    arm = arms.losses(_LOSSES[draw.kind], arms.every_row, when)
    return Case(when.description, right("rank", ends=(STOPPED,)), arm)


def _rate(draw: Draw) -> Case:
    group = {"adapter": {"lr": float(draw.kind)}}
    # By so much, the default weight decay makes weights grow too.
    causes = ("learning_rate",) if draw.kind == "1e3" else ("learning_rate", "optimizer")
    allowed = right(*causes, result="bounded", message_parts=("learning rate",))
    overrides = (("optim.clip", None), ("optim.groups", group))
    return Case("from the start", allowed, overrides=overrides)


def _decay(draw: Draw) -> Case:
    group = {"adapter": {"lr": 1e-3, "weight_decay": float(draw.kind)}}
    causes = ("learning_rate", "weight_decay", "optimizer")
    allowed = right(*causes, result="bounded", message_parts=("weight decay", "weight_decay"))
    return Case("from the start", allowed, overrides=(("optim.groups", group),))


def _memory(draw: Draw) -> Case:
    first_replay = draw.chance.randint(1, 6)
    when = draw.when_it_comes("from")
    fault = arms.losses(times(math.nan), arms.target_rows, when)
    arm: Arm = arms.at_once(fault, arms.out_of_memory(arms.passes_from(first_replay)))
    allowed = right("data", "inputs", "unknown", touches=True, ends=(DONE,))
    description = f"{when.description}; replays from the {first_replay}. on do not fit into memory"
    return Case(description, allowed, arm)


def _nothing(draw: Draw) -> Case:
    return Case("never", right(must_report=False, ends=(DONE,)))


def _before(step: int, rank: int = ALL_RANKS) -> str:
    rank_note = f", rank {rank}" if rank != ALL_RANKS else ""
    return f"before step {step}{rank_note}"


def _of_rank(allowed: Right, rank: int) -> Right:
    """Allow the cause `rank` too, if only one rank has the fault."""
    if rank == ALL_RANKS:
        return allowed
    return right(*allowed.causes, "rank", ends=tuple({*allowed.ends, STOPPED}))


def _encoded(targets: FaultTargets, ranks: int) -> bool:
    return targets.encoded


_TENSOR, _LOSS = tuple(_ROWS), tuple(_LOSSES)
_BASE_KINDS = tuple(_BASE_CHANGES)
PLACES: dict[str, Place] = {
    "no fault": Place(_nothing, ("none",), "nothing: the guard must say nothing"),
    "latent": Place(partial(_sample_tensor, "latent_mean"), _TENSOR, "a sample's latent after reading", _encoded),
    "caption embedding": Place(
        partial(_sample_tensor, "prompt_embeds"),
        _TENSOR,
        "a sample's encoded caption after reading",
        lambda targets, ranks: targets.text is not None,
    ),
    "cache entry": Place(_cache, ("NaN", "Inf", "huge", "finite"), "a value of a cache entry on the disk", _encoded),
    "loss of a sample": Place(_loss_of_sample, _LOSS, "one sample's loss"),
    "loss of a step": Place(
        _loss_of_step, _NOT_FINITE, "a step's loss, whatever samples it has; in replays of it too"
    ),
    "loss of a row": Place(
        _loss_of_row,
        _NOT_FINITE,
        "the loss at one place in the batch",
        lambda targets, ranks: ranks == 1,
    ),
    "loss of timesteps": Place(
        _loss_of_timesteps,
        _NOT_FINITE,
        "the loss at a range of timesteps",
        _encoded,
    ),
    "random loss": Place(
        _random_loss,
        ("p = 0.01", "p = 0.05", "p = 0.2", "p = 0.5", "p = 0.7", "p = 0.9"),
        "any loss, with a chance: hardware that is not deterministic",
    ),
    "late replay": Place(_first_passes, ("1 pass", "2 passes", "3 passes", "5 passes"), "a step's first passes"),
    "frozen weight": Place(_frozen, _BASE_KINDS, "a weight of the base in memory"),
    "buffer": Place(
        _buffer,
        ("NaN", "huge", "sign", "factor"),
        "a buffer of the base in memory",
        lambda targets, ranks: targets.has_buffers,
    ),
    "trained weight": Place(_weight, ("NaN", "Inf", "1e30", "5000"), "one element of a trained weight"),
    "trained weights": Place(_all_weights, ("grown", "sign"), "all trained weights"),
    "moment": Place(_moment, ("NaN", "Inf", "1e30", "negative"), "one element of one of AdamW's moments"),
    "average": Place(_average, ("NaN", "Inf", "1e30", "5000"), "one element of the moving average"),
    "gradient": Place(
        _gradient,
        ("one NaN", "one Inf", "all NaN", "one 1e30", "all x 1e30", "all x 1e-25"),
        "gradients as they arrive",
    ),
    "device": Place(_device, _NOT_FINITE, "all that one rank computes", lambda targets, ranks: ranks > 1),
    "learning rate": Place(_rate, ("1e3", "1e5", "1e38"), "a real divergence"),
    "weight decay": Place(_decay, ("1e5", "1e7"), "a real divergence of another cause"),
    "memory": Place(_memory, ("out of memory",), "a sample's loss, and replays that do not fit"),
    **COMPUTING,
}
