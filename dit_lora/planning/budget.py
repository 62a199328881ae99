"""Counts what a run will take: memory of each phase on device and host, and disk; before anything is loaded.

Counted of the run's own code on tensors without values. What is not counted is said (`Budget.assumed`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dit_lora.config.optimizers import OPTIMIZERS
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families.without_weights import data_is_here
from dit_lora.planning.subject import PlannedEncoder, Subject, Weights
from dit_lora.training.execution.activation_checkpointing import Mode
from dit_lora.training.execution.activations import Needs, advise
from dit_lora.training.loop import micro_batches_held

Sharding = Literal["ddp", "zero2", "fsdp2"]

GIB = 2**30
CONTEXT = int(0.75 * GIB)
"""CUDA's own, with the libraries' workspaces: not counted by PyTorch, so assumed."""
ROUNDING = 1.05
"""Share of activations that the allocator rounds up and cannot use: assumed."""
_SNAPSHOTS = 2


@dataclass(frozen=True)
class Launch:
    """The number of processes, and the part of the model that each has."""

    ranks: int = 1
    sharding: Sharding = "ddp"

    @property
    def state_parts(self) -> int:
        """Ranks that gradients and optimizer are divided by."""
        return 1 if self.sharding == "ddp" else self.ranks

    @property
    def weight_parts(self) -> int:
        return self.ranks if self.sharding == "fsdp2" else 1


@dataclass(frozen=True)
class Training:
    """Bytes on each rank's device at the peak of a training step."""

    weights: int
    gathered: int
    """Whole blocks, where weights are shared out or offloaded: one that computes and one that comes."""
    trained: int
    gradients: int
    """Gradients, as far as they are not in `activations`."""
    buckets: int
    """DDP's copy of the gradients, which it sends."""
    optimizer: int
    ema: int
    batch: int
    """Every micro-batch that is held: two steps are in flight."""
    activations: int
    """Activations, with the gradients on their way."""
    encoders: int
    """Encoders that stay, with `data.precompute: false`."""

    @property
    def state(self) -> int:
        """All but activations."""
        return sum(vars(self).values()) - self.activations

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class MemoryBudget:
    """One recipe under one launch."""

    recipe: Recipe
    launch: Launch
    gpu: int | None
    mode: Mode
    """The checkpointing that the run would take."""
    training: Training
    phases: Mapping[str, int]
    """Bytes on each rank's device at the peak of each."""
    activations: Mapping[str, Needs]
    """Bytes by shape and mode, with the gradients on their way."""
    host: Mapping[str, int]
    disk: Mapping[str, int]
    clips: int | None
    """That the data has; None where it is not there."""
    assumed: tuple[str, ...]

    @property
    def needs(self) -> int:
        """The bytes that a GPU must have."""
        return max(self.phases.values())

    @property
    def fits(self) -> bool:
        return self.gpu is None or self.needs <= self.gpu


def count(
    recipe: Recipe, subject: Subject, launch: Launch, gpu: int | None, mode: Mode | None = None
) -> MemoryBudget:
    """The budget of a recipe; of `gpu` bytes, `train.checkpointing: auto` takes what it would take there.

    Without `gpu` auto takes `none`. `mode` overrides what the run would choose.
    """
    largest, weights = subject.shapes[0], subject.weights(recipe)
    needs = {str(shape): subject.needs(recipe, shape) for shape in subject.shapes}
    state = _state(recipe, subject, weights, launch)
    if mode is None:
        mode = _mode(recipe, needs[str(largest)], weights, state, gpu, launch)
    peak = subject.peak(recipe, largest, mode)
    parallel = recipe.train.context_parallel
    in_flight = max(0, peak - needs[str(largest)][mode])
    # What takes the place of activations when the optimizer steps: gradients, and what an average moves by.
    gradients = 0 if state.gradients else weights.trained_bytes // launch.state_parts
    at_update = max(gradients, state.ema)
    training = replace(state, activations=max(peak // parallel, at_update))
    shapes = {
        name: {one: (need + in_flight) // parallel for one, need in own.items()}
        for name, own in needs.items()
    }
    phases, lacking = _phases(recipe, subject, weights, training)
    return MemoryBudget(
        recipe,
        launch,
        gpu,
        mode,
        training,
        phases,
        shapes,
        _host(recipe, subject, weights, training, launch),
        _disk(recipe, subject, weights),
        len(subject.samples) if subject.samples is not None else None,
        (*_assumed(recipe, subject, launch), *lacking),
    )


def _mode(
    recipe: Recipe, needs: Needs, weights: Weights, state: Training, gpu: int | None, launch: Launch
) -> Mode:
    """Advise as `choose_checkpointing` would in the run."""
    asked = recipe.train.asked_checkpointing
    if asked != "auto" and asked not in needs:
        raise DitLoraError(
            f"train.checkpointing={asked}: this model has no gradient checkpointing; use auto or none"
        )
    if gpu is None:
        return next(iter(needs)) if asked == "auto" else asked
    to_come = state.gradients or weights.trained_bytes // launch.state_parts
    free = gpu - CONTEXT - state.state + state.gradients - to_come
    return advise(needs, max(0, free), asked).mode


def _state(recipe: Recipe, subject: Subject, weights: Weights, launch: Launch) -> Training:
    """All but activations."""
    parts, trained = launch.weight_parts, weights.trained_bytes
    frozen, gathered = weights.frozen, 0
    if recipe.train.offload == "group":
        frozen, gathered = frozen - weights.in_blocks, 2 * weights.largest_block
    elif parts > 1:
        gathered = 2 * weights.largest_block
    gradients = trained // launch.state_parts if recipe.train.accumulate > 1 else 0
    encoders = 0
    if not recipe.data.precompute and not subject.is_chat:
        text = subject.caption_encoder
        encoders = subject.video_encoder.weights + (text.weights if text else 0)
    return Training(
        weights=frozen // parts,
        gathered=gathered,
        trained=trained // parts,
        gradients=gradients,
        buckets=trained if launch.ranks > 1 and launch.sharding == "ddp" else 0,
        optimizer=_optimizer(recipe.optim.name, weights)[0] // launch.state_parts,
        ema=trained // parts if recipe.train.ema else 0,
        batch=micro_batches_held(recipe.train.accumulate) * _micro_batch(recipe, subject),
        activations=0,
        encoders=encoders,
    )


def _micro_batch(recipe: Recipe, subject: Subject) -> int:
    return recipe.train.batch_size * subject.sample_bytes(subject.shapes[0])


def _optimizer(name: str, weights: Weights) -> tuple[int, int]:
    """On the device, and on the host: what is paged is counted there, where it goes when the device has no room."""
    record = OPTIMIZERS[name]
    size = record.state_bytes(weights.trained)
    return (size, 0) if record.unpaged is None else (0, size)


def _phases(
    recipe: Recipe, subject: Subject, weights: Weights, training: Training
) -> tuple[dict[str, int], list[str]]:
    """Peaks on the device, and what could not be counted."""
    over = CONTEXT if subject.gpu else 0
    rounded = ROUNDING if subject.gpu else 1
    at_training = training.state + int(training.activations * rounded) + over
    if subject.is_chat:
        lacking = ["validation: answers are written token by token, with less than a step takes"]
        return {"training": at_training}, lacking
    lacking = []

    def alone(encoder: PlannedEncoder) -> int:
        return encoder.weights + int(encoder.most * rounded) + over

    phases = {}
    text = subject.caption_encoder
    if text is not None:
        phases["captions"] = alone(text)
    elif "text_encoder" in subject.checkpoint.text_facts():
        lacking.append(
            "captions: text_encoder/config.json is not there, so the text encoder is not counted"
        )
    phases["clips"] = alone(subject.video_encoder)
    phases["training"] = at_training
    if recipe.validation.prompts:
        decoder = subject.video_decoder
        at_work = max(subject.inference_peak(recipe), decoder.most)
        stored = (
            training.trained if recipe.train.ema else 0
        )  # its weights, while it has the averages
        # The step before has been read, and its gradients and micro-batches are gone.
        gone = recipe.train.accumulate * _micro_batch(recipe, subject)
        state = training.state - gone - training.gradients
        beside = decoder.weights + _second(recipe, weights)
        phases["validation"] = state + stored + beside + int(at_work * rounded) + over
    return phases, lacking


def _second(recipe: Recipe, weights: Weights) -> int:
    """Return the bytes of the transformer of `validation.model`, with an adapter of its own; it is on one rank, whole."""
    if recipe.validation.model is None:
        return 0
    away = weights.in_blocks - 2 * weights.largest_block if recipe.train.offload == "group" else 0
    return weights.frozen - max(0, away) + weights.trained_bytes


def _host(
    recipe: Recipe, subject: Subject, weights: Weights, training: Training, launch: Launch
) -> dict[str, int]:
    """Bytes of all ranks of one machine together, without what Python and the libraries take."""
    data, ranks = recipe.data, launch.ranks
    whole = training.trained + training.optimizer + training.ema
    _, paged = _optimizer(recipe.optim.name, weights)
    drawn = recipe.train.batch_size * subject.drawn_bytes(subject.shapes[0])
    read_ahead = _micro_batch(recipe, subject) + drawn
    return {
        # Every process reads the weights on the CPU, in turn with nobody.
        "loading": ranks * (weights.frozen + weights.trained_bytes),
        "snapshots": ranks * _SNAPSHOTS * (whole + paged),
        "prefetched batches": ranks * data.workers * data.prefetch * read_ahead,
        "offloaded weights": ranks * (weights.in_blocks if recipe.train.offload == "group" else 0),
        "paged optimizer": ranks * paged,
        "a second transformer": weights.frozen if recipe.validation.model else 0,
        "checkpoint on its way": launch.state_parts * whole + paged,
    }


def _disk(recipe: Recipe, subject: Subject, weights: Weights) -> dict[str, int]:
    trained = weights.trained_bytes
    checkpoint = trained * (2 if recipe.train.ema else 1) + sum(
        _optimizer(recipe.optim.name, weights)
    )
    result = trained if recipe.train.mode == "lora" else weights.frozen + trained
    # One more than is kept, while the newest is written.
    kept = recipe.train.keep + recipe.train.keep_best + 1
    sizes = {"checkpoints": kept * checkpoint, "result": result}
    if subject.is_chat or not recipe.data.precompute:
        return sizes
    return {
        "cache, a clip": subject.sample_bytes(subject.shapes[0]) * (2 if recipe.data.flip else 1),
        **sizes,
    }


def _assumed(recipe: Recipe, subject: Subject, launch: Launch) -> list[str]:
    lines = []
    if subject.gpu:
        lines.append(
            f"of the GPU, {CONTEXT / GIB:.2g} GiB are CUDA's own, and the allocator loses "
            f"{ROUNDING - 1:.0%} of activations; not measured on a GPU"
        )
        lines.append("workspaces of cuDNN's convolutions are not counted")
    if not data_is_here(recipe):
        lines.append("the data is not here: the recipe's own shapes, and no number of samples")
    if launch.ranks > 1 and launch.sharding != "ddp":
        lines.append(
            f"{launch.sharding}: what is shared out is divided evenly, and two whole blocks are gathered; buffers of "
            "its communication are not counted"
        )
    if recipe.train.context_parallel > 1:
        lines.append(
            "context_parallel: activations are divided evenly; what is exchanged is not counted"
        )
    if recipe.model.quantize:
        lines.append(
            "model.quantize: a layer's weight in its wide form, for the moment of its product, is not counted"
        )
    return lines
