"""Checks a run before its first step, with its own model, shapes and samples; warns about problems or refuses to
start.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from dit_lora.data.loading.batch import Batch, collate
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.errors import DitLoraError, listed
from dit_lora.fuse.first_forward import refusal
from dit_lora.guard.attention_backends import AttentionCall, recorded_calls
from dit_lora.guard.checks import (
    FINITE_GRADIENTS,
    CheckFinding,
    attention_backends,
    autocast_owner,
    cached,
    check_base_weights,
    check_trainables,
    gradient_flow,
    wrong_backends,
)
from dit_lora.guard.comparison.block_kinds import noting_calls, one_of_each_kind
from dit_lora.guard.comparison.block_parity import noting_inputs
from dit_lora.guard.event import Event, kernel_event
from dit_lora.guard.monitor import Monitor
from dit_lora.guard.replay import MicroBatch, cuda_devices
from dit_lora.guard.stored_precision import stored_dtype, stored_precision
from dit_lora.guard.switches import attention_switches, eager
from dit_lora.numerics.saturation import is_emulated
from dit_lora.training.choose_checkpointing import choose_checkpointing
from dit_lora.training.guarding.compared_batches import (
    kept_entries,
    make_batches,
    micro_batch_of,
    samples_of,
    turn_off,
)
from dit_lora.training.guarding.parity_memory import ANEW, ParityMemory, memory_file
from dit_lora.training.guarding.parity_watch import ParityWatch
from dit_lora.training.guarding.recovery import RunRecovery
from dit_lora.training.session.session import agree
from dit_lora.training.task import AnySetup

# Enough to find a healthy micro-batch among data with a few bad samples.
_TRIES = 3  # micro-batches


def preflight(setup: AnySetup, recovery: RunRecovery, parity: ParityWatch) -> list[Event]:
    """Check a run before its first step; returns events for everything it switched off. Collective.

    Raises `DitLoraError` on every rank, listing all problems, if the run would end in NaN or train nothing. Results
    that depend only on files and versions are cached in the data cache.
    """
    began, timing = time.perf_counter(), setup.session.phases.timing
    with timing("weights"):
        findings = _together(
            setup,
            [
                *check_trainables(setup.transformer),
                *check_base_weights(setup.transformer),
                *_tokens(setup),
            ],
        )
    micro_batch, records, error = None, _Seen(setup.transformer), None
    try:
        # Hooks do not run inside a compiled block, so they could not name the module at fault.
        with eager(setup.transformer):
            # Fatal findings may make the first forward pass fail.
            if not any(f.fatal for f in findings):
                with timing("gradients"):
                    micro_batch, of_flow, records = _first_healthy(
                        setup, recovery.quarantine, parity
                    )
                    findings += of_flow
            if micro_batch is not None:
                with timing("attention"):
                    findings += _remembered(setup, micro_batch, records)
    except torch.OutOfMemoryError:
        # The largest bucket is tried now, so that it does not end the run at a later step.
        error = _too_large(setup)
    # All problems in one error, so that a user can fix them together.
    fatal = [f"{f.check}: {f.words}" for f in findings if not f.ok and f.fatal]
    if fatal:
        error = DitLoraError(listed("the run would not train; guard.preflight found", fatal))
    # Every rank gets here, whatever happened above: a rank that raised by itself would leave the others waiting.
    agree(setup.session.accelerator, error)
    # First: the unpatched model that kernels are compared with calls these backends.
    events = _switch_off(recovery, wrong_backends(findings))
    with timing("kernels"):
        events += _kernels(setup, recovery, parity)
    for finding in findings:
        if not finding.ok:
            setup.session.say(f"warning: {finding.check}: {finding.words}")
    seconds = time.perf_counter() - began
    setup.session.say(f"guard: {len(findings)} checks before the first step, {seconds:.1f} s")
    return events


def _together(setup: AnySetup, own: list[CheckFinding]) -> list[CheckFinding]:
    """This rank's findings; for collective forwards, a check that fails on any rank fails on all."""
    if not setup.engine.lockstep:
        return own
    # By check: a rank that passed takes the finding of a rank that failed.
    failed = {f.check: f for f in gather_object([f for f in own if not f.ok])}
    return [failed.get(finding.check, finding) for finding in own]


def _tokens(setup: AnySetup) -> list[CheckFinding]:
    """Check that the model has an embedding for every token: on a GPU a missing one is an assert that kills the
    process.
    """
    problems = setup.data.clips.token_problems(setup.transformer)
    if problems is None:
        return []
    message = listed("these are not", problems) if problems else "every one is"
    return [CheckFinding("tokens are embedded", not problems, message, fatal=bool(problems))]


class _Seen:
    """The module outputs' magnitudes and the attention calls of a model's forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._monitor = Monitor(model, every=1)
        self.calls: Counter[AttentionCall] = Counter()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record them inside the context; earlier records are dropped."""
        with self._monitor.watching(), recorded_calls() as self.calls:
            yield

    def peak(self) -> float:
        """Largest magnitude of any module's output. Callable once, because it clears the statistics."""
        statistics = self._monitor.collect().values()
        return max(values["abs_max"] for values in statistics if "abs_max" in values)


def _first_healthy(
    setup: AnySetup, quarantine: Quarantine, parity: ParityWatch
) -> tuple[MicroBatch | None, list[CheckFinding], _Seen]:
    """Find the first healthy micro-batch, and the findings of its passes; the first one if none is healthy.

    The micro-batch is None if all data is bad. A bad sample is for the guard to exclude, not a reason to refuse the
    run. Uses no more samples than a training step: a check must not need more memory.
    """
    choices = [_good_samples(setup, quarantine)]
    # All ranks try the same samples: one that read a torn file would diverge.
    if setup.engine.lockstep:
        broadcast_object_list(choices)
    first_result: tuple[MicroBatch | None, list[CheckFinding], _Seen]
    first_result = (None, [], _Seen(setup.transformer))
    for samples in choices[0]:
        micro_batch, records = micro_batch_of(setup, collate(samples)), _Seen(setup.transformer)
        with noting_inputs(setup.transformer) as learning, noting_calls(setup.transformer) as calls:
            findings = _flow(setup, micro_batch, records)
        if first_result[0] is None:
            first_result = micro_batch, findings, records
            parity.learning, parity.calls = learning, calls
        # Usually the first is healthy, and the others are never run.
        healthy = all(f.ok for f in findings if f.check == FINITE_GRADIENTS)
        if setup.engine.lockstep:
            healthy = all(gather_object([healthy]))
        if healthy:
            parity.learning, parity.calls = learning, calls
            return micro_batch, findings, records
    return first_result


def _good_samples(setup: AnySetup, quarantine: Quarantine) -> list[list[Batch]]:
    """A few micro-batches of good samples that are not excluded, each sample with its own random seed.

    They have the largest shape: whatever does not fit into memory fails here, and not at the step where that bucket
    first comes. If the bucket has too few samples, some are repeated with other seeds.
    """
    size, entries = setup.recipe.train.batch_size, kept_entries(setup, quarantine)
    # A smaller shape is tried only if no sample of a larger one is good.
    for shape in sorted({entry.shape for entry in entries}, key=attrgetter("volume"), reverse=True):
        samples = samples_of(setup, [e for e in entries if e.shape == shape], _TRIES * size)
        if samples:
            return [samples[start : start + size] for start in range(0, len(samples), size)]
    return []


def _too_large(setup: AnySetup) -> DitLoraError:
    (shape, _), size = setup.data.clips.largest, setup.recipe.train.batch_size
    return DitLoraError(
        f"a batch of {size} samples of the largest shape, {shape}, does not fit the memory of "
        f"{setup.session.accelerator.device}; lower train.batch_size, or the shape (data.frames, data.height, "
        "data.width, data.buckets), or set train.checkpointing=full"
    )


def _flow(setup: AnySetup, micro_batch: MicroBatch, seen: _Seen) -> list[CheckFinding]:
    """Check that gradients reach the trained parameters under the policy's autocast, with one pass per kind of sample.

    `seen` records the micro-batch's forward pass for other checks.
    """
    dtype = setup.dtype
    # Only bf16 training runs under autocast.
    policy = dtype if dtype is torch.bfloat16 else None
    findings: list[CheckFinding] = []

    clips = setup.data.clips
    # Each kind of sample trains parts that others do not reach: text does not use the vision encoder.
    other_kinds = [
        micro_batch_of(setup, clips.sample(entry, 0)) for entry in clips.one_of_each_kind()
    ]

    def backward() -> None:
        # Dropout draws from torch's generators, whose state a check must restore.
        with torch.random.fork_rng(cuda_devices(setup.transformer)):
            with seen.noting():
                loss = micro_batch.forward().losses.mean()
            loss.backward()
            for kind in other_kinds:
                kind.forward().losses.mean().backward()

    def checked() -> None:
        findings.extend(gradient_flow(setup.transformer, backward))

    return [*autocast_owner(setup.transformer, checked, policy), *findings]


def _remembered(setup: AnySetup, micro_batch: MicroBatch, seen: _Seen) -> list[CheckFinding]:
    """Findings that depend only on versions, device, model files, shapes and dtype; cached in a file."""
    path = memory_file(setup)
    facts = _facts(setup, micro_batch)
    trusted = setup.recipe.guard.preflight != ANEW
    return _together(setup, cached(path, facts, lambda: _judged(setup, seen), trust=trusted))


def _facts(setup: AnySetup, micro_batch: MicroBatch) -> Mapping[str, Any]:
    device = setup.session.accelerator.device
    on_gpu = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "transformer": setup.data.transformer_digest,
        "dtype": str(setup.dtype),
        "saturates": is_emulated(setup.transformer),
        "shapes": {name: list(tensor.shape) for name, tensor in micro_batch.tensors.items()},
        "backends": [switch.name for switch in attention_switches()],
    }


def _judged(setup: AnySetup, seen: _Seen) -> list[CheckFinding]:
    """Check the outputs' magnitudes, and attention with this model's shapes and masks."""
    precision = stored_precision(
        stored_dtype(setup.task.stock(setup.checkpoint).weight_files()),
        setup.dtype,
        seen.peak(),
        saturates=is_emulated(setup.transformer),
    )
    # The backends that this model would call, with its own shapes and masks.
    backends, _ = attention_backends(seen.calls, setup.session.accelerator.device)
    return [*precision, *backends]


def _switch_off(recovery: RunRecovery, backends: list[str]) -> list[Event]:
    """Switch off on all ranks the attention backends that are wrong on any, whatever `guard.on_nonfinite` is.
    Collective.
    """
    switches = {switch.name: switch for switch in recovery.suspects.switches}
    events = []
    for backend in sorted(set(gather_object(backends))):
        name = f"attention:{backend}"
        if name not in switches:
            # Already off, or the only backend left.
            continue
        turn_off(recovery, switches[name])
        message = f"{name} differs from fp64 at this model's own calls; switched off for this run"
        events.append(kernel_event(0, "preflight", message, name, cause="attention_backend"))
    return events


def _kernels(setup: AnySetup, recovery: RunRecovery, parity: ParityWatch) -> list[Event]:
    """Switch off on all ranks the kernels that differ from the unpatched model, or between runs, on any rank.

    Raises on every rank if the recipe requires one that differs. Kernels that no comparison reaches are switched off
    too, unless the recipe requires them.
    """
    batches = make_batches(setup, recovery.quarantine)
    memory = ParityMemory(setup, recovery, parity, batches)
    if memory.knows:
        setup.session.say(
            "guard: kernels were compared with the stock model before, for this model, device, versions and shapes; "
            f"guard.preflight={ANEW} compares them again"
        )
        return []
    parity.only = _one_of_each_kind(setup, parity)
    events = _compared(setup, recovery, parity, batches)
    # Only a comparison that covered everything and found nothing may be skipped at the next start.
    memory.keep(sound=bool(parity.switches) and not events and not parity.coverage.missed)
    return events


def _one_of_each_kind(setup: AnySetup, parity: ParityWatch) -> set[str]:
    """Blocks that represent all others: the union over all ranks. Collective."""
    local_names = one_of_each_kind(setup.transformer, parity.blocks, parity.calls, parity.places)
    names_by_rank: list[list[str]] = gather_object([local_names])
    return {name for names in names_by_rank for name in names}


def _compared(
    setup: AnySetup, recovery: RunRecovery, parity: ParityWatch, batches: Sequence[MicroBatch]
) -> list[Event]:
    """Compare the kernels on these micro-batches, and switch off those that differ or cannot be compared."""
    start, events = parity.start_step, list[Event]()
    # A generator: each kernel is off before the next is compared, or two wrong ones would hide each other.
    for switch, difference, rank in parity.differing(batches):
        # A kernel that the recipe requires by name is not switched off silently: the run is refused.
        refused = DitLoraError(refusal(switch, difference.words)) if switch.insisted else None
        agree(setup.session.accelerator, refused)
        turn_off(recovery, switch)
        message = f"{difference.words}; switched off for this run{parity.trained_with(start)}"
        module = difference.module
        events.append(
            kernel_event(start, "preflight", message, switch.name, module=module, rank=rank)
        )
    for switch, cause_text in parity.not_compared():
        message = f"kernel {switch.name} was not compared with its reference: {cause_text}"
        if not switch.insisted:
            turn_off(recovery, switch)
        state = (
            "on, as it was asked for by name" if switch.insisted else "switched off for this run"
        )
        action = "report" if switch.insisted else "fallback"
        message = f"{message}; {state}"
        events.append(kernel_event(start, "preflight", message, switch.name, action=action))
    if events:
        # Without the kernel, more is kept for backward.
        choose_checkpointing(setup)
    missed = parity.coverage.missed
    if missed and not events:
        reason = next(iter(missed.values()))
        setup.session.say(f"guard: kernels were compared but in {len(missed)} blocks: {reason}")
    return events
