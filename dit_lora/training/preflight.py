"""The checks before a run's first step, on its own model, shapes and samples; what is wrong is said or refused."""

import time
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from dit_lora.data.loader import Batch, collate
from dit_lora.errors import DitLoraError, listed
from dit_lora.fuse.check import refusal
from dit_lora.numerics.attention import recorded_calls
from dit_lora.numerics.block_parity import noting_inputs
from dit_lora.numerics.monitor import Monitor
from dit_lora.numerics.preflight import (
    Finding,
    attention_backends,
    autocast_owner,
    cached,
    check_base_weights,
    check_trainables,
    gradient_flow,
    is_cached,
    stored_dtype,
    stored_precision,
    wrong_backends,
)
from dit_lora.numerics.replay import MicroBatch, cuda_devices
from dit_lora.numerics.replay import run as replay
from dit_lora.numerics.saturation import is_emulated
from dit_lora.numerics.switches import attention_switches, eager
from dit_lora.training.chat.training_set import ChatSet
from dit_lora.training.kernel_parity import (
    event_of,
    kept_entries,
    make_batches,
    micro_batch_of,
    samples_of,
    turn_off,
)
from dit_lora.training.memory import choose_checkpointing
from dit_lora.training.parity_watch import trained_with
from dit_lora.training.runtime import agree

if TYPE_CHECKING:
    from dit_lora.training.run import Run


_TRIES = 3  # micro-batches


def preflight(run: "Run") -> list[dict[str, Any]]:
    """Check a run before its first step; returns the events of what was switched off. Collective.

    Raises `DitLoraError` on every rank, listing everything, if the run would end in NaN or train nothing.
    What depends on files and versions alone is remembered in the cache's folder.
    """
    began = time.perf_counter()
    findings = _together(
        run,
        [
            *check_trainables(run.transformer),
            *check_base_weights(run.transformer),
            *_tokens(run),
        ],
    )
    micro_batch, error = None, None
    try:
        with eager(run.transformer):
            if not any(f.fatal for f in findings):  # or its first forward may fail at that
                micro_batch = _first_samples(run)
            if micro_batch is not None:
                with noting_inputs(run.transformer) as run.parity.learning:
                    findings += _flow(run, micro_batch)
                findings += _remembered(run, micro_batch)
    except torch.OutOfMemoryError:
        error = _too_large(run)
    fatal = [f"{f.check}: {f.words}" for f in findings if not f.ok and f.fatal]
    if fatal:
        error = DitLoraError(listed("the run would not train; guard.preflight found", fatal))
    agree(run.runtime.accelerator, error)
    events = _switch_off(run, wrong_backends(findings))
    events += _kernels(run)
    for finding in findings:
        if not finding.ok:
            run.runtime.say(f"warning: {finding.check}: {finding.words}")
    seconds = time.perf_counter() - began
    run.runtime.say(f"guard: {len(findings)} checks before the first step, {seconds:.1f} s")
    return events


def _together(run: "Run", own: list[Finding]) -> list[Finding]:
    """This rank's findings; where all ranks go through a model together, what is wrong on any of them."""
    if not run.engine.lockstep:
        return own
    wrong = {f.check: f for f in gather_object([f for f in own if not f.ok])}
    return [wrong.get(finding.check, finding) for finding in own]


def _tokens(run: "Run") -> list[Finding]:
    """No conversation has a token that the model has no embedding of: on a GPU, an assert that ends the process."""
    clips, model = run.data.clips, run.transformer
    if not isinstance(clips, ChatSet):
        return []
    embedded = model.get_input_embeddings().num_embeddings  # type: ignore[operator, union-attr]
    vocabulary = clips.checkpoint.tokenizer.get_vocab()
    beyond = {token: name for name, token in vocabulary.items() if token >= embedded}
    held = []
    for entry in clips.entries if beyond else ():
        pieces = clips.render(entry, None)[0].pieces
        ids = {token for piece in pieces if piece.part != "media" for token in piece.ids}
        held += [f"{entry.id}: {beyond[token]!r} is token {token}" for token in ids & beyond.keys()]
    check, words = "tokens are embedded", f"the model has embeddings of tokens 0..{embedded - 1}"
    if held:
        return [Finding(check, False, listed(f"{words}, and no others", held), fatal=True)]
    return [Finding(check, True, words, fatal=False)]


def _first_samples(run: "Run") -> MicroBatch | None:
    """Samples that train: the first micro-batch that is healthy, else the first; None if all data is bad.

    A sample that is at fault is for the guard to leave out, not a reason to refuse the run. No more samples
    than training takes at once: a check must not need more memory than a step.
    """
    given = [_good_samples(run)]
    if (
        run.engine.lockstep
    ):  # all ranks try the same: one that read a torn file would go another way
        broadcast_object_list(given)
    tried = [micro_batch_of(run, collate(samples)) for samples in given[0]]
    healthy = (one for one in tried if replay(one, run.transformer).finite)
    return next(healthy, None) or next(iter(tried), None)


def _good_samples(run: "Run") -> list[list[Batch]]:
    """A few micro-batches of samples whose data is good and that the run does not leave out, each drawn by itself.

    They are of the largest shape: what does not fit the memory fails here, and not at the step where that
    bucket first comes. A bucket with fewer samples than a micro-batch gives some of them with other draws.
    """
    size, kept = run.recipe.train.batch_size, kept_entries(run)
    for shape in sorted({entry.shape for entry in kept}, key=attrgetter("volume"), reverse=True):
        samples = samples_of(run, [e for e in kept if e.shape == shape], _TRIES * size)
        if samples:
            return [samples[first : first + size] for first in range(0, len(samples), size)]
    return []


def _too_large(run: "Run") -> DitLoraError:
    (shape, _), size = run.data.clips.largest, run.recipe.train.batch_size
    return DitLoraError(
        f"a batch of {size} samples of the largest shape, {shape}, does not fit the memory of "
        f"{run.runtime.accelerator.device}; lower train.batch_size, or the shape (data.frames, data.height, "
        "data.width, data.buckets), or set train.checkpointing=full"
    )


def _flow(run: "Run", micro_batch: MicroBatch) -> list[Finding]:
    """Gradients reach what they should, under the policy's autocast: a forward and backward of each kind of sample."""
    dtype = run.runtime.precision.dtype
    policy = dtype if dtype is torch.bfloat16 else None
    findings: list[Finding] = []

    clips = run.data.clips
    others = [micro_batch_of(run, clips.sample(one, 0)) for one in clips.one_of_each_kind()]

    def backward() -> None:
        with torch.random.fork_rng(cuda_devices(run.transformer)):
            for one in (micro_batch, *others):
                one.forward().losses.mean().backward()

    def checked() -> None:
        findings.extend(gradient_flow(run.transformer, backward))

    return [*autocast_owner(run.transformer, checked, policy), *findings]


def _remembered(run: "Run", micro_batch: MicroBatch) -> list[Finding]:
    """What depends on versions, device, model files, shapes and dtype alone."""
    path = run.recipe.cache_dir / f"preflight_{run.runtime.accelerator.process_index}.json"
    facts = _facts(run, micro_batch)
    known = not run.engine.lockstep or all(gather_object([is_cached(path, facts)]))
    return _together(run, cached(path, facts, lambda: _probed(run, micro_batch), trust=known))


def _facts(run: "Run", micro_batch: MicroBatch) -> Mapping[str, Any]:
    device = run.runtime.accelerator.device
    on_gpu = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "transformer": run.data.transformer_digest,
        "dtype": str(run.runtime.precision.dtype),
        "saturates": is_emulated(run.transformer),
        "shapes": {name: list(tensor.shape) for name, tensor in micro_batch.tensors.items()},
        "backends": [switch.name for switch in attention_switches()],
    }


def _probed(run: "Run", micro_batch: MicroBatch) -> list[Finding]:
    monitor = Monitor(run.transformer, every=1)
    with torch.no_grad(), monitor.watching(), recorded_calls() as calls:
        micro_batch.forward()
    peaks = [values["abs_max"] for values in monitor.collect().values() if "abs_max" in values]
    precision = stored_precision(
        stored_dtype(run.task.weight_files(run.checkpoint)),
        run.runtime.precision.dtype,
        max(peaks),
        saturates=is_emulated(run.transformer),
    )
    backends, _ = attention_backends(calls, run.runtime.accelerator.device)
    return [*precision, *backends]


def _switch_off(run: "Run", backends: list[str]) -> list[dict[str, Any]]:
    """Backends that are wrong on any rank are off on all for the run; `guard.on_nonfinite` is not asked."""
    known = {switch.name: switch for switch in run.guard.suspects.switches}
    events = []
    for backend in sorted(set(gather_object(backends))):
        name = f"attention:{backend}"
        if name not in known:
            continue  # off already, or the last resort
        known[name].turn_off()
        run.guard.state.switched_off.append(name)
        words = f"{name} differs from fp64 at this model's own calls; switched off for this run"
        event = event_of(0, "preflight", words, name, "", "fallback")
        event["verdict"]["cause"] = "attention_backend"
        events.append(event)
    return events


def _kernels(run: "Run") -> list[dict[str, Any]]:
    """Kernels that differ from the stock model, or from themselves, on any rank are off on all.

    Raises on every rank if one that the recipe insists on differs. What no comparison reaches is off too, unless the
    recipe insists.
    """
    parity, events = run.parity, []
    for switch, difference, rank in parity.differing(make_batches(run)):
        refused = DitLoraError(refusal(switch, difference.words)) if switch.insisted else None
        agree(run.runtime.accelerator, refused)
        turn_off(run, switch)
        words = f"{difference.words}; switched off for this run{trained_with(run)}"
        place = switch.name, difference.module
        events.append(event_of(run.start_step, "preflight", words, *place, "fallback", rank))
    for switch, why in parity.not_compared():
        words = f"kernel {switch.name} was not compared with its reference: {why}"
        if not switch.insisted:
            turn_off(run, switch)
        done = "on, as it was asked for by name" if switch.insisted else "switched off for this run"
        action = "report" if switch.insisted else "fallback"
        words = f"{words}; {done}"
        events.append(event_of(run.start_step, "preflight", words, switch.name, "", action))
    if events:
        choose_checkpointing(run)  # without the kernel, more is kept for backward
    missed = parity.coverage.missed
    if missed and not events:
        reason = next(iter(missed.values()))
        run.runtime.say(f"guard: kernels were compared but in {len(missed)} blocks: {reason}")
    return events
