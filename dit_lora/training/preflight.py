"""The checks before a run's first step, on its own model, shapes and samples; what is wrong is said or refused."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import cycle, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from dit_lora.data.loader import Batch, collate
from dit_lora.errors import DitLoraError, listed
from dit_lora.fuse.check import refusal
from dit_lora.numerics.attention import recorded_calls
from dit_lora.numerics.monitor import Monitor
from dit_lora.numerics.parity import Difference, differences, first_difference
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
from dit_lora.numerics.switches import COMPILE, Switch, attention_switches, eager
from dit_lora.training.chat.training_set import ChatSet
from dit_lora.training.checkpointing import least_memory_mode
from dit_lora.training.memory import choose_checkpointing
from dit_lora.training.replay import Place, replayable, sample_losses
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
                findings += _flow(run, micro_batch)
                findings += _remembered(run, micro_batch)
    except torch.OutOfMemoryError:
        error = _too_large(run)
    fatal = [f"{f.check}: {f.words}" for f in findings if not f.ok and f.fatal]
    if fatal:
        error = DitLoraError(listed("the run would not train; guard.preflight found", fatal))
    agree(run.runtime.accelerator, error)
    events = _switch_off(run, wrong_backends(findings))
    if micro_batch is not None:
        events += _kernels(run, micro_batch)
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
    tried = [_micro_batch(run, samples) for samples in given[0]]
    healthy = (one for one in tried if replay(one, run.transformer).finite)
    return next(healthy, None) or next(iter(tried), None)


def _good_samples(run: "Run") -> list[list[Batch]]:
    """A few micro-batches of samples whose data is good and that the run does not leave out.

    They are of the largest shape: what does not fit the memory fails here, and not at the step where that
    bucket first comes. A bucket with fewer samples than a micro-batch gives some of them twice.
    """
    clips, size = run.data.clips, run.recipe.train.batch_size
    left_out = {one.sample_id for one in run.guard.quarantine.records}
    for shape in sorted(
        {entry.shape for entry in clips.entries}, key=attrgetter("volume"), reverse=True
    ):
        samples: list[Batch] = []
        for entry in clips.entries:
            if entry.shape != shape or entry.id in left_out:
                continue
            sample = clips.sample(entry, len(samples))
            if not sample.faults:
                samples.append(sample)
            if len(samples) == _TRIES * size:
                break
        if samples:
            filled = list(islice(cycle(samples), max(len(samples), size)))
            return [filled[first : first + size] for first in range(0, len(filled), size)]
    return []


def _too_large(run: "Run") -> DitLoraError:
    (shape, _), size = run.data.clips.largest, run.recipe.train.batch_size
    return DitLoraError(
        f"a batch of {size} samples of the largest shape, {shape}, does not fit the memory of "
        f"{run.runtime.accelerator.device}; lower train.batch_size, or the shape (data.frames, data.height, "
        "data.width, data.buckets), or set train.checkpointing=full"
    )


def _micro_batch(run: "Run", samples: Sequence[Batch]) -> MicroBatch:
    batch = collate(samples).to(run.runtime.accelerator.device)
    rank = 0 if run.engine.lockstep else run.runtime.accelerator.process_index
    place = Place(run.recipe.train.seed, 0, 0, rank)
    return replayable(sample_losses(run.checkpoint), run.transformer.train(), batch, place)


def _flow(run: "Run", micro_batch: MicroBatch) -> list[Finding]:
    """Gradients reach what they should, under the policy's autocast: a forward and backward of each kind of sample."""
    dtype = run.runtime.precision.dtype
    policy = dtype if dtype is torch.bfloat16 else None
    findings: list[Finding] = []

    clips = run.data.clips
    others = [_micro_batch(run, [clips.sample(one, 0)]) for one in clips.one_of_each_kind()]

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
        events.append(_event("attention_backend", words, name, ""))
    return events


def _kernels(run: "Run", micro_batch: MicroBatch) -> list[dict[str, Any]]:
    """Kernels that differ from the stock model on two real samples, on any rank, are off on all.

    Raises on every rank if one that the recipe insists on differs.
    """

    def losses() -> torch.Tensor:
        return micro_batch.forward().losses

    def compare(switch: Switch) -> Difference | None:
        # The stock model may need more memory than the run has chosen its checkpointing for. Of a compiled one, each
        # kernel's two ways would be compiled anew: they are compared without.
        apart = nullcontext() if switch.name == COMPILE else eager(run.transformer)
        with least_memory_mode(run.transformer), apart:
            own = first_difference(switch, losses, run.transformer)
        found: list[Difference | None] = gather_object([own])
        return next((one for one in found if one is not None), None)

    kernels = [s for s in run.guard.suspects.switches if s.cause == "kernel" or s.insisted]
    events = []
    for switch, difference in differences(kernels, compare):
        refused = DitLoraError(refusal(switch, difference.words)) if switch.insisted else None
        agree(run.runtime.accelerator, refused)
        switch.turn_off()
        run.guard.state.switched_off.append(switch.name)
        words = f"{difference.words}; switched off for this run"
        events.append(_event("kernel", words, switch.name, difference.module))
    if events:
        choose_checkpointing(run)  # without the kernel, more is kept for backward
    return events


def _event(cause: str, words: str, switch: str, module: str) -> dict[str, Any]:
    return {
        "step": 0,
        "micro_step": None,
        "rank": 0,
        "kind": "preflight",
        "sample_ids": [],
        "verdict": {"cause": cause, "words": words, "switch": switch, "module": module},
        "action": "fallback",
        "seconds": 0.0,
    }
