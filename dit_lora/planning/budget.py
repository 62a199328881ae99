"""Computes what a run needs before anything is loaded: memory of each phase on device and host, and disk space.

The run's own code is executed on tensors without values. `MemoryBudget.assumptions` lists what is not counted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dit_lora.config.lora import WEIGHT_INITS
from dit_lora.config.optimizers import OPTIMIZERS
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families.without_weights import is_data_available
from dit_lora.planning.subject import EncoderMemory, MemoryEstimator, ModelWeights
from dit_lora.training.execution.activation_checkpointing import CheckpointingMode
from dit_lora.training.execution.activations import PeakBytes, advise_checkpointing
from dit_lora.training.loop import max_resident_micro_batches

Sharding = Literal["ddp", "zero2", "fsdp2"]

GIB = 2**30
CUDA_CONTEXT_BYTES = int(0.75 * GIB)
"""Bytes of the CUDA context and the libraries' workspaces. PyTorch does not count them, so this is assumed."""
ROUNDING_FACTOR = 1.05
"""Factor for activation memory that the allocator loses by rounding up. Assumed."""
_NUM_SNAPSHOTS = 2


@dataclass(frozen=True)
class LaunchLayout:
    """Layout of a launch: the number of processes, and how the model is sharded over them."""

    num_ranks: int = 1
    sharding: Sharding = "ddp"

    @property
    def num_state_shards(self) -> int:
        """Number of ranks that gradients and optimizer state are sharded over."""
        return 1 if self.sharding == "ddp" else self.num_ranks

    @property
    def num_weight_shards(self) -> int:
        """Number of ranks that weights are sharded over."""
        return self.num_ranks if self.sharding == "fsdp2" else 1


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each rank's device at the peak of a training step."""

    weights: int
    gathered: int
    """Two unsharded blocks if weights are sharded or offloaded: the one that computes and the prefetched one."""
    trained: int
    gradients: int
    """Gradients that are not counted in `activations`."""
    buckets: int
    """DDP's copy of the gradients, for the all-reduce."""
    optimizer: int
    ema: int
    batch: int
    """All resident micro-batches: two steps are in flight."""
    activations: int
    """Activations, and gradients as backward produces them."""
    encoders: int
    """Encoders that stay loaded, with `data.precompute: false`."""

    @property
    def state_bytes(self) -> int:
        """Bytes of everything in a training step except activations."""
        # All fields are bytes, so a new one is counted without a change here.
        return sum(vars(self).values()) - self.activations


@dataclass(frozen=True)
class MemoryBudget:
    """The memory and disk that one recipe needs under one launch, in bytes."""

    recipe: Recipe
    launch: LaunchLayout
    gpu_bytes: int | None
    checkpointing_mode: CheckpointingMode
    """The activation checkpointing that the run would use."""
    training: TrainingMemory
    phase_bytes: Mapping[str, int]
    """Phase of the run to the peak in bytes on each rank's device."""
    activations: Mapping[str, PeakBytes]
    """Bytes of activations by shape and checkpointing mode, with gradients as backward produces them."""
    host_bytes: Mapping[str, int]
    disk_bytes: Mapping[str, int]
    num_clips: int | None
    """Number of clips in the dataset; None if `data.path` does not exist here."""
    assumptions: tuple[str, ...]

    @property
    def needed_bytes(self) -> int:
        """Bytes of GPU memory that the largest phase needs."""
        return max(self.phase_bytes.values())

    @property
    def fits(self) -> bool:
        """True if the planned run fits on the GPU, or if there is no limit."""
        return self.gpu_bytes is None or self.needed_bytes <= self.gpu_bytes


def compute_budget(
    recipe: Recipe,
    estimator: MemoryEstimator,
    launch: LaunchLayout,
    gpu_bytes: int | None,
    mode: CheckpointingMode | None = None,
) -> MemoryBudget:
    """Compute the memory budget of a recipe.

    Args:
        recipe: The recipe, with a local `model.path`.
        estimator: Its checkpoint on the meta device.
        launch: Number of ranks and sharding.
        gpu_bytes: Bytes of the GPU. `train.checkpointing: auto` chooses what it would choose there. None: no limit,
            and `auto` chooses `none`.
        mode: Activation checkpointing to assume instead of the run's choice.
    """
    # Shapes are sorted by volume; all peaks are computed for the largest.
    largest, weights = estimator.shapes[0], estimator.count_weights(recipe)
    # By shape and checkpointing mode, without gradients.
    needs = {str(shape): estimator.measure_activations(recipe, shape) for shape in estimator.shapes}
    # Activations are still 0: their size depends on the mode, which depends on this state.
    state = _compute_training_state_memory(recipe, estimator, weights, launch)
    if mode is None:
        mode = _choose_checkpointing_mode(recipe, needs[str(largest)], weights, state, gpu_bytes, launch)
    peak = estimator.measure_peak(recipe, largest, mode)
    # With context parallelism each rank has an equal share of the tokens, and so of the activations.
    parallel = recipe.train.context_parallel
    # Gradients that exist at the moment of the peak: the whole step's peak minus the activations.
    in_flight = max(0, peak - needs[str(largest)][mode])
    # At the optimizer step activations are freed, and gradients and a temporary copy for the EMA take their place.
    gradients = 0 if state.gradients else weights.trained_bytes // launch.num_state_shards
    at_update = max(gradients, state.ema)
    # The peak is in backward or at the optimizer step, whichever is larger.
    training = replace(state, activations=max(peak // parallel, at_update))
    shapes = {
        name: {mode_name: (need + in_flight) // parallel for mode_name, need in mode_needs.items()}
        for name, mode_needs in needs.items()
    }
    phases, uncounted = _compute_phase_peaks(recipe, estimator, weights, training)
    return MemoryBudget(
        recipe,
        launch,
        gpu_bytes,
        mode,
        training,
        phases,
        shapes,
        _compute_host_bytes(recipe, estimator, weights, training, launch),
        _compute_disk_bytes(recipe, estimator, weights),
        len(estimator.samples) if estimator.samples is not None else None,
        (*_list_assumptions(recipe, estimator, launch), *uncounted),
    )


def _choose_checkpointing_mode(
    recipe: Recipe,
    needs: PeakBytes,
    weights: ModelWeights,
    state: TrainingMemory,
    gpu_bytes: int | None,
    launch: LaunchLayout,
) -> CheckpointingMode:
    """The activation checkpointing mode that the run would choose on this GPU."""
    requested = recipe.train.effective_checkpointing
    if requested != "auto" and requested not in needs:
        raise DitLoraError(
            f"train.checkpointing={requested}: this model has no gradient checkpointing; use auto or none"
        )
    if gpu_bytes is None:
        return next(iter(needs)) if requested == "auto" else requested
    # Gradients exist at the peak in any case, even if backward allocates them.
    peak_gradients = state.gradients or weights.trained_bytes // launch.num_state_shards
    # The gradients in the state are added back: the last term has them too.
    free = gpu_bytes - CUDA_CONTEXT_BYTES - state.state_bytes + state.gradients - peak_gradients
    return advise_checkpointing(needs, max(0, free), requested).mode


def _compute_training_state_memory(
    recipe: Recipe, estimator: MemoryEstimator, weights: ModelWeights, launch: LaunchLayout
) -> TrainingMemory:
    """Every part of a training step's memory except activations, which are 0 in the result."""
    parts, trained = launch.num_weight_shards, weights.trained_bytes
    # Bytes on this rank's device, before sharding.
    frozen, gathered = weights.frozen_bytes, 0
    # With offload and with sharded weights, only two blocks are on the device at a time: one computes while the next
    # one is fetched.
    if recipe.train.offload == "group":
        frozen, gathered = frozen - weights.block_bytes, 2 * weights.largest_block_bytes
    elif parts > 1:
        gathered = 2 * weights.largest_block_bytes
    # Without accumulation the gradients are part of `activations`: they appear during backward and are freed after it.
    gradients = trained // launch.num_state_shards if recipe.train.accumulate > 1 else 0
    # Only without a cache: encoders then run before every step.
    encoders = 0
    if not recipe.data.precompute and not estimator.is_chat:
        text = estimator.caption_encoder
        encoders = estimator.video_encoder.weight_bytes + (text.weight_bytes if text else 0)
    return TrainingMemory(
        weights=frozen // parts,
        gathered=gathered,
        trained=trained // parts,
        gradients=gradients,
        # DDP copies gradients into buckets; with one process there is no all-reduce.
        buckets=trained if launch.num_ranks > 1 and launch.sharding == "ddp" else 0,
        optimizer=_count_optimizer_bytes(recipe.optim.name, weights)[0] // launch.num_state_shards,
        ema=trained // parts if recipe.train.ema else 0,
        batch=max_resident_micro_batches(recipe.train.accumulate) * _count_micro_batch_bytes(recipe, estimator),
        activations=0,
        encoders=encoders,
    )


def _count_micro_batch_bytes(recipe: Recipe, estimator: MemoryEstimator) -> int:
    """Bytes of one micro-batch of the largest shape on the device."""
    return recipe.train.batch_size * estimator.count_sample_bytes(estimator.shapes[0])


def _count_optimizer_bytes(name: str, weights: ModelWeights) -> tuple[int, int]:
    """Bytes of optimizer state on the device and on the host, where a paged optimizer is counted."""
    record = OPTIMIZERS[name]
    # Computed from the shapes of the trained parameters, which may be on the meta device.
    size = record.state_bytes(weights.trained_parameters)
    # The state of a paged optimizer goes to the host when the device is full.
    return (size, 0) if record.unpaged_variant is None else (0, size)


def _compute_phase_peaks(
    recipe: Recipe, estimator: MemoryEstimator, weights: ModelWeights, training: TrainingMemory
) -> tuple[dict[str, int], list[str]]:
    """Peak bytes of each phase of a run on the device, and a message for each phase that could not be computed."""
    # A CPU has neither a CUDA context nor a caching allocator.
    context_bytes = CUDA_CONTEXT_BYTES if estimator.is_gpu else 0
    rounded = ROUNDING_FACTOR if estimator.is_gpu else 1
    at_training = training.state_bytes + int(training.activations * rounded) + context_bytes
    if estimator.is_chat:
        uncounted = ["validation: answers are generated token by token, with less memory than a step"]
        return {"training": at_training}, uncounted
    uncounted = []

    def compute_encoder_peak(encoder: EncoderMemory) -> int:
        return encoder.weight_bytes + int(encoder.peak_bytes * rounded) + context_bytes

    # In the order of the run: captions and clips are encoded, then it trains and samples.
    phases = {}
    text = estimator.caption_encoder
    if text is not None:
        phases["captions"] = compute_encoder_peak(text)
    elif "text_encoder" in estimator.checkpoint.encoders.text_cache_key():
        uncounted.append("captions: text_encoder/config.json is missing, so the text encoder is not counted")
    phases["clips"] = compute_encoder_peak(estimator.video_encoder)
    phases["training"] = at_training
    if recipe.validation.prompts:
        decoder = estimator.video_decoding_memory
        # Denoising and decoding follow each other, so the larger one counts.
        at_work = max(estimator.measure_inference_peak(recipe), decoder.peak_bytes)
        # The trained weights are set aside while the model has the EMA weights.
        stored = training.trained if recipe.train.ema else 0
        # The previous step is finished: its gradients and micro-batches are freed.
        freed_bytes = recipe.train.accumulate * _count_micro_batch_bytes(recipe, estimator)
        state = training.state_bytes - freed_bytes - training.gradients
        extra_bytes = decoder.weight_bytes + _count_second_model_bytes(recipe, weights)
        extra_bytes += estimator.count_guidance_transformer_bytes(recipe)
        phases["validation"] = state + stored + extra_bytes + int(at_work * rounded) + context_bytes
    return phases, uncounted


def _count_second_model_bytes(recipe: Recipe, weights: ModelWeights) -> int:
    """Bytes of the second transformer, `validation.model`, with its adapter. It is unsharded, on one rank."""
    if recipe.validation.model is None:
        return 0
    # With offload only two blocks of the second model are on the device too.
    offloaded_bytes = weights.block_bytes - 2 * weights.largest_block_bytes if recipe.train.offload == "group" else 0
    return weights.frozen_bytes - max(0, offloaded_bytes) + weights.trained_bytes


def _compute_host_bytes(
    recipe: Recipe, estimator: MemoryEstimator, weights: ModelWeights, training: TrainingMemory, launch: LaunchLayout
) -> dict[str, int]:
    """Bytes of host memory for all ranks of one machine together. Python and its libraries are not counted."""
    data, ranks = recipe.data, launch.num_ranks
    # What a snapshot and a checkpoint hold of this rank.
    rank_state = training.trained + training.optimizer + training.ema
    _, paged = _count_optimizer_bytes(recipe.optim.name, weights)
    # Worker processes draw the noise in advance, together with the batch.
    noise_bytes = recipe.train.batch_size * estimator.count_noise_bytes(estimator.shapes[0])
    read_ahead = _count_micro_batch_bytes(recipe, estimator) + noise_bytes
    return {
        # Every process reads the weights on the CPU, all at the same time.
        "loading": ranks * (weights.frozen_bytes + weights.trained_bytes),
        "snapshots": ranks * _NUM_SNAPSHOTS * (rank_state + paged),
        "prefetched batches": ranks * data.workers * data.prefetch * read_ahead,
        "offloaded weights": ranks * (weights.block_bytes if recipe.train.offload == "group" else 0),
        "paged optimizer": ranks * paged,
        "a second transformer": (weights.frozen_bytes if recipe.validation.model else 0)
        + (estimator.count_guidance_transformer_bytes(recipe) if recipe.validation.prompts else 0),
        "checkpoint on its way": launch.num_state_shards * rank_state + paged,
    }


def _compute_disk_bytes(recipe: Recipe, estimator: MemoryEstimator, weights: ModelWeights) -> dict[str, int]:
    trained = weights.trained_bytes
    checkpoint = trained * (2 if recipe.train.ema else 1) + sum(_count_optimizer_bytes(recipe.optim.name, weights))
    # An adapter, or the whole transformer. An adapter that started from the weights is saved with twice the rank.
    result = trained * (2 if recipe.lora.init in WEIGHT_INITS else 1)
    if recipe.train.mode == "full":
        result = weights.frozen_bytes + trained
    # One more than the recipe keeps: the oldest is deleted after the newest is written.
    num_checkpoints = recipe.train.keep + recipe.train.keep_best + 1
    sizes = {"checkpoints": num_checkpoints * checkpoint, "result": result}
    if recipe.train.mode == "lora":
        # Every checkpoint has the step's adapter.
        sizes["checkpoints"] += num_checkpoints * result
        train, groups = recipe.train, recipe.optim.groups
        # One save at each interval, and one at the last step.
        num_older = max(0, math.ceil(train.steps / train.save_every) - num_checkpoints)
        num_older = num_older if train.keep_adapters is None else min(num_older, train.keep_adapters)
        # With trained base weights the whole folder is deleted.
        if groups.connector is None and groups.backbone is None:
            sizes["adapters of older checkpoints"] = num_older * result
    if estimator.is_chat or not recipe.data.precompute:
        return sizes
    sample_bytes = estimator.count_sample_bytes(estimator.shapes[0]) * (2 if recipe.data.flip else 1)
    return {"cache, a clip": sample_bytes, **sizes}


def _list_assumptions(recipe: Recipe, estimator: MemoryEstimator, launch: LaunchLayout) -> list[str]:
    lines = []
    if estimator.is_gpu:
        lines.append(
            f"CUDA itself needs {CUDA_CONTEXT_BYTES / GIB:.2g} GiB, and rounding {ROUNDING_FACTOR - 1:.0%} of "
            "activations (not measured)"
        )
        lines.append("workspaces of cuDNN's convolutions are not counted")
    if not is_data_available(recipe):
        lines.append("data.path does not exist: shapes are the recipe's, and the number of samples is unknown")
    if launch.num_ranks > 1 and launch.sharding != "ddp":
        lines.append(
            f"{launch.sharding}: shards are equal, and two whole blocks are gathered; communication buffers "
            "are not counted"
        )
    if recipe.train.context_parallel > 1:
        lines.append("context_parallel: activations are divided evenly; communication buffers are not counted")
    if recipe.model.quantize:
        lines.append("model.quantize: the dequantized weight of the layer in use is not counted")
    return lines
