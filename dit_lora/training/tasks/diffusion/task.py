"""Trains diffusion models with the common loop: clips are encoded once, samples come from the unpatched pipeline."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from dit_lora.adapters.diffusers_format import save_adapter, save_pipeline
from dit_lora.adapters.find_lora import get_public_name
from dit_lora.adapters.groups import build_recipe_groups, describe_groups
from dit_lora.adapters.own_files import list_checkpoint_files
from dit_lora.adapters.peft_format import save_chat_adapter
from dit_lora.config.lora import PEFT_ONLY_KINDS
from dit_lora.config.recipe import Recipe
from dit_lora.data.cache.digests import Digests
from dit_lora.data.loading.encoded import EncodedClips, SampleCacheKeys
from dit_lora.families.base import Checkpoint
from dit_lora.families.family import DiffusionFamily
from dit_lora.numerics.dtensors import has_collective_forward
from dit_lora.numerics.ranks import broadcast_object
from dit_lora.numerics.saturation import FP16_MAX, has_fp16_saturation
from dit_lora.numerics.streams import derive_seed
from dit_lora.training.check_budget import (
    EvalSize,
    find_reduced_eval_size,
    get_full_eval_size,
    has_eval_size_setting,
)
from dit_lora.training.execution.base_alone import has_only_untrained_adapters
from dit_lora.training.journal import read_reduced_eval_size
from dit_lora.training.session.session import Session
from dit_lora.training.step import StepResult
from dit_lora.training.task import Setup
from dit_lora.training.tasks.base_loss import compute_base_eval_loss
from dit_lora.training.tasks.diffusion.cache_plan import compute_transformer_digest
from dit_lora.training.tasks.diffusion.experts import find_other_expert_adapter
from dit_lora.training.tasks.diffusion.model import patch_kernels, quantize_if_requested
from dit_lora.training.tasks.diffusion.precompute import DiffusionTrainingData, precompute
from dit_lora.training.tasks.diffusion.second_model import open_sampling_checkpoint, require_only_adapter_trains
from dit_lora.training.tasks.diffusion.stored_loras import (
    attach_trained_and_frozen_loras,
    check_lora_files,
    find_base_mismatches,
    read_recipe_lora_files,
    require_changed_adapter,
)
from dit_lora.training.tasks.diffusion.validation import sample_videos
from dit_lora.training.tasks.eval_loss import EvalSample, measure_eval_loss
from dit_lora.verify.diffusion_model import DiffusionReferenceModel

DiffusionSetup: TypeAlias = Setup[DiffusionTrainingData, Checkpoint]
# Timestep ranges of loss_by_timestep.
_NUM_LOSS_RANGES = 4
# Ranges of drawn_by_timestep.
_NUM_COUNT_RANGES = 20
ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class DiffusionTask:
    """Training task of diffusion models: every family that implements `families.base`."""

    def prepare_data(self, session: Session, checkpoint: Checkpoint) -> DiffusionTrainingData:
        if session.recipe.train.mode == "full":
            # The result copies these files: refuse one that cannot be copied before training.
            list_checkpoint_files(checkpoint.path)
        # In a run of both experts, the first one's adapter exists by now.
        find_other_expert_adapter(session.recipe, checkpoint.info)
        sampling_checkpoint = open_sampling_checkpoint(session.recipe, checkpoint)
        stored = check_lora_files(session.recipe, checkpoint)
        for line in checkpoint.info.recipe_notes(session.recipe):
            session.say_once(line)
        data = replace(precompute(session, checkpoint, sampling_checkpoint), adapters=stored)
        for line in find_base_mismatches(session.recipe, checkpoint, data.transformer_digest):
            session.say(line)
        return data

    def load_trainable(
        self, recipe: Recipe, family: DiffusionFamily, checkpoint: Checkpoint, dtype: torch.dtype
    ) -> tuple[nn.Module, list[dict[str, Any]], str]:
        """Load the transformer, equal on all ranks; returns it, its parameter groups, and lines on what trains.

        In mode `lora` base weights are in `dtype` and trained weights are fp32; in mode `full` everything is fp32.
        """
        with torch.random.fork_rng(devices=[]):
            # With model.from_scratch the weights are random: equal on all ranks and at every start.
            torch.manual_seed(derive_seed(recipe.train.seed, "weights"))
            full = recipe.train.mode == "full"
            transformer = checkpoint.denoiser.load_transformer(torch.float32 if full else dtype)
        narrowed, lines = "", ["full: every weight"]
        if not full:
            stored = read_recipe_lora_files(recipe, checkpoint, transformer)
            # Before the adapter is attached: PEFT then wraps the quantised layers.
            narrowed = quantize_if_requested(recipe, transformer, family.group_patterns)
            targets = checkpoint.info.lora_targets(family.lora_targets)
            lines = attach_trained_and_frozen_loras(recipe, transformer, stored, targets)
        groups = build_recipe_groups(transformer, recipe.optim.groups, family.group_patterns, recipe.train.mode)
        require_only_adapter_trains(recipe, transformer)
        # A run of both experts has this line twice: it names the expert instead of the parameters, to fit a terminal.
        expert = checkpoint.describe_expert()
        lines[0] = f"expert: {expert}; {lines[0]}" if expert else f"{lines[0]}{describe_groups(groups)}"
        if has_fp16_saturation(transformer):
            lines.append(f"saturation: attention is clamped at +-{FP16_MAX:g} as in the checkpoint's fp16 training")
        lines.append(patch_kernels(recipe, transformer))
        return transformer, groups, narrowed + "\n".join(lines)

    def model_digest(self, checkpoint: Checkpoint, recipe: Recipe, digests: Digests) -> str:
        return compute_transformer_digest(checkpoint.info, recipe, digests)

    def trajectory_config(self, recipe: Recipe) -> dict[str, Any]:
        timesteps = recipe.train.timesteps
        # Omit options at their default: checkpoints written before the option existed must still match.
        schedule: dict[str, Any] = {}
        if timesteps is not None:
            schedule["train.timesteps"] = timesteps.model_dump()
        if recipe.train.guidance_scale is not None:
            schedule["train.guidance_scale"] = recipe.train.guidance_scale
        if recipe.model.task is not None:
            schedule["model.task"] = recipe.model.task
        if recipe.data.sound:
            schedule["data.sound"] = True
        if recipe.train.preserve is not None:
            schedule["train.preserve"] = recipe.train.preserve.model_dump()
        if recipe.train.target == "guided":
            schedule["train.target"] = f"guided, scale {recipe.train.effective_guided_scale:g}"
        return {
            **schedule,
            "data.caption_dropout": recipe.data.caption_dropout,
            "data.flip": recipe.data.flip,
            "data.image_dropout": recipe.data.image_dropout,
            "model.from_scratch": recipe.model.from_scratch,
            "train.vlb": recipe.train.vlb,
        }

    def build_metadata(self, setup: DiffusionSetup) -> dict[str, Any]:
        data, sampling_model = setup.recipe.data, setup.recipe.validation.model
        return {
            **setup.data.adapters,
            **({} if sampling_model is None else {"samples_from": get_public_name(sampling_model)}),
            "index": setup.checkpoint.info.model_index_changes(),
            **({"part": setup.checkpoint.info.part} if setup.checkpoint.info.expert_names else {}),
            **setup.checkpoint.info.training_metadata(),
            **({"task": setup.recipe.model.task} if setup.recipe.model.task else {}),
            "video": {key: getattr(data, key) for key in ("frames", "height", "width", "fps")},
        }

    def loss_parts(self, setup: DiffusionSetup, result: StepResult) -> dict[str, dict[str, float]]:
        timesteps = setup.checkpoint.denoiser.timestep_range
        return {
            "loss_by_timestep": average_by_timestep(result, timesteps),
            "drawn_by_timestep": count_by_timestep(result, timesteps),
        }

    def find_reduced_eval_size(self, setup: DiffusionSetup) -> EvalSize | None:
        recipe, session = setup.recipe, setup.session
        if has_eval_size_setting(recipe):
            return None
        # Eval losses of one run must be comparable, also after a resume with more steps.
        recorded = None
        # The other ranks wait in the broadcast. Without a record, counts give the same size again.
        with suppress(OSError):
            recorded = read_reduced_eval_size(session.dir) if session.is_main else None
        has_losses, reduced = broadcast_object(recorded) or (False, None)
        if has_losses:
            return reduced
        # In a collective forward, all ranks run every draw; otherwise they share the draws.
        num_sharing = session.num_data_ranks if has_collective_forward(setup.model) else 1
        num_trained_samples = recipe.train.steps * session.samples_per_step // num_sharing
        return find_reduced_eval_size(recipe, len(setup.data.training_set.entries), num_trained_samples)

    def compute_eval_loss(self, setup: DiffusionSetup) -> float | None:
        entries = setup.data.training_set.entries
        num_clips, num_draws = self.find_reduced_eval_size(setup) or get_full_eval_size(setup.recipe, len(entries))
        return _measure_loss(setup, setup.data.training_set, entries[:num_clips], num_draws, setup.data.data_digest)

    def compute_validation_loss(self, setup: DiffusionSetup) -> float | None:
        validation_set = setup.data.validation_set
        if validation_set is None:
            return None
        entries = validation_set.entries
        num_clips, num_draws = self.find_reduced_eval_size(setup) or get_full_eval_size(setup.recipe, len(entries))
        # By a hash and not in their order, in which the first ones may be from one folder.
        shuffled = sorted(entries, key=lambda entry: derive_seed(0, "validation order", entry.id))
        return _measure_loss(setup, validation_set, shuffled[:num_clips], num_draws, setup.data.validation_digest)

    def write_samples(self, setup: DiffusionSetup, step: int) -> None:
        sample_videos(setup, step)

    def build_reference_model(self, checkpoint: Checkpoint) -> DiffusionReferenceModel:
        return DiffusionReferenceModel(checkpoint)

    def save(self, setup: DiffusionSetup, metadata: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Path:
        """Write `adapter/` in mode `lora` or `model/` in mode `full`; returns the path that `verify` takes."""
        folder, checkpoint = setup.session.dir, setup.checkpoint
        if setup.recipe.train.mode == "full":
            index = checkpoint.info.model_index_changes()
            # Only sharded weights have to be passed on: otherwise the model has all of them.
            gathered = weights if setup.engine.collective_forward else None
            return save_pipeline(
                setup.transformer, checkpoint.path, folder / "model", metadata, index, gathered, checkpoint.info.part
            )
        require_changed_adapter(setup.recipe, checkpoint, setup.transformer, weights)
        return self.write_adapter(setup, folder / "adapter", metadata, weights)

    def write_adapter(
        self, setup: DiffusionSetup, folder: Path, metadata: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
    ) -> Path:
        if setup.recipe.lora.kind in PEFT_ONLY_KINDS:
            return save_chat_adapter(setup.transformer, folder, metadata, weights)
        return save_adapter(setup.transformer, setup.checkpoint.info.pipeline_class, folder, metadata, weights)


def _measure_loss(
    setup: DiffusionSetup, clips: EncodedClips, entries: Sequence[SampleCacheKeys], num_draws: int, data_digest: str
) -> float | None:
    """Mean loss of some samples at fixed noise; `data_digest` is the hash of all `clips`. Collective."""
    # Each clip is measured with several noises, which have consecutive numbers.
    eval_samples = [
        EvalSample(entry, index * num_draws + draw) for index, entry in enumerate(entries) for draw in range(num_draws)
    ]
    measure = partial(measure_eval_loss, setup, clips, eval_samples)
    # Before the adapter has an effect, the loss is the base's, which is cached.
    if eval_samples and has_only_untrained_adapters(setup.transformer):
        return compute_base_eval_loss(setup, eval_samples, data_digest, measure)
    return measure()[0]


def average_by_timestep(result: StepResult, timesteps: range) -> dict[str, float]:
    """Mean losses of each quarter of the timesteps; quarters without a sample are omitted."""
    members: dict[str, list[float]] = {}
    for name, loss in _split_by_timestep(result.timesteps, result.losses, timesteps, _NUM_LOSS_RANGES):
        members.setdefault(name, []).append(loss)
    return {name: sum(losses) / len(losses) for name, losses in _sort_by_timestep(members)}


def count_by_timestep(result: StepResult, timesteps: range) -> dict[str, float]:
    """Number of samples in each twentieth of the timesteps; empty ones are omitted."""
    parts = _split_by_timestep(result.timesteps, result.losses, timesteps, _NUM_COUNT_RANGES)
    return dict(_sort_by_timestep(Counter(name for name, _ in parts)))


def _split_by_timestep(
    sample_timesteps: Sequence[int], losses: Sequence[float], timesteps: range, num_parts: int
) -> Iterator[tuple[str, float]]:
    """Yield the name of each sample's part of the timesteps, such as `250-499`, with its loss."""
    # Rounded up: the last part may be shorter, and no part follows it.
    width = -(-len(timesteps) // num_parts)
    for timestep, loss in zip(sample_timesteps, losses, strict=True):
        # The start of the part that this timestep falls into.
        start = timesteps.start + (timestep - timesteps.start) // width * width
        yield f"{start}-{min(start + width, timesteps.stop) - 1}", loss


def _sort_by_timestep(parts: Mapping[str, ValueT]) -> list[tuple[str, ValueT]]:
    return sorted(parts.items(), key=lambda item: int(item[0].partition("-")[0]))
