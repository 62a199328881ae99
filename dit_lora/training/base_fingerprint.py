"""Fingerprints the base: records its output before the first step, and compares it on resume and at the run's end.

At the end of a run, the frozen weights in memory are those that the run trained on, but not always those it loaded. So
as soon as the model is loaded, its output on synthetic inputs (`compute_model_output_fingerprint`) is computed with
the model's own code and written to base_output.json. A resumed run compares its base with the record of the first
start.
"""

import math
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit_lora.config.records import read_typed_json
from dit_lora.errors import DitLoraError
from dit_lora.files import write_json
from dit_lora.fuse.first_forward import format_required_error
from dit_lora.fuse.patches import KERNELS
from dit_lora.guard.diagnosis import Event, make_kernel_event
from dit_lora.guard.fallbacks import COMPILE, Fallback, list_attention_fallbacks, list_model_fallbacks
from dit_lora.numerics.adapter_tensors import is_adapter_tensor
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.ranks import broadcast_object, gather_object, is_true_on_all_ranks
from dit_lora.numerics.tolerances import END_OF_RUN_FACTOR, KERNEL_TOLERANCE
from dit_lora.training.choose_checkpointing import choose_checkpointing
from dit_lora.training.execution.base_alone import has_only_untrained_adapters
from dit_lora.training.session.session import Session, raise_on_all_ranks
from dit_lora.training.task import AnySetup
from dit_lora.verify.checks import format_percent
from dit_lora.verify.output_fingerprint import (
    NOT_RECORDED,
    compute_distance,
    compute_model_output_fingerprint,
    compute_tolerance,
    disable_adapters,
    disable_kernels,
    find_kernel_fallbacks,
    is_finite,
)
from dit_lora.verify.reference_model import InputSpec, find_sharing_obstacle, share_model_weights

BASE_OUTPUT = "base_output.json"


@dataclass
class BaseFingerprint:
    """Record of the base model's output on synthetic inputs, taken at the run's first start."""

    record: dict[str, Any] | None
    """The result of `compute_model_output_fingerprint`, or why it failed. None if every weight trains."""
    initial_weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """CPU copies of the trained base weights as they were loaded; this rank's shard if sharded."""
    recorded_at_step: int = 0
    """Step at which the output was recorded: not 0 for runs that were started before this record existed."""
    has_idle_adapter: bool = False
    """True if only an adapter trains, without effect before step 1: the base can be validated after that step."""
    kernel_distance: float = 0.0
    """Distance of the output with the active kernels from the model's own code's, when this process started."""
    initial_output: Mapping[str, Any] | None = None
    """Output of the loaded base, if the model still gives it before the first step; None if it has to be computed."""
    final_output: Mapping[str, Any] | None = None
    """Output at the run's end without adapters and kernels; None before, and if base weights train."""


def record_base_fingerprint(
    setup: AnySetup, resume_from: Path | None, *, has_finished: bool = False
) -> BaseFingerprint:
    """Record the base model's output before a checkpoint is loaded; a resumed run reads its first record. Collective.

    A run that has finished only reads it: nothing more is trained on this base. Raises `DitLoraError` on every rank if
    one rank's base differs from rank 0's, or from the first start's.
    """
    model = setup.transformer
    if all(parameter.requires_grad for parameter in model.parameters()):
        return BaseFingerprint(None)
    # At the end, base weights that train are not a base: the record needs their values at loading.
    trainable_base = [(n, p) for n, p in model.named_parameters() if p.requires_grad and not is_adapter_tensor(n)]
    loaded = {name: get_local_tensor(p.detach()).to("cpu", copy=True) for name, p in trainable_base}
    # Only the main process reads the run's folder; every rank then gets the same record.
    record = _read_first_record(setup.session.dir, resume_from) if setup.session.is_main else None
    first_record = broadcast_object(record)
    if has_finished:
        return BaseFingerprint(first_record)
    # Collective, and before a checkpoint is loaded: a resumed adapter has an effect already.
    base = BaseFingerprint(None, loaded, has_idle_adapter=has_only_untrained_adapters(model))
    # Every rank computes it: a rank with a damaged file is found here, before it spoils the others' gradients.
    today = _compute_base_output(setup, base, first_record["inputs"] if first_record else make_synthetic_inputs(setup))
    # Every rank compares with the main process's record, and all raise if one of them differs.
    reference_output = broadcast_object(first_record or today)
    base.record = reference_output
    error = _compare_with_record(setup, reference_output, today, is_resumed=first_record is not None)
    raise_on_all_ranks(setup.accelerator, error)
    # Frozen adapters below the trained one act in the model, and not in the base.
    is_base = resume_from is None and base.has_idle_adapter and not setup.recipe.lora.under
    if is_base and NOT_RECORDED not in today:
        base.initial_output = today
    return base


def write_base_fingerprint(session: Session, fingerprint: BaseFingerprint, start_step: int) -> None:
    """Write the base model's output, which `verify` compares later, to the run folder; warn if it is incomplete."""
    if fingerprint.record is None:
        return
    # A new record gets the present step; an old one keeps the step that it was made at.
    fingerprint.recorded_at_step = fingerprint.record.setdefault("since", start_step)
    if NOT_RECORDED in fingerprint.record:
        reason = fingerprint.record[NOT_RECORDED]
        session.say(f"warning: the result of this run will not pass its verification: {reason}")
    elif fingerprint.recorded_at_step and fingerprint.recorded_at_step == start_step:
        session.say(
            "guard: this run has no record of its base's output from its first start; the output at step "
            f"{fingerprint.recorded_at_step} is used instead, and earlier changes of the base cannot be found"
        )
    if session.is_main:
        write_json(session.dir / BASE_OUTPUT, fingerprint.record)


def find_changed_base_output(setup: AnySetup, fingerprint: BaseFingerprint) -> str | None:
    """Message if the base model's output differs from its record at the end of the run; None if they match.

    Collective.

    Every rank runs the model's own code without kernels or adapters, with trained base weights as they were loaded.
    """
    if fingerprint.record is None:
        return None
    if NOT_RECORDED in fingerprint.record:
        return f"not recorded at the run's start: {fingerprint.record[NOT_RECORDED]}"
    current = _compute_base_output(setup, fingerprint, fingerprint.record["inputs"])
    if not fingerprint.initial_weights and NOT_RECORDED not in current:
        fingerprint.final_output = current
    if NOT_RECORDED in current:
        # An output that cannot be computed counts as infinitely far.
        current = {**fingerprint.record, "norm": math.nan}
    limit = compute_tolerance(fingerprint.record, setup.transformer, setup.dtype)
    rank = setup.accelerator.process_index
    distances = gather_object([(compute_distance(current, fingerprint.record), -rank, socket.gethostname())])
    # The furthest rank; of several, the lowest.
    max_deviation, worst, host = max(distances)
    if max_deviation <= limit:
        return None
    location = f" on rank {-worst} ({host})" if setup.accelerator.num_processes > 1 else ""
    deviation_text = f"{format_percent(max_deviation)} from then" if math.isfinite(max_deviation) else "not finite"
    start = "the run's start"
    if fingerprint.recorded_at_step:
        start = f"step {fingerprint.recorded_at_step}, where its record begins"
    message = (
        f"the base is not what it was at {start}: with adapters and kernels off its output{location} is "
        f"{deviation_text} (up to {format_percent(limit)} is rounding)"
    )
    # Before memory is named as the cause: if switching a backend off restores the output, the weights are right.
    backend = _find_faulty_backend(setup, fingerprint, limit)
    if backend is not None:
        return f"{message}; with {backend} off it is unchanged: that attention backend became faulty during the run"
    # Only the main process builds an unpatched model, so the test works only if its rank is the worst one.
    if worst == 0 and _has_unchanged_base_weights(setup, fingerprint, limit):
        cause = (
            "the stock model with the same weights is unchanged: a hook or another forward changes the run's output"
        )
    else:
        cause = "its frozen weights or buffers have changed in memory"
    return (
        f"{message}: {cause}, and from some step on the adapter was trained on that; go on from an earlier checkpoint "
        "(train.resume=PATH in another run.dir)"
    )


def find_wrong_kernels(
    setup: AnySetup, fingerprint: BaseFingerprint, reference_output: Mapping[str, Any]
) -> str | None:
    """Message naming the kernels that change the trained model's output at the end of the run; None if none does.

    `reference_output` is the output of the model's own code. The limit is twice the sum of the distance at the start
    and the parity limit for the adapter's part of the output, plus rounding. Collective if a forward pass is.
    """
    # A kernel errs in proportion to what it computes, and the adapter's part grew since the start.
    effect = 1.0
    if "base" in reference_output:
        effect = min(1.0, compute_distance(reference_output, reference_output["base"]))
    allowed = END_OF_RUN_FACTOR * (fingerprint.kernel_distance + KERNEL_TOLERANCE * effect)
    inputs = reference_output["inputs"]
    differing_kernels, _ = _find_differing_kernels(setup, inputs, allowed, expected=reference_output)
    if not differing_kernels:
        return None
    kernel_names = ", ".join(f"{kernel.name} ({_format_distance(d)})" for kernel, d in differing_kernels.items())
    off_settings = " ".join(_format_disable_setting(switch) for switch in differing_kernels)
    return (
        f"kernels went wrong in the run: with them the model's output is not what its own code makes of the same "
        f"weights: {kernel_names}, and {format_percent(fingerprint.kernel_distance)} at the start. From some step on "
        "the adapter was trained with that; go on from an earlier checkpoint (train.resume=PATH in another run.dir) "
        f"with {off_settings}"
    )


def switch_off_faulty_kernels(setup: AnySetup, fingerprint: BaseFingerprint, disabled_names: list[str]) -> list[Event]:
    """Switch off the kernels that the check at the run's end would refuse; returns the guard events. Collective.

    Names are added to `disabled_names`. Inputs and scale are those of the check at the end, so a kernel that passes
    here fails there only if it changes. Raises `DitLoraError` on every rank if the recipe requires such a kernel.
    """
    record, accelerator = fingerprint.record, setup.accelerator
    if record is not None and NOT_RECORDED in record:
        return []
    inputs = record["inputs"] if record else make_synthetic_inputs(setup)
    # What preflight has switched off may change the model's own code too.
    expected = None if disabled_names else fingerprint.initial_output
    differing_kernels, fingerprint.kernel_distance = _find_differing_kernels(
        setup, inputs, KERNEL_TOLERANCE, expected=expected
    )
    if differing_kernels and expected is not None:
        # A hook that was added since then changes the output with and without kernels.
        expected = None
        differing_kernels, fingerprint.kernel_distance = _find_differing_kernels(setup, inputs, KERNEL_TOLERANCE)
    worst: dict[str, float] = {}
    for name, deviation in gather_object([(kernel.name, d) for kernel, d in differing_kernels.items()]):
        # The largest distance over all ranks, so that every rank takes the same decision.
        worst[name] = max(deviation, worst.get(name, 0.0))
    events = []
    for switch in list_model_fallbacks(setup.transformer):
        if switch.name not in worst:
            continue
        deviation = worst[switch.name]
        text = f"{format_percent(deviation)} from that of its own code" if math.isfinite(deviation) else "not finite"
        message = f"kernel {switch.name}: the model's output with it is {text}"
        # Collective: the switches have the same order on all ranks, and `worst` is equal.
        error = DitLoraError(format_required_error(switch, message)) if switch.required else None
        raise_on_all_ranks(accelerator, error)
        switch.disable()
        disabled_names.append(switch.name)
        events.append(make_kernel_event(0, "preflight", f"{message}; switched off for this run", switch.name))
    if events:
        # Without the kernel, more is kept for backward.
        choose_checkpointing(setup)
        # Measured again without these kernels: `find_wrong_kernels` compares with this distance at the end.
        _, fingerprint.kernel_distance = _find_differing_kernels(setup, inputs, KERNEL_TOLERANCE, expected=expected)
    return events


def _read_first_record(folder: Path, resume_from: Path | None) -> dict[str, Any] | None:
    """Read the base output recorded at the run's first start, or by the run that wrote the checkpoint.

    None if neither has one.
    """
    if resume_from is None:
        return None
    # The second is where a run goes on in a folder of its own from another's checkpoint.
    for file in (folder / BASE_OUTPUT, resume_from.absolute().parents[1] / BASE_OUTPUT):
        try:
            record = read_typed_json(file, dict[str, Any])
        # A missing or damaged file counts as no record.
        except (OSError, ValueError):
            continue
        # A record of a failed measurement has only a reason, and nothing to compare with.
        if "values" in record:
            return record
    return None


def _compute_base_output(setup: AnySetup, fingerprint: BaseFingerprint, inputs: InputSpec) -> dict[str, Any]:
    """The base model's present output record, or the reason why it cannot be computed."""
    model, dtype = setup.transformer, setup.dtype
    try:
        with disable_kernels(model), _restore_initial_base(model, fingerprint.initial_weights):
            output = compute_model_output_fingerprint(
                setup.task.build_reference_model(setup.checkpoint), model, inputs, dtype
            )
    except torch.OutOfMemoryError:
        return {NOT_RECORDED: "a forward pass of the base does not fit the memory of its device"}
    # JSON has no NaN, and nothing could be compared with it.
    if is_finite(output):
        return output
    return {NOT_RECORDED: "the base's output of made-up inputs is not finite, with every kernel off"}


def make_synthetic_inputs(setup: AnySetup) -> InputSpec:
    """Description of the synthetic inputs on which this run's model is compared."""
    # Ranks that share a sample's tokens can do so with the sizes that the run has.
    needs_full_size = setup.recipe.train.context_parallel > 1
    return setup.task.build_reference_model(setup.checkpoint).make_input_spec(
        setup.data.training_set, full_size=needs_full_size
    )


@contextmanager
def _restore_initial_base(model: nn.Module, initial_weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Disable all adapters inside the context, and set trained base weights back to their loaded values."""
    live = {n: get_local_tensor(p.detach()) for n, p in model.named_parameters() if n in initial_weights}
    # The trained values are kept on the device and restored, bit for bit, at the end.
    trained = {name: tensor.clone() for name, tensor in live.items()}
    try:
        for name, tensor in live.items():
            tensor.copy_(initial_weights[name])
        with disable_adapters(model):
            yield
    finally:
        for name, tensor in live.items():
            tensor.copy_(trained[name])


def _compare_with_record(
    setup: AnySetup, recorded: Mapping[str, Any], current: Mapping[str, Any], *, is_resumed: bool
) -> DitLoraError | None:
    """The error to raise if this rank's base output differs from the recorded one; None if it matches."""
    # One of the two outputs could not be computed: there is nothing to compare.
    if NOT_RECORDED in recorded or NOT_RECORDED in current:
        return None
    limit = compute_tolerance(recorded, setup.transformer, setup.dtype)
    deviation = compute_distance(current, recorded)
    if deviation <= limit:
        return None
    location = f"rank {setup.accelerator.process_index} ({socket.gethostname()})"
    measured = f"{format_percent(deviation)} away, where up to {format_percent(limit)} is rounding"
    if not is_resumed:
        return DitLoraError(
            f"{location} has another base than rank 0: its output of the same inputs is {measured}; "
            "its files or its memory are damaged: compare the checkpoint's files on both, or leave that machine out"
        )
    return DitLoraError(
        f"the base is not what it was at this run's first start: its output of the same inputs ({BASE_OUTPUT}) is "
        f"{measured}, on {location}; restore its files and the packages' versions (environment.json), take another "
        "machine, or start afresh with train.resume=none in another run.dir"
    )


def _find_faulty_backend(setup: AnySetup, fingerprint: BaseFingerprint, limit: float) -> str | None:
    """Name of the attention backend that, switched off, restores the base's output on all ranks; None if none does."""
    assert fingerprint.record is not None
    # Every rank tests the same backends in the same order, because the gather below is collective.
    for switch in list_attention_fallbacks():
        with switch.disable_temporarily():
            current = _compute_base_output(setup, fingerprint, fingerprint.record["inputs"])
        is_restored = NOT_RECORDED not in current and compute_distance(current, fingerprint.record) <= limit
        if is_true_on_all_ranks(is_restored):
            return switch.name
    return None


@torch.no_grad()
def _has_unchanged_base_weights(setup: AnySetup, fingerprint: BaseFingerprint, limit: float) -> bool:
    """True if an unpatched model with this run's weights gives the first output.

    Computed on the main process only; False elsewhere.
    """
    live, dtype, record = setup.transformer, setup.dtype, fingerprint.record
    if not setup.session.is_main or setup.engine.collective_forward or find_sharing_obstacle(live) is not None:
        return False
    assert record is not None
    reference_model = setup.task.build_reference_model(setup.checkpoint)
    # The same tensors without the run's hooks: if their output is right, the weights are.
    fresh = share_model_weights(reference_model.load_meta_model(dtype), live, dtype, share_trained=False)
    parameters = dict(fresh.named_parameters())
    for name, values in fingerprint.initial_weights.items():
        # PEFT moves a wrapped layer's weights to `base_layer`; an unpatched model has no such level.
        parameters[name.replace(".base_layer.", ".")].copy_(values)
    return (
        compute_distance(compute_model_output_fingerprint(reference_model, fresh, record["inputs"], dtype), record)
        <= limit
    )


@torch.no_grad()
def _find_differing_kernels(
    setup: AnySetup, inputs: InputSpec, max_distance: float, expected: Mapping[str, Any] | None = None
) -> tuple[dict[Fallback, float], float]:
    """Find the kernels that change the output by more than `max_distance` and rounding, each enabled by itself.

    `expected` is the output of the model's own code; it is computed if None. If several kernels are wrong only in
    combination, the first stands for all. The second result is the distance with all kernels together.
    """
    model, dtype = setup.transformer, setup.dtype
    kernels, reference_model = find_kernel_fallbacks(model), setup.task.build_reference_model(setup.checkpoint)
    if not kernels:
        return {}, 0.0
    if expected is None:
        with disable_kernels(model):
            expected = compute_model_output_fingerprint(reference_model, model, inputs, dtype)
    limit = compute_tolerance(expected, model, dtype) + max_distance
    # Kernels with their own rounding error have a larger limit: measure them one by one, and the rest without them.
    coarse = [switch for switch in kernels if switch.rounding_error]

    def measure_distance() -> float:
        measured = compute_distance(compute_model_output_fingerprint(reference_model, model, inputs, dtype), expected)
        # One answer for all ranks, so that all take the same branch.
        return broadcast_object(measured) if setup.engine.collective_forward else measured

    if not is_finite(expected):
        return {}, 0.0  # there is nothing to compare with
    with ExitStack() as kernels_off:
        for switch in coarse:
            kernels_off.enter_context(switch.disable_temporarily())
        joint_distance = measure_distance()
        distances = _measure_each_kernel(model, limit, measure_distance) if joint_distance > limit else {}
    if joint_distance > limit and not distances:
        # Wrong only in combination: no kernel exceeds the limit by itself, and the first stands for all.
        distances = {next(kernel for kernel in kernels if kernel not in coarse): joint_distance}
    for switch in coarse:
        # Independent errors of the blocks add up with the root of their number.
        rounding = switch.rounding_error * math.sqrt(max(1, expected["blocks"]))
        if (distance_with_it := measure_distance()) > limit + rounding:
            distances[switch] = distance_with_it
    return distances, joint_distance


def _measure_each_kernel(
    model: nn.Module, limit: float, measure_distance: Callable[[], float]
) -> dict[Fallback, float]:
    """Measure each kernel with all others off. Returns those that exceed the limit, with their relative distance."""
    # torch.compile is not one of the kernels.
    parts = [part for part in list_model_fallbacks(model) if part.name != COMPILE]
    # A switch that has parts is tested through them.
    wholes = {part.parent for part in parts}
    distances: dict[Fallback, float] = {}
    for switch in parts:
        if switch.name in wholes or switch.rounding_error:
            continue
        with disable_kernels(model, except_fallback=switch):
            distance_by_itself = measure_distance()
        if distance_by_itself > limit:
            distances[switch] = distance_by_itself
    return distances


def _format_distance(value: float) -> str:
    return format_percent(value) if math.isfinite(value) else "not finite"


def _format_disable_setting(fallback: Fallback) -> str:
    """Name of the recipe setting that switches this kernel off."""
    if fallback.cause == "attention_backend":
        return "kernels.attention=auto"
    return "all of kernels off" if fallback.name == KERNELS else f"kernels.{fallback.name}=off"
