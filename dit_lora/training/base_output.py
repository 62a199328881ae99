"""Records the base model's output before the first step, and compares it on resume and at the end of the run.

At the end of a run, the frozen weights in memory are those that the run trained on, but not always those it loaded. So
as soon as the model is loaded, its output on synthetic inputs (`output_record`) is computed with the model's own code
and written to base_output.json. A resumed run compares its base with the record of the first start.
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
    """The base model's output on synthetic inputs at the run's first start."""

    noted: dict[str, Any] | None
    """The result of `output_now`, or the reason why it could not be computed. None if every weight trains: there is no
    base.
    """
    loaded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """CPU copies of the base weights that train, with the values they were loaded with; this rank's shard if
    sharded.
    """
    since: int = 0
    """Step at which the output was recorded: not 0 for runs that were started before this record existed."""
    begins_alone: bool = False
    """True if only an adapter trains and it has no effect before step 1: the base can then be validated after that
    step.
    """
    kernels: float = 0.0
    """Distance between the outputs with the active kernels and with the model's own code, when this process
    started.
    """


def note_base(setup: AnySetup, resume_from: Path | None) -> BaseOutput:
    """Record the base model's output before a checkpoint is loaded into the model; a resumed run reads its first
    record.

    Collective. Raises `DitLoraError` on every rank if one rank's base differs from rank 0's, or from the first
    start's.
    """
    model, main = setup.transformer, setup.session.is_main
    if all(parameter.requires_grad for parameter in model.parameters()):
        return BaseOutput(None)
    # At the end, base weights that train are not a base: the record needs their values at loading.
    trainable_base = [
        (n, p) for n, p in model.named_parameters() if p.requires_grad and not is_adapter(n)
    ]
    loaded = {name: local(p.detach()).to("cpu", copy=True) for name, p in trainable_base}
    # Only the main process reads the run's folder; every rank then gets the same record.
    record = _first_record(setup.session.dir, resume_from) if main else None
    (first_record,) = broadcast_object_list([record])
    # Collective, and before a checkpoint is loaded: a resumed adapter has an effect already.
    base = BaseOutput(None, loaded, begins_alone=does_nothing(model))
    # Every rank computes it: a rank with a damaged file is found here, before it spoils the others' gradients.
    today = _now(setup, base, first_record["inputs"] if first_record else made_up_inputs(setup))
    # Every rank takes the main process's record.
    (reference_output,) = broadcast_object_list([first_record or today])
    base.noted = reference_output
    # Ranks compare with the same record, and all raise if one of them differs.
    agree(
        setup.session.accelerator,
        _unlike(setup, reference_output, today, resumed=first_record is not None),
    )
    return base


def keep_base(setup: AnySetup, base: BaseOutput, start_step: int) -> None:
    """Write the record to the opened run folder if it is new, and warn about what it cannot check."""
    file = setup.session.dir / BASE_OUTPUT
    if base.noted is None:
        return
    # A new record gets the present step; an old one keeps the step that it was made at.
    base.since = base.noted.setdefault("since", start_step)
    if NOT_RECORDED in base.noted:
        reason = base.noted[NOT_RECORDED]
        setup.session.say(
            f"warning: the result of this run will not pass its verification: {reason}"
        )
    elif base.since and base.since == start_step:
        setup.session.say(
            f"guard: the first start of this run has no record of its base's output; it is compared with today's, "
            f"and what the base was before step {base.since} is not known"
        )
    if setup.session.is_main:
        write_whole(file, json.dumps(base.noted, indent=2) + "\n")


def base_fault(setup: AnySetup, base: BaseOutput) -> str | None:
    """Compare the base at the end of the run with its record from the start. A message, or None if they match.
    Collective.

    Every rank runs the model's own code, without kernels or adapters, and with trained base weights at their loaded
    values.
    """
    if base.noted is None:
        return None
    if NOT_RECORDED in base.noted:
        return f"not recorded at the run's start: {base.noted[NOT_RECORDED]}"
    current = _now(setup, base, base.noted["inputs"])
    if NOT_RECORDED in current:
        # An output that cannot be computed counts as infinitely far.
        current = {**base.noted, "norm": math.nan}
    limit = tolerance(base.noted, setup.transformer, setup.dtype)
    rank = setup.session.accelerator.process_index
    distances = gather_object([(distance(current, base.noted), -rank, socket.gethostname())])
    # The furthest rank; of several, the lowest.
    max_deviation, worst, host = max(distances)
    if max_deviation <= limit:
        return None
    # The host is named only if there are several ranks.
    location = f" on rank {-worst} ({host})" if setup.session.accelerator.num_processes > 1 else ""
    deviation_text = (
        f"{percent(max_deviation)} from then" if math.isfinite(max_deviation) else "not finite"
    )
    start = "the run's start" if not base.since else f"step {base.since}, where its record begins"
    message = (
        f"the base is not what it was at {start}: with adapters and kernels off its output{location} is "
        f"{deviation_text} (up to {percent(limit)} is rounding)"
    )
    # Before memory is named as the cause: if switching a backend off restores the output, the weights are right.
    backend = _backend_at_fault(setup, base, limit)
    if backend is not None:
        return f"{message}; with {backend} off it is as it was: that attention backend went wrong in the run"
    # Only the main process builds an unpatched model, so the test works only if its rank is the worst one.
    if worst == 0 and _is_whole(setup, base, limit):
        cause = "the stock model with the same weights is as it was: a hook or another forward changes the run's"
    else:
        cause = "its frozen weights or buffers have changed in memory"
    return f"{message}: {cause}, and {_TRAINED_ON_IT}"


def kernel_fault(setup: AnySetup, base: BaseOutput, noted: Mapping[str, Any]) -> str | None:
    """Message naming the kernels that change the trained model's output at the end of the run; None if none does.

    `noted` is the output of the model's own code. The limit is twice the sum of the distance at the start and the
    parity limit for the adapter's part of the output, plus rounding. Collective if a forward pass is.
    """
    # A kernel errs in proportion to what it computes, and the adapter's part grew since the start.
    effect = min(1.0, distance(noted, noted["base"])) if "base" in noted else 1.0
    allowed = LATER * (base.kernels + KERNEL * effect)
    differing_kernels, _ = _kernels_apart(setup, noted["inputs"], allowed, expected=noted)
    if not differing_kernels:
        return None
    kernel_names = ", ".join(
        f"{switch.name} ({_amount(deviation)})" for switch, deviation in differing_kernels.items()
    )
    off_settings = " ".join(_off(switch) for switch in differing_kernels)
    return (
        f"kernels went wrong in the run: with them the model's output is not what its own code makes of the same "
        f"weights: {kernel_names}, and {percent(base.kernels)} at the start. From some step on the adapter was "
        f"trained with that; go on from an earlier checkpoint (train.resume=PATH in another run.dir) with "
        f"{off_settings}"
    )


def check_kernels(setup: AnySetup, base: BaseOutput, switched_off: list[str]) -> list[Event]:
    """Switch off on all ranks the kernels that the check at the run's end would refuse; returns the events.
    Collective.

    Names are added to `switched_off`. Inputs and scale are those of the check at the end, so a kernel that passes here
    fails there only if it changes. Raises `DitLoraError` on every rank if the recipe requires one of these kernels.
    """
    record, accelerator = base.noted, setup.session.accelerator
    if record is not None and NOT_RECORDED in record:
        return []
    inputs = record["inputs"] if record else made_up_inputs(setup)
    differing_kernels, base.kernels = _kernels_apart(setup, inputs, KERNEL)
    worst: dict[str, float] = {}
    for name, deviation in gather_object(
        [(switch.name, deviation) for switch, deviation in differing_kernels.items()]
    ):
        # The largest distance over all ranks, so that every rank takes the same decision.
        worst[name] = max(deviation, worst.get(name, 0.0))
    events = []
    for switch in model_switches(setup.transformer):
        if switch.name not in worst:
            continue
        message = (
            f"kernel {switch.name}: with it the model's output is "
            f"{_amount(worst[switch.name])} from its own code's"
        )
        # Collective: the switches have the same order on all ranks, and `worst` is equal.
        agree(accelerator, DitLoraError(refusal(switch, message)) if switch.insisted else None)
        switch.turn_off()
        switched_off.append(switch.name)
        events.append(
            kernel_event(0, "preflight", f"{message}; switched off for this run", switch.name)
        )
    if events:
        # Without the kernel, more is kept for backward.
        choose_checkpointing(setup)
        # Measured again without these kernels: `kernel_fault` compares with this distance at the end.
        _, base.kernels = _kernels_apart(setup, inputs, KERNEL)
    return events


def _first_record(folder: Path, resume_from: Path | None) -> dict[str, Any] | None:
    """Read the record of the run's first start, or of the run that wrote the checkpoint; None if neither has one."""
    if resume_from is None:
        return None
    # The second is where a run goes on in a folder of its own from another's checkpoint.
    for file in (folder / BASE_OUTPUT, resume_from.absolute().parents[1] / BASE_OUTPUT):
        try:
            record = read_typed(file, dict[str, Any])
        # A missing or damaged file counts as no record.
        except (OSError, ValueError):
            continue
        # A record of a failed measurement has only a reason, and nothing to compare with.
        if "values" in record:
            return record
    return None


def _now(setup: AnySetup, base: BaseOutput, inputs: Inputs) -> dict[str, Any]:
    """Compute the base's present output with `output_now`, or give the reason why that is impossible."""
    model, dtype = setup.transformer, setup.dtype
    try:
        with without_kernels(model), _as_loaded(model, base.loaded):
            output = output_now(setup.task.stock(setup.checkpoint), model, inputs, dtype)
    except torch.OutOfMemoryError:
        return {NOT_RECORDED: "a forward pass of the base does not fit the memory of its device"}
    # JSON has no NaN, and nothing could be compared with it.
    if is_finite(output):
        return output
    return {
        NOT_RECORDED: "the base's output of made-up inputs is not finite, with every kernel off"
    }


def made_up_inputs(setup: AnySetup) -> Inputs:
    """Description of the synthetic inputs on which this run's model is compared."""
    # Ranks that share a sample's tokens can do so with the sizes that the run has.
    needs_full_size = setup.recipe.train.context_parallel > 1
    return setup.task.stock(setup.checkpoint).inputs(setup.data.clips, whole=needs_full_size)


@contextmanager
def _as_loaded(model: nn.Module, loaded: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Disable all adapters inside the context, and set trained base weights back to the values they were loaded
    with.
    """
    live = {n: local(p.detach()) for n, p in model.named_parameters() if n in loaded}
    # The trained values are kept on the device and restored, bit for bit, at the end.
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
    """The error to raise if this rank's base differs from the recorded output; None if it matches."""
    # One of the two outputs could not be computed: there is nothing to compare.
    if NOT_RECORDED in noted or NOT_RECORDED in own:
        return None
    limit = tolerance(noted, setup.transformer, setup.dtype)
    deviation = distance(own, noted)
    if deviation <= limit:
        return None
    location = f"rank {setup.session.accelerator.process_index} ({socket.gethostname()})"
    measured = f"{percent(deviation)} away, where up to {percent(limit)} is rounding"
    if not resumed:
        return DitLoraError(
            f"{location} has another base than rank 0: its output of the same inputs is {measured}; "
            "its files or its memory are damaged: compare the checkpoint's files on both, or leave that machine out"
        )
    return DitLoraError(
        f"the base is not what it was at this run's first start: its output of the same inputs ({BASE_OUTPUT}) is "
        f"{measured}, on {location}; restore its files and the packages' versions (environment.json), "
        "take another machine, "
        "or start afresh with train.resume=none in another run.dir"
    )


def _backend_at_fault(setup: AnySetup, base: BaseOutput, limit: float) -> str | None:
    """Name of the attention backend that, switched off, restores the base's output on all ranks; None if none does."""
    assert base.noted is not None
    # Every rank tests the same backends in the same order, because the gather below is collective.
    for switch in attention_switches():
        with switch.off():
            current = _now(setup, base, base.noted["inputs"])
        is_restored = NOT_RECORDED not in current and distance(current, base.noted) <= limit
        if all(gather_object([is_restored])):
            return switch.name
    return None


@torch.no_grad()
def _is_whole(setup: AnySetup, base: BaseOutput, limit: float) -> bool:
    """True if an unpatched model with this run's weights gives the output from the start. False except on the main
    process.
    """
    live, dtype, record = setup.transformer, setup.dtype, base.noted
    if not setup.session.is_main or setup.engine.lockstep or why_apart(live) is not None:
        return False
    assert record is not None
    reference_model = setup.task.stock(setup.checkpoint)
    # The same tensors without the run's hooks: if their output is right, the weights are.
    fresh = sharing_weights(reference_model.without_values(dtype), live, dtype, trained=False)
    parameters = dict(fresh.named_parameters())
    for name, values in base.loaded.items():
        # PEFT moves a wrapped layer's weights to `base_layer`; an unpatched model has no such level.
        parameters[name.replace(".base_layer.", ".")].copy_(values)
    return distance(output_now(reference_model, fresh, record["inputs"], dtype), record) <= limit


@torch.no_grad()
def _kernels_apart(
    setup: AnySetup, inputs: Inputs, allowed: float, expected: Mapping[str, Any] | None = None
) -> tuple[dict[Switch, float], float]:
    """Find the kernels that change the output by more than `allowed` and rounding, each enabled by itself.

    `expected` is the output of the model's own code; it is computed if None. If several kernels are wrong only in
    combination, the first stands for all. The second result is the distance with all kernels together.
    """
    model, dtype = setup.transformer, setup.dtype
    kernels, reference_model = kernels_of(model), setup.task.stock(setup.checkpoint)
    if not kernels:
        return {}, 0.0
    if expected is None:
        with without_kernels(model):
            expected = output_now(reference_model, model, inputs, dtype)
    limit = tolerance(expected, model, dtype) + allowed
    # Kernels with their own rounding error have a larger limit: measure them one by one, and the rest without them.
    coarse = [switch for switch in kernels if switch.error]

    def away() -> float:
        measured = [distance(output_now(reference_model, model, inputs, dtype), expected)]
        # One answer for all ranks, so that all take the same branch.
        if setup.engine.lockstep:
            broadcast_object_list(measured)
        return measured[0]

    if not is_finite(expected):
        return {}, 0.0  # there is nothing to compare with
    with ExitStack() as kernels_off:
        for switch in coarse:
            kernels_off.enter_context(switch.off())
        joint_distance = away()
        distances = _alone_apart(model, limit, away) if joint_distance > limit else {}
    if joint_distance > limit and not distances:
        # Wrong only in combination: no kernel exceeds the limit by itself, and the first stands for all.
        distances = {next(kernel for kernel in kernels if kernel not in coarse): joint_distance}
    for switch in coarse:
        # Independent errors of the blocks add up with the root of their number.
        rounding = switch.error * math.sqrt(max(1, expected["blocks"]))
        if (distance_with_it := away()) > limit + rounding:
            distances[switch] = distance_with_it
    return distances, joint_distance


def _alone_apart(model: nn.Module, limit: float, away: Callable[[], float]) -> dict[Switch, float]:
    """Measure each kernel with all others off; returns those that exceed the limit, with their distance."""
    # torch.compile is not one of the kernels.
    parts = [part for part in model_switches(model) if part.name != COMPILE]
    # A switch that has parts is tested through them.
    wholes = {part.part_of for part in parts}
    distances: dict[Switch, float] = {}
    for switch in parts:
        if switch.name in wholes or switch.error:
            continue
        with without_kernels(model, but=switch):
            distance_by_itself = away()
        if distance_by_itself > limit:
            distances[switch] = distance_by_itself
    return distances


def _amount(away: float) -> str:
    return percent(away) if math.isfinite(away) else "not finite"


def _off(switch: Switch) -> str:
    """The recipe setting that switches this kernel off."""
    if switch.cause == "attention_backend":
        return "kernels.attention=auto"
    return "all of kernels off" if switch.name == KERNELS else f"kernels.{switch.name}=off"
