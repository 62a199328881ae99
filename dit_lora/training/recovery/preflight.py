"""Checks a run before its first step, with its own model, shapes and samples; warns, or refuses to start."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from dit_lora.data.loading.batch import Batch, collate
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.errors import DitLoraError, format_list
from dit_lora.fuse.first_forward import format_required_error
from dit_lora.guard.attention_backends import AttentionCall, record_attention_calls
from dit_lora.guard.checks import (
    FINITE_GRADIENTS,
    CheckFinding,
    check_attention_backends,
    check_autocast,
    check_base_weights,
    check_gradient_flow,
    check_trainables,
    check_with_cache,
    find_wrong_backends,
)
from dit_lora.guard.comparison.block_kinds import record_block_inputs
from dit_lora.guard.comparison.block_parity import MIN_PASSES, record_grad_flags
from dit_lora.guard.diagnosis import Event, make_kernel_event
from dit_lora.guard.fallbacks import disable_compile, list_attention_fallbacks
from dit_lora.guard.monitor import Monitor
from dit_lora.guard.replay import MicroBatch, get_cuda_devices
from dit_lora.guard.stored_precision import check_stored_precision, read_stored_dtype
from dit_lora.numerics.ranks import broadcast_object, gather_object, is_true_on_all_ranks
from dit_lora.numerics.saturation import has_fp16_saturation
from dit_lora.training.check_cache import REMEASURE, REUSED, get_preflight_cache_path
from dit_lora.training.choose_checkpointing import choose_checkpointing
from dit_lora.training.recovery.kernel_parity import PeriodicKernelComparison
from dit_lora.training.recovery.parity_batches import (
    build_micro_batches,
    disable_for_run,
    make_micro_batch,
    read_good_samples,
    select_usable_entries,
)
from dit_lora.training.recovery.parity_cache import KernelComparisonCache
from dit_lora.training.recovery.run_recovery import RunRecovery
from dit_lora.training.session.session import raise_on_all_ranks
from dit_lora.training.task import AnySetup

# Enough to find a healthy micro-batch among data with a few bad samples.
_NUM_CANDIDATE_BATCHES = 3  # micro-batches


def preflight(setup: AnySetup, recovery: RunRecovery, parity_watch: PeriodicKernelComparison) -> list[Event]:
    """Check a run before its first step; returns events for everything it switched off. Collective.

    Raises `DitLoraError` on every rank, listing all problems, if the run would end in NaN or train nothing.
    """
    timing = setup.session.phases.time_phase
    with timing("weights"):
        findings = [*check_trainables(setup.transformer), *check_base_weights(setup.transformer)]
        token_problems = setup.data.training_set.find_token_problems(setup.transformer)
        if token_problems is not None:
            # A token without an embedding is, on a GPU, an assert that kills the process.
            message = format_list("these are not", token_problems) if token_problems else "every one is"
            is_fatal = bool(token_problems)
            findings.append(CheckFinding("tokens are embedded", not is_fatal, message, fatal=is_fatal))
        findings = _merge_findings(setup, findings)
    micro_batch, records, error = None, _ForwardRecorder(setup.transformer), None
    try:
        # Hooks do not run inside a compiled block, so they could not name the module at fault.
        with disable_compile(setup.transformer):
            # Fatal findings may make the first forward pass fail.
            if not any(f.fatal for f in findings):
                with timing("gradients"):
                    micro_batch, of_flow, records = _find_healthy_batch(setup, recovery.quarantine, parity_watch)
                    findings += of_flow
            if micro_batch is not None:
                with timing("attention"):
                    findings += _check_with_cache(setup, micro_batch, records)
    except torch.OutOfMemoryError:
        # The largest bucket is tried now, so that it does not end the run at a later step.
        (shape, _), size = setup.data.training_set.largest_shape, setup.recipe.train.batch_size
        error = DitLoraError(
            f"a batch of {size} samples of the largest shape, {shape}, does not fit the memory of "
            f"{setup.session.accelerator.device}; lower train.batch_size, or the shape (data.frames, data.height, "
            "data.width, data.buckets), or set train.checkpointing=full"
        )
    # All problems in one error, so that a user can fix them together.
    fatal = [f"{f.check}: {f.message}" for f in findings if not f.ok and f.fatal]
    if fatal:
        error = DitLoraError(format_list("the run cannot train; guard.preflight found", fatal))
    # Every rank gets here, whatever happened above: a rank that raised by itself would leave the others waiting.
    raise_on_all_ranks(setup.session.accelerator, error)
    # First: the unpatched model that kernels are compared with calls these backends.
    events = _switch_off_backends(recovery, find_wrong_backends(findings))
    with timing("kernels"):
        events += _check_kernels(setup, recovery, parity_watch)
    for finding in findings:
        if not finding.ok:
            setup.session.say(f"warning: {finding.check}: {finding.message}")
    return events


def _merge_findings(setup: AnySetup, findings: list[CheckFinding]) -> list[CheckFinding]:
    """This rank's preflight findings. If the forward has collectives, a check that fails on one rank fails on all."""
    if not setup.engine.collective_forward:
        return findings
    # By check: a rank that passed takes the finding of a rank that failed.
    failed = {f.check: f for f in gather_object([f for f in findings if not f.ok])}
    return [failed.get(finding.check, finding) for finding in findings]


class _ForwardRecorder:
    """Recorder of a forward pass: the magnitudes of module outputs, and the attention calls."""

    def __init__(self, model: nn.Module) -> None:
        self._monitor = Monitor(model, interval_steps=1)
        self.attention_calls: Counter[AttentionCall] = Counter()

    @contextmanager
    def record_forward(self) -> Iterator[None]:
        """Record module outputs and attention calls inside the context; earlier records are dropped."""
        with self._monitor.record_outputs(), record_attention_calls() as self.attention_calls:
            yield

    def pop_max_output_magnitude(self) -> float:
        """Largest magnitude of any module's output in a recorded forward pass.

        Callable once, because it clears the statistics.
        """
        statistics = self._monitor.collect_module_statistics().values()
        return max(values["abs_max"] for values in statistics if "abs_max" in values)


def _find_healthy_batch(
    setup: AnySetup, quarantine: Quarantine, parity_watch: PeriodicKernelComparison
) -> tuple[MicroBatch | None, list[CheckFinding], _ForwardRecorder]:
    """Find the first healthy micro-batch, and the findings of its passes.

    If none is healthy, the findings are those of the first one.

    The micro-batch is None if all data is bad: that is for the guard. Uses no more samples than a training step.
    """
    candidates = _read_candidate_batches(setup, quarantine)
    # All ranks try the same samples: one that read a torn file would diverge.
    if setup.engine.collective_forward:
        candidates = broadcast_object(candidates)
    first_result: tuple[MicroBatch | None, list[CheckFinding], _ForwardRecorder]
    first_result = (None, [], _ForwardRecorder(setup.transformer))
    for samples in candidates:
        micro_batch, records = make_micro_batch(setup, collate(samples)), _ForwardRecorder(setup.transformer)
        with record_grad_flags(setup.transformer) as learning, record_block_inputs(setup.transformer) as calls:
            findings = _check_gradients(setup, micro_batch, records)
        if first_result[0] is None:
            first_result = micro_batch, findings, records
            parity_watch.trained_inputs, parity_watch.block_calls = learning, calls
        # Usually the first is healthy, and the others are never run.
        healthy = all(f.ok for f in findings if f.check == FINITE_GRADIENTS)
        if setup.engine.collective_forward:
            healthy = is_true_on_all_ranks(healthy)
        if healthy:
            parity_watch.trained_inputs, parity_watch.block_calls = learning, calls
            return micro_batch, findings, records
    return first_result


def _read_candidate_batches(setup: AnySetup, quarantine: Quarantine) -> list[list[Batch]]:
    """A few micro-batches of good samples that are not left out, each sample with its own random seed.

    They have the largest shape, so that lack of memory shows here. A small bucket's samples repeat with other seeds.
    """
    size, entries = setup.recipe.train.batch_size, select_usable_entries(setup, quarantine)
    # A smaller shape is tried only if no sample of a larger one is good.
    for shape in sorted({entry.shape for entry in entries}, key=attrgetter("volume"), reverse=True):
        samples = read_good_samples(setup, [e for e in entries if e.shape == shape], _NUM_CANDIDATE_BATCHES * size)
        if samples:
            return [samples[start : start + size] for start in range(0, len(samples), size)]
    return []


def _check_gradients(setup: AnySetup, micro_batch: MicroBatch, recorder: _ForwardRecorder) -> list[CheckFinding]:
    """Check that gradients reach the trained parameters under autocast, with one pass per kind of sample.

    `recorder` records the micro-batch's forward pass for other checks.
    """
    # Only bf16 training runs under autocast.
    policy = setup.dtype if setup.dtype is torch.bfloat16 else None
    findings: list[CheckFinding] = []
    clips = setup.data.training_set
    # Each kind of sample trains parts that others do not reach: text does not use the vision encoder.
    other_kinds = [make_micro_batch(setup, clips.read_sample(entry, 0)) for entry in clips.select_example_entries()]

    def backward() -> None:
        # Dropout draws from torch's generators, whose state a check must restore.
        with torch.random.fork_rng(get_cuda_devices(setup.transformer)):
            with recorder.record_forward():
                loss = micro_batch.forward().losses.mean()
            loss.backward()
            for kind in other_kinds:
                kind.forward().losses.mean().backward()

    def check_flow() -> None:
        findings.extend(check_gradient_flow(setup.transformer, backward))

    return [*check_autocast(setup.transformer, check_flow, policy), *findings]


def _check_with_cache(setup: AnySetup, micro_batch: MicroBatch, recorder: _ForwardRecorder) -> list[CheckFinding]:
    """Preflight findings that depend only on versions, device, model files, shapes and dtype; cached in a file."""
    path, facts = get_preflight_cache_path(setup), _build_cache_key(setup, micro_batch)
    trusted = setup.recipe.guard.preflight != REMEASURE
    findings = check_with_cache(path, facts, lambda: _check_precision_and_backends(setup, recorder), use_cache=trusted)
    return _merge_findings(setup, findings)


def _build_cache_key(setup: AnySetup, micro_batch: MicroBatch) -> Mapping[str, Any]:
    device = setup.session.accelerator.device
    on_gpu = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "transformer": setup.data.transformer_digest,
        "dtype": str(setup.dtype),
        "saturates": has_fp16_saturation(setup.transformer),
        "shapes": {name: list(tensor.shape) for name, tensor in micro_batch.tensors.items()},
        "backends": [switch.name for switch in list_attention_fallbacks()],
    }


def _check_precision_and_backends(setup: AnySetup, recorder: _ForwardRecorder) -> list[CheckFinding]:
    precision = check_stored_precision(
        read_stored_dtype(setup.task.build_reference_model(setup.checkpoint).list_weight_files()),
        setup.dtype,
        recorder.pop_max_output_magnitude(),
        saturates=has_fp16_saturation(setup.transformer),
    )
    backends, _ = check_attention_backends(recorder.attention_calls, setup.session.accelerator.device)
    return [*precision, *backends]


def _switch_off_backends(recovery: RunRecovery, backends: list[str]) -> list[Event]:
    """Switch off on all ranks the attention backends that are wrong on any, under any `guard.on_nonfinite`."""
    switches = {switch.name: switch for switch in recovery.diagnosis_context.fallbacks}
    events = []
    for backend in sorted(set(gather_object(backends))):
        name = f"attention:{backend}"
        if name not in switches:
            # Already off, or the only backend left.
            continue
        disable_for_run(recovery, switches[name])
        message = f"{name} differs from fp64 at this model's own calls; switched off for this run"
        events.append(make_kernel_event(0, "preflight", message, name, cause="attention_backend"))
    return events


def _check_kernels(setup: AnySetup, recovery: RunRecovery, parity_watch: PeriodicKernelComparison) -> list[Event]:
    """Switch off on all ranks the kernels that differ from the unpatched model, or between runs, on any rank.

    Raises on every rank if the recipe requires one that differs. Kernels that no comparison reaches are switched off
    too, unless the recipe requires them.
    """
    batches = build_micro_batches(setup, recovery.quarantine)
    num_passes = parity_watch.choose_preflight_passes()
    memory = KernelComparisonCache(setup, recovery, parity_watch, batches, num_passes)
    if memory.has_passed_before:
        setup.session.phases.reductions["kernels at the start"] = REUSED
        return []
    if num_passes < MIN_PASSES:
        setup.session.phases.reductions["kernels at the start"] = (
            f"{num_passes} of {MIN_PASSES} repetitions; in full with guard.preflight={REMEASURE}"
        )
    parity_watch.selected_blocks = parity_watch.select_block_per_kind()
    events = _compare_kernels(setup, recovery, parity_watch, batches, num_passes)
    # Only a comparison that covered everything and found nothing may be skipped at the next start.
    memory.store_comparison_result(
        is_sound=bool(parity_watch.fallbacks) and not events and not parity_watch.coverage.skipped
    )
    return events


def _compare_kernels(
    setup: AnySetup,
    recovery: RunRecovery,
    parity_watch: PeriodicKernelComparison,
    batches: Sequence[MicroBatch],
    num_passes: int,
) -> list[Event]:
    """Compare the kernels with the unpatched model on these micro-batches.

    Those that differ or cannot be compared are switched off.
    """
    start, events = parity_watch.start_step, list[Event]()
    # A generator: each kernel is off before the next is compared, or two wrong ones would hide each other.
    for switch, difference, rank in parity_watch.iterate_differing_kernels(batches, num_passes):
        # A kernel that the recipe requires by name is not switched off silently: the run is refused.
        refused = DitLoraError(format_required_error(switch, difference.message)) if switch.required else None
        raise_on_all_ranks(setup.session.accelerator, refused)
        disable_for_run(recovery, switch)
        message = f"{difference.message}; switched off for this run{parity_watch.describe_affected_steps(start)}"
        module = difference.module
        events.append(make_kernel_event(start, "preflight", message, switch.name, module=module, rank=rank))
    for switch, cause_text in parity_watch.find_uncompared_kernels():
        state, action = "it stays on, because the recipe requires it by name", "report"
        if not switch.required:
            disable_for_run(recovery, switch)
            state, action = "switched off for this run", "fallback"
        message = f"kernel {switch.name} was not compared with its reference: {cause_text}; {state}"
        events.append(make_kernel_event(start, "preflight", message, switch.name, action=action))
    if events:
        # Without the kernel, more is kept for backward.
        choose_checkpointing(setup)
    missed = parity_watch.coverage.skipped
    if missed and not events:
        reason = next(iter(missed.values()))
        setup.session.say(f"guard: kernels were not compared in {len(missed)} blocks: {reason}")
    return events
