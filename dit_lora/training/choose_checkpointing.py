"""Chooses the run's gradient checkpointing mode from the memory that is free for activations."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from dit_lora.config.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from dit_lora.data.cache.cache import Spec
from dit_lora.families.base import Tensors
from dit_lora.guard.checks import CheckFinding, read_cached_findings, store_findings
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.numerics.memory import get_available_bytes
from dit_lora.numerics.ranks import gather_object
from dit_lora.numerics.streams import RandomStreams
from dit_lora.parsing import parse_json
from dit_lora.training.check_cache import (
    REMEASURE,
    build_model_facts,
    describe_active_kernels,
    get_preflight_cache_path,
)
from dit_lora.training.execution.activation_checkpointing import (
    CHECKPOINTING_MODES,
    choose_least_memory_mode,
    require_checkpointing,
    set_checkpointing,
)
from dit_lora.training.execution.activations import (
    CheckpointingAdvice,
    PeakBytes,
    advise_checkpointing,
    measure_activations,
)
from dit_lora.training.replayable_batch import compute_training_losses
from dit_lora.training.task import AnySetup


def choose_checkpointing(setup: AnySetup, count_free: Callable[[AnySetup], int] | None = None) -> None:
    """Apply `train.checkpointing` to the run's model and log the mode. Collective; every rank takes the same mode.

    `auto` is decided for the present model: call this again after kernels were patched in or removed. The mode changes
    no value, so a resumed run may take another. `count_free` gives the bytes for activations, by default
    `count_free_bytes`. Raises `DitLoraError` if checkpointing is requested for a model that has none.
    """
    requested_mode = setup.recipe.train.effective_checkpointing
    require_checkpointing(setup.transformer, requested_mode)
    # `measure_activations` counts all modes from one pass without checkpointing.
    set_checkpointing(setup.transformer, "none")
    # One mode for all: the rank with the least free memory would be the first to fail.
    agreed = select_least_memory_advice(gather_object([_advise_for_this_rank(setup, count_free or count_free_bytes)]))
    set_checkpointing(setup.transformer, agreed.mode)
    if agreed.mode != "none" or not (agreed.fits and agreed.is_counted):
        setup.session.say(f"checkpointing: {agreed.message}")
    if not agreed.fits:
        setup.session.say(
            "warning: activations may not fit; lower train.batch_size or the shape of the data"
            + ("" if requested_mode == "auto" else ", or set train.checkpointing=auto")
        )


def select_least_memory_advice(candidates: Sequence[CheckpointingAdvice]) -> CheckpointingAdvice:
    """The activation checkpointing advice that all ranks follow: the mode that saves the most memory.

    The first of several.
    """
    return max(candidates, key=lambda advice: (CHECKPOINTING_MODES.index(advice.mode), not advice.fits))


def _advise_for_this_rank(setup: AnySetup, count_free: Callable[[AnySetup], int]) -> CheckpointingAdvice:
    """This rank's activation checkpointing advice, from activations counted on fake tensors."""
    requested_mode, size = setup.recipe.train.effective_checkpointing, setup.recipe.train.batch_size
    _, spec = setup.data.training_set.largest_shape
    # Shapes of the largest bucket, with a batch dimension in front.
    batch = {name: (torch.Size([size, *shape]), dtype) for name, (shape, dtype) in spec.items()}
    integers = {name: t.expand(size, *t.shape) for name, t in setup.data.training_set.integer_inputs().items()}
    setup.transformer.train()
    try:
        needs = _measure_with_cache(setup, batch, integers)
    # Ops without fake tensor support, and token ids that do not fit the media, raise many exception classes.
    except (RuntimeError, ValueError) as error:
        mode = choose_least_memory_mode(setup.transformer) if requested_mode == "auto" else requested_mode
        reason = str(error).strip().partition("\n")[0]
        message = f"{mode}: activations could not be counted: {reason}"
        return CheckpointingAdvice(mode, message, fits=True, is_counted=False)
    # Embeddings and the output are not shared, but they are small.
    shared = setup.recipe.train.context_parallel
    needs = {mode: peak // shared for mode, peak in needs.items()}
    if setup.recipe.train.compile:
        # A compiled block is one piece: selective checkpointing cannot keep its attention outputs.
        needs = {mode: peak for mode, peak in needs.items() if mode != "selective"}
    return advise_checkpointing(needs, count_free(setup), requested_mode)


def _measure_with_cache(setup: AnySetup, batch: Spec, integer_inputs: Tensors) -> PeakBytes:
    """Peak bytes of activations, cached for equal models and batches. Raises the errors of `measure_activations`."""
    path, cached_finding = get_preflight_cache_path(setup), None
    # Everything that the count depends on: the mode that it chooses must be that of a new count.
    facts = {
        "what": "activations",
        **build_model_facts(setup),
        # What the loss computes.
        "identity": setup.task.trajectory_config(setup.recipe),
        # Kernels may have been switched off since the model was built.
        "active kernels": describe_active_kernels(setup),
        "batch": {name: [list(shape), str(dtype)] for name, (shape, dtype) in batch.items()},
        "integers": {name: [list(t.shape), t.flatten().tolist()] for name, t in integer_inputs.items()},
    }
    if setup.recipe.guard.preflight != REMEASURE:
        cached_finding = next(iter(read_cached_findings(path, facts)), None)
    # The text of the finding is the result as JSON.
    if cached_finding is not None:
        cached_peaks: PeakBytes = parse_json(cached_finding.message)
        return cached_peaks
    streams = RandomStreams(setup.recipe.train.seed, range(setup.recipe.train.batch_size))
    peaks = measure_activations(
        setup.transformer,
        lambda model, tensors: compute_training_losses(setup.checkpoint, model, tensors, streams),
        batch,
        setup.accelerator.device,
        integer_inputs=integer_inputs,
        forward_context=setup.engine.enable_local_forward(),
    )
    # Without a place in the cache, the next start counts again.
    with suppress(OSError):
        store_findings(path, facts, [CheckFinding("activations", True, json.dumps(peaks), fatal=False)])
    return peaks


def count_free_bytes(setup: AnySetup) -> int:
    """Bytes left for activations on this rank's device once the optimizer has allocated all of its state."""
    accelerator = setup.accelerator
    free = get_available_bytes(accelerator.device, accelerator.num_processes)
    unallocated = count_unallocated_bytes(setup.optimizer, setup.recipe.optim.name)
    return max(0, free - unallocated - setup.engine.in_flight_bytes)


def count_unallocated_bytes(optimizer: torch.optim.Optimizer, name: str = DEFAULT_OPTIMIZER) -> int:
    """Bytes of gradients and optimizer state that are not allocated yet; `name` is `optim.name`."""
    # Optimizers allocate their state in the first step, so it is not in the used memory yet.
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = sum(get_local_tensor(p).nbytes for p in trained if p.grad is None)
    without_state = [get_local_tensor(p) for p in trained if p not in optimizer.state]
    return gradients + OPTIMIZERS[name].state_bytes(without_state)
