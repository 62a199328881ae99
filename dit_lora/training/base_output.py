"""Notes the base's output before the first step, to compare it when a run goes on and when it ends.

At a run's end the frozen weights in memory are those that it trained on, and not always those that it loaded. So the
output of made-up inputs (`output_record`) is noted as soon as the model is loaded, by the model's own code, into
base_output.json. A start that resumes compares itself with the first one's.
"""

import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from dit_lora.config.records import read_typed
from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.fuse.first_forward import refusal
from dit_lora.fuse.patches import KERNELS
from dit_lora.guard.event import Event, kernel_event
from dit_lora.guard.switches import COMPILE, Switch, attention_switches, model_switches
from dit_lora.numerics.adapter_tensors import is_adapter
from dit_lora.numerics.dtensors import local
from dit_lora.numerics.tolerances import KERNEL, LATER
from dit_lora.results.verify.checks import percent
from dit_lora.results.verify.output import (
    NOT_RECORDED,
    adapters_off,
    distance,
    is_finite,
    kernels_of,
    output_now,
    tolerance,
    without_kernels,
)
from dit_lora.results.verify.reference_model import Inputs, sharing_weights, why_apart
from dit_lora.training.choose_checkpointing import choose_checkpointing
from dit_lora.training.execution.base_alone import does_nothing
from dit_lora.training.session.session import agree
from dit_lora.training.task import AnySetup

BASE_OUTPUT = "base_output.json"
_TRAINED_ON_IT = (
    "from some step on the adapter was trained on that; go on from an earlier checkpoint (train.resume=PATH in "
    "another run.dir)"
)


@dataclass
class BaseOutput:
    """The base's output of made-up inputs at a run's first start."""

    noted: dict[str, Any] | None
    """The result of `output_now`, or the reason why it could not be made. None without a base: every weight trains."""
    loaded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Base weights that train, as they were loaded, on the host; of sharded ones this rank's part."""
    since: int = 0
    """The step at which it was noted: later than the first of a run from before there was a record."""
    begins_alone: bool = False
    """True if only an adapter trains, which changes nothing before the first step: the base can be shown after it."""
    kernels: float = 0.0
    """Distance between the outputs with the kernels in use and by the model's own code, when this process started."""


def note_base(setup: AnySetup, resume_from: Path | None) -> BaseOutput:
    """Note the base's output, before a checkpoint is put into the model; for a resumed run, that of its first start.

    Collective. Raises `DitLoraError` on every rank if the base is another on one of them, or than at the first start.
    """
    model, main = setup.transformer, setup.session.is_main
    if all(parameter.requires_grad for parameter in model.parameters()):
        return BaseOutput(None)
    # Base weights that train are no base at the end: the record is of their values at loading.
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and not is_adapter(n)]
    loaded = {name: local(p.detach()).to("cpu", copy=True) for name, p in named}
    record = _first_record(setup.session.dir, resume_from) if main else None
    (first,) = broadcast_object_list([record])
    base = BaseOutput(None, loaded, begins_alone=does_nothing(model))
    # Every rank computes it: a rank with a damaged file is found here, before it spoils the others' gradients.
    today = _now(setup, base, first["inputs"] if first else made_up_inputs(setup))
    (noted,) = broadcast_object_list([first or today])  # the main process'
    base.noted = noted
    agree(setup.session.accelerator, _unlike(setup, noted, today, resumed=first is not None))
    return base


def keep_base(setup: AnySetup, base: BaseOutput, start_step: int) -> None:
    """Write the record where it is new, into a folder that is open now; say what it cannot tell."""
    file = setup.session.dir / BASE_OUTPUT
    if base.noted is None:
        return
    base.since = base.noted.setdefault("since", start_step)
    if NOT_RECORDED in base.noted:
        why = base.noted[NOT_RECORDED]
        setup.session.say(f"warning: the result of this run will not pass its verification: {why}")
    elif base.since and base.since == start_step:
        setup.session.say(
            f"guard: the first start of this run has no record of its base's output; it is compared with today's, "
            f"and what the base was before step {base.since} is not known"
        )
    if setup.session.is_main:
        write_whole(file, json.dumps(base.noted, indent=2) + "\n")


def base_fault(setup: AnySetup, base: BaseOutput) -> str | None:
    """Return what is wrong with the base at the run's end, against its start; None if nothing is. Collective.

    The model's own code is compared with itself, on every rank, with adapters off and no weight as trained.
    """
    if base.noted is None:
        return None
    if NOT_RECORDED in base.noted:
        return f"not recorded at the run's start: {base.noted[NOT_RECORDED]}"
    now = _now(setup, base, base.noted["inputs"])
    if NOT_RECORDED in now:
        # An output that cannot be had counts as infinitely far.
        now = {**base.noted, "norm": math.nan}
    limit = tolerance(base.noted, setup.transformer, setup.dtype)
    rank = setup.session.accelerator.process_index
    distances = gather_object([(distance(now, base.noted), -rank, socket.gethostname())])
    # The furthest rank; of several, the lowest.
    away, worst, host = max(distances)
    if away <= limit:
        return None
    where = f" on rank {-worst} ({host})" if setup.session.accelerator.num_processes > 1 else ""
    is_away = f"{percent(away)} from then" if math.isfinite(away) else "not finite"
    start = "the run's start" if not base.since else f"step {base.since}, where its record begins"
    words = (
        f"the base is not what it was at {start}: with adapters and kernels off its output{where} is {is_away} "
        f"(up to {percent(limit)} is rounding)"
    )
    # Before memory is blamed: a backend that mends the output when it is off acquits the weights.
    backend = _backend_at_fault(setup, base, limit)
    if backend is not None:
        return f"{words}; with {backend} off it is as it was: that attention backend went wrong in the run"
    if worst == 0 and _is_whole(setup, base, limit):
        cause = "the stock model with the same weights is as it was: a hook or another forward changes the run's"
    else:
        cause = "its frozen weights or buffers have changed in memory"
    return f"{words}: {cause}, and {_TRAINED_ON_IT}"


def kernel_fault(setup: AnySetup, base: BaseOutput, noted: Mapping[str, Any]) -> str | None:
    """Return which kernels move the trained model's output off its own code's; None if none does. For the run's end.

    `noted` is the output of the model's own code. The limit is twice the sum of the distance at the start, the parity
    limit for the part that the adapter changes, and rounding. Collective where a forward pass is.
    """
    # A kernel errs in proportion to what it computes, and the adapter's part grew since the start.
    effect = min(1.0, distance(noted, noted["base"])) if "base" in noted else 1.0
    allowed = LATER * (base.kernels + KERNEL * effect)
    apart, _ = _kernels_apart(setup, noted["inputs"], allowed, expected=noted)
    if not apart:
        return None
    which = ", ".join(f"{switch.name} ({_amount(away)})" for switch, away in apart.items())
    off = " ".join(_off(switch) for switch in apart)
    return (
        f"kernels went wrong in the run: with them the model's output is not what its own code makes of the same "
        f"weights: {which}, and {percent(base.kernels)} at the start. From some step on the adapter was trained "
        f"with that; go on from an earlier checkpoint (train.resume=PATH in another run.dir) with {off}"
    )


def check_kernels(setup: AnySetup, base: BaseOutput, switched_off: list[str]) -> list[Event]:
    """Switch off on all ranks the kernels that the run's end would refuse, and return the events. Collective.

    Names are added to `switched_off`. The same inputs and the same scale as at the end: what passes here fails there
    only if it changes. Raises `DitLoraError` on every rank if the recipe insists on one of them.
    """
    noted, accelerator = base.noted, setup.session.accelerator
    if noted is not None and NOT_RECORDED in noted:
        return []
    inputs = noted["inputs"] if noted else made_up_inputs(setup)
    apart, base.kernels = _kernels_apart(setup, inputs, KERNEL)
    worst: dict[str, float] = {}
    for name, away in gather_object([(switch.name, away) for switch, away in apart.items()]):
        worst[name] = max(away, worst.get(name, 0.0))
    events = []
    for switch in model_switches(setup.transformer):
        if switch.name not in worst:
            continue
        words = (
            f"kernel {switch.name}: with it the model's output is "
            f"{_amount(worst[switch.name])} from its own code's"
        )
        agree(accelerator, DitLoraError(refusal(switch, words)) if switch.insisted else None)
        switch.turn_off()
        switched_off.append(switch.name)
        events.append(
            kernel_event(0, "preflight", f"{words}; switched off for this run", switch.name)
        )
    if events:
        choose_checkpointing(setup)  # without the kernel, more is kept for backward
        _, base.kernels = _kernels_apart(setup, inputs, KERNEL)
    return events


def _first_record(folder: Path, resume_from: Path | None) -> dict[str, Any] | None:
    """Return the record of the run's first start, or of the run whose checkpoint it goes on from, or None."""
    if resume_from is None:
        return None
    # The second is where a run goes on in a folder of its own from another's checkpoint.
    for file in (folder / BASE_OUTPUT, resume_from.absolute().parents[1] / BASE_OUTPUT):
        try:
            record = read_typed(file, dict[str, Any])
        except (OSError, ValueError):
            continue
        if "values" in record:
            return record
    return None


def _now(setup: AnySetup, base: BaseOutput, inputs: Inputs) -> dict[str, Any]:
    """Return the base's output in this moment, as `output_now` gives it, or why there is none."""
    model, dtype = setup.transformer, setup.dtype
    try:
        with without_kernels(model), _as_loaded(model, base.loaded):
            noted = output_now(setup.task.stock(setup.checkpoint), model, inputs, dtype)
    except torch.OutOfMemoryError:
        return {NOT_RECORDED: "a forward pass of the base does not fit the memory of its device"}
    if is_finite(noted):
        return noted
    return {
        NOT_RECORDED: "the base's output of made-up inputs is not finite, with every kernel off"
    }


def made_up_inputs(setup: AnySetup) -> Inputs:
    """Return the recipe of the made-up inputs for the run's model, by which its output is noted."""
    # Ranks that share a sample's tokens can do so with the sizes that the run has.
    whole = setup.recipe.train.context_parallel > 1
    return setup.task.stock(setup.checkpoint).inputs(setup.data.clips, whole=whole)


@contextmanager
def _as_loaded(model: nn.Module, loaded: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Turn every adapter off within, and put base weights that train back to the values that they were loaded with."""
    live = {n: local(p.detach()) for n, p in model.named_parameters() if n in loaded}
    trained = {name: tensor.clone() for name, tensor in live.items()}
    try:
        for name, tensor in live.items():
            tensor.copy_(loaded[name])
        with adapters_off(model):
            yield
    finally:
        for name, tensor in live.items():
            tensor.copy_(trained[name])


def _unlike(
    setup: AnySetup, noted: Mapping[str, Any], own: Mapping[str, Any], *, resumed: bool
) -> DitLoraError | None:
    """Return the error if this rank's base is not the one that was noted, else None."""
    if NOT_RECORDED in noted or NOT_RECORDED in own:
        return None
    limit = tolerance(noted, setup.transformer, setup.dtype)
    away = distance(own, noted)
    if away <= limit:
        return None
    where = f"rank {setup.session.accelerator.process_index} ({socket.gethostname()})"
    measured = f"{percent(away)} away, where up to {percent(limit)} is rounding"
    if not resumed:
        return DitLoraError(
            f"{where} has another base than rank 0: its output of the same inputs is {measured}; "
            "its files or its memory are damaged: compare the checkpoint's files on both, or leave that machine out"
        )
    return DitLoraError(
        f"the base is not what it was at this run's first start: its output of the same inputs ({BASE_OUTPUT}) is "
        f"{measured}, on {where}; restore its files and the packages' versions (environment.json), "
        "take another machine, "
        "or start afresh with train.resume=none in another run.dir"
    )


def _backend_at_fault(setup: AnySetup, base: BaseOutput, limit: float) -> str | None:
    """Return the attention backend without which the base's output is as it was, on all ranks, or None."""
    assert base.noted is not None
    for switch in attention_switches():
        with switch.off():
            now = _now(setup, base, base.noted["inputs"])
        as_it_was = NOT_RECORDED not in now and distance(now, base.noted) <= limit
        if all(gather_object([as_it_was])):
            return switch.name
    return None


@torch.no_grad()
def _is_whole(setup: AnySetup, base: BaseOutput, limit: float) -> bool:
    """Return true if a fresh stock model with this run's weights gives the start's output; main process only."""
    live, dtype, noted = setup.transformer, setup.dtype, base.noted
    if not setup.session.is_main or setup.engine.lockstep or why_apart(live) is not None:
        return False
    assert noted is not None
    stock = setup.task.stock(setup.checkpoint)
    # The same tensors without the run's hooks: if their output is right, the weights are.
    fresh = sharing_weights(stock.without_values(dtype), live, dtype, trained=False)
    parameters = dict(fresh.named_parameters())
    for name, values in base.loaded.items():
        parameters[name.replace(".base_layer.", ".")].copy_(values)
    return distance(output_now(stock, fresh, noted["inputs"], dtype), noted) <= limit


@torch.no_grad()
def _kernels_apart(
    setup: AnySetup, inputs: Inputs, allowed: float, expected: Mapping[str, Any] | None = None
) -> tuple[dict[Switch, float], float]:
    """Return the kernels that alone move the output off the model's own code's, beyond that and rounding.

    `expected` is the output of its own code, where that is known. Of several that are wrong only together, one stands
    for all. The second value is how far all are together.
    """
    model, dtype = setup.transformer, setup.dtype
    kernels, stock = kernels_of(model), setup.task.stock(setup.checkpoint)
    if not kernels:
        return {}, 0.0
    if expected is None:
        with without_kernels(model):
            expected = output_now(stock, model, inputs, dtype)
    limit = tolerance(expected, model, dtype) + allowed
    # What has a rounding of its own is judged by that, and the others without it.
    coarse = [switch for switch in kernels if switch.error]

    def away() -> float:
        measured = [distance(output_now(stock, model, inputs, dtype), expected)]
        if setup.engine.lockstep:  # one answer for all ranks, so that none goes on alone
            broadcast_object_list(measured)
        return measured[0]

    if not is_finite(expected):
        return {}, 0.0  # there is nothing to compare with
    with ExitStack() as off:
        for switch in coarse:
            off.enter_context(switch.off())
        together = away()
        distances = _alone_apart(model, limit, away) if together > limit else {}
    if together > limit and not distances:
        distances = {next(one for one in kernels if one not in coarse): together}
    for switch in coarse:
        own = switch.error * math.sqrt(max(1, expected["blocks"]))
        if (found := away()) > limit + own:
            distances[switch] = found
    return distances, together


def _alone_apart(model: nn.Module, limit: float, away: Callable[[], float]) -> dict[Switch, float]:
    """Return the kernels that move the output beyond the limit when each is on by itself, and how far."""
    parts = [one for one in model_switches(model) if one.name != COMPILE]
    wholes = {one.part_of for one in parts}
    distances: dict[Switch, float] = {}
    for switch in parts:
        if switch.name in wholes or switch.error:
            continue
        with without_kernels(model, but=switch):
            alone = away()
        if alone > limit:
            distances[switch] = alone
    return distances


def _amount(away: float) -> str:
    return percent(away) if math.isfinite(away) else "not finite"


def _off(switch: Switch) -> str:
    """Return the recipe's value that leaves a kernel out."""
    if switch.cause == "attention_backend":
        return "kernels.attention=auto"
    return "all of kernels off" if switch.name == KERNELS else f"kernels.{switch.name}=off"
