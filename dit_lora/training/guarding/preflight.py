"""Checks a run before its first step, on its own model, shapes and samples; warns of what is wrong or refuses it."""

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

# Enough to find one healthy micro-batch among data with some bad samples.
_TRIES = 3  # micro-batches


def preflight(setup: AnySetup, recovery: RunRecovery, parity: ParityWatch) -> list[Event]:
    """Check a run before its first step, and return the events of what was switched off. Collective.

    Raises `DitLoraError` on every rank, listing everything, if the run would end in NaN or train nothing.
    What depends on files and versions alone is remembered in the cache's folder.
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
    micro_batch, seen, error = None, _Seen(setup.transformer), None
    try:
        # A compiled block shows no modules, so that no hook could say which of them is at fault.
        with eager(setup.transformer):
            if not any(f.fatal for f in findings):  # or its first forward may fail at that
                with timing("gradients"):
                    micro_batch, of_flow, seen = _first_healthy(setup, recovery.quarantine, parity)
                    findings += of_flow
            if micro_batch is not None:
                with timing("attention"):
                    findings += _remembered(setup, micro_batch, seen)
    except torch.OutOfMemoryError:
        # The largest bucket is tried now, so that it does not end the run at whichever step it first comes.
        error = _too_large(setup)
    fatal = [f"{f.check}: {f.words}" for f in findings if not f.ok and f.fatal]
    if fatal:
        error = DitLoraError(listed("the run would not train; guard.preflight found", fatal))
    # Every rank comes here, whatever it met above: one that raised alone would leave the others waiting.
    agree(setup.session.accelerator, error)
    # First: the stock model that kernels are compared with calls these backends.
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
    """Return this rank's findings; in lockstep, a finding that is bad on any rank is bad on all."""
    if not setup.engine.lockstep:
        return own
    failed = {f.check: f for f in gather_object([f for f in own if not f.ok])}
    return [failed.get(finding.check, finding) for finding in own]


def _tokens(setup: AnySetup) -> list[CheckFinding]:
    """Check that the model has an embedding for every token: on a GPU the lack is an assert that ends the process."""
    problems = setup.data.clips.token_problems(setup.transformer)
    if problems is None:
        return []
    words = listed("these are not", problems) if problems else "every one is"
    return [CheckFinding("tokens are embedded", not problems, words, fatal=bool(problems))]


class _Seen:
    """The outputs' peaks and the attention calls of a model's forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._monitor = Monitor(model, every=1)
        self.calls: Counter[AttentionCall] = Counter()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note them within; what was noted before is dropped."""
        with self._monitor.watching(), recorded_calls() as self.calls:
            yield

    def peak(self) -> float:
        """Return the largest magnitude of any module's output; once, as the notes are dropped."""
        statistics = self._monitor.collect().values()
        return max(values["abs_max"] for values in statistics if "abs_max" in values)


def _first_healthy(
    setup: AnySetup, quarantine: Quarantine, parity: ParityWatch
) -> tuple[MicroBatch | None, list[CheckFinding], _Seen]:
    """Return the first healthy micro-batch, else the first, with the findings of its passes; None if all data is bad.

    A sample that is at fault is for the guard to leave out, not a reason to refuse the run. No more samples
    than training takes at once: a check must not need more memory than a step.
    """
    choices = [_good_samples(setup, quarantine)]
    # All ranks try the same: one that read a torn file would go another way.
    if setup.engine.lockstep:
        broadcast_object_list(choices)
    first: tuple[MicroBatch | None, list[CheckFinding], _Seen]
    first = (None, [], _Seen(setup.transformer))
    for samples in choices[0]:
        one, seen = micro_batch_of(setup, collate(samples)), _Seen(setup.transformer)
        with noting_inputs(setup.transformer) as learning, noting_calls(setup.transformer) as calls:
            findings = _flow(setup, one, seen)
        if first[0] is None:
            first = one, findings, seen
            parity.learning, parity.calls = learning, calls
        # Most often the first is healthy, and the others are never run.
        healthy = all(f.ok for f in findings if f.check == FINITE_GRADIENTS)
        if setup.engine.lockstep:
            healthy = all(gather_object([healthy]))
        if healthy:
            parity.learning, parity.calls = learning, calls
            return one, findings, seen
    return first


def _good_samples(setup: AnySetup, quarantine: Quarantine) -> list[list[Batch]]:
    """Return a few micro-batches of samples whose data is good and not left out, each drawn by itself.

    They are of the largest shape: what does not fit the memory fails here, and not at the step where that
    bucket first comes. A bucket with fewer samples than a micro-batch gives some of them with other draws.
    """
    size, entries = setup.recipe.train.batch_size, kept_entries(setup, quarantine)
    for shape in sorted({entry.shape for entry in entries}, key=attrgetter("volume"), reverse=True):
        samples = samples_of(setup, [e for e in entries if e.shape == shape], _TRIES * size)
        if samples:
            return [samples[first : first + size] for first in range(0, len(samples), size)]
    return []


def _too_large(setup: AnySetup) -> DitLoraError:
    (shape, _), size = setup.data.clips.largest, setup.recipe.train.batch_size
    return DitLoraError(
        f"a batch of {size} samples of the largest shape, {shape}, does not fit the memory of "
        f"{setup.session.accelerator.device}; lower train.batch_size, or the shape (data.frames, data.height, "
        "data.width, data.buckets), or set train.checkpointing=full"
    )


def _flow(setup: AnySetup, micro_batch: MicroBatch, seen: _Seen) -> list[CheckFinding]:
    """Check that gradients reach what they should, under the policy's autocast: one pass for each kind of sample.

    `seen` notes the micro-batch's forward pass, which other checks need too.
    """
    dtype = setup.dtype
    policy = dtype if dtype is torch.bfloat16 else None
    findings: list[CheckFinding] = []

    clips = setup.data.clips
    # Each kind trains parts that others do not reach: text uses no vision encoder.
    others = [micro_batch_of(setup, clips.sample(one, 0)) for one in clips.one_of_each_kind()]

    def backward() -> None:
        # Dropout draws from torch's generators, which a check must leave as it found them.
        with torch.random.fork_rng(cuda_devices(setup.transformer)):
            with seen.noting():
                loss = micro_batch.forward().losses.mean()
            loss.backward()
            for one in others:
                one.forward().losses.mean().backward()

    def checked() -> None:
        findings.extend(gradient_flow(setup.transformer, backward))

    return [*autocast_owner(setup.transformer, checked, policy), *findings]


def _remembered(setup: AnySetup, micro_batch: MicroBatch, seen: _Seen) -> list[CheckFinding]:
    """Return the findings that depend on versions, device, model files, shapes and dtype alone; often from a file."""
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
    """Judge the peaks of outputs, and attention at this model's own shapes and masks."""
    precision = stored_precision(
        stored_dtype(setup.task.stock(setup.checkpoint).weight_files()),
        setup.dtype,
        seen.peak(),
        saturates=is_emulated(setup.transformer),
    )
    backends, _ = attention_backends(seen.calls, setup.session.accelerator.device)
    return [*precision, *backends]


def _switch_off(recovery: RunRecovery, backends: list[str]) -> list[Event]:
    """Switch off on all ranks the backends that are wrong on any; `guard.on_nonfinite` is not asked. Collective."""
    switches = {switch.name: switch for switch in recovery.suspects.switches}
    events = []
    for backend in sorted(set(gather_object(backends))):
        name = f"attention:{backend}"
        if name not in switches:
            continue  # off already, or the last resort
        turn_off(recovery, switches[name])
        words = f"{name} differs from fp64 at this model's own calls; switched off for this run"
        events.append(kernel_event(0, "preflight", words, name, cause="attention_backend"))
    return events


def _kernels(setup: AnySetup, recovery: RunRecovery, parity: ParityWatch) -> list[Event]:
    """Switch off on all ranks the kernels that differ from the stock model, or from themselves, on any rank.

    Raises on every rank if one that the recipe insists on differs. What no comparison reaches is off too, unless the
    recipe insists.
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
    memory.keep(sound=bool(parity.switches) and not events and not parity.coverage.missed)
    return events


def _one_of_each_kind(setup: AnySetup, parity: ParityWatch) -> set[str]:
    """Return the blocks that stand for all, on every rank those that stand for any on one. Collective."""
    own = one_of_each_kind(setup.transformer, parity.blocks, parity.calls, parity.places)
    every: list[list[str]] = gather_object([own])
    return {name for names in every for name in names}


def _compared(
    setup: AnySetup, recovery: RunRecovery, parity: ParityWatch, batches: Sequence[MicroBatch]
) -> list[Event]:
    """Compare the kernels on these micro-batches, and switch off what differs or cannot be compared."""
    start, events = parity.start_step, list[Event]()
    # A generator: a kernel is off before the next is compared, or two wrong ones would hide each other.
    for switch, difference, rank in parity.differing(batches):
        refused = DitLoraError(refusal(switch, difference.words)) if switch.insisted else None
        agree(setup.session.accelerator, refused)
        turn_off(recovery, switch)
        words = f"{difference.words}; switched off for this run{parity.trained_with(start)}"
        module = difference.module
        events.append(
            kernel_event(start, "preflight", words, switch.name, module=module, rank=rank)
        )
    for switch, why in parity.not_compared():
        words = f"kernel {switch.name} was not compared with its reference: {why}"
        if not switch.insisted:
            turn_off(recovery, switch)
        done = "on, as it was asked for by name" if switch.insisted else "switched off for this run"
        action = "report" if switch.insisted else "fallback"
        words = f"{words}; {done}"
        events.append(kernel_event(start, "preflight", words, switch.name, action=action))
    if events:
        choose_checkpointing(setup)  # without the kernel, more is kept for backward
    missed = parity.coverage.missed
    if missed and not events:
        reason = next(iter(missed.values()))
        setup.session.say(f"guard: kernels were compared but in {len(missed)} blocks: {reason}")
    return events
