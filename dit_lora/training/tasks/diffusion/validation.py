"""Generates samples during training with the trained weights themselves, without casting them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from av.error import FFmpegError
from torch import nn

from dit_lora.adapters.under import disable_frozen_adapters
from dit_lora.config.data import VideoShape
from dit_lora.data.media.sound import Sound, find_sound_fault
from dit_lora.data.media.video import write_sample
from dit_lora.environment.progress_bar import ProgressBar
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Checkpoint, Sampling, Tensors
from dit_lora.families.latents import VaeMemory
from dit_lora.numerics.dtensors import has_collective_forward
from dit_lora.numerics.eval_mode import use_eval_mode
from dit_lora.training.check_cache import REUSED
from dit_lora.training.execution.base_alone import has_only_untrained_adapters
from dit_lora.training.session.optional_work import free_memory
from dit_lora.training.session.session import Session, run_with_shared_errors
from dit_lora.training.task import Setup
from dit_lora.training.tasks.diffusion.base_samples import BaseSampleCache, open_base_samples
from dit_lora.training.tasks.diffusion.experts import find_other_expert_adapter, use_both_experts
from dit_lora.training.tasks.diffusion.precompute import DiffusionTrainingData
from dit_lora.training.tasks.diffusion.second_model import load_sampling_transformer
from dit_lora.training.tasks.diffusion.shown_references import copy_references
from dit_lora.training.tasks.diffusion.stored_loras import list_sample_adapters


def sample_videos(setup: Setup[DiffusionTrainingData, Checkpoint], step: int) -> None:
    """Write samples/step_NNNNNN/prompt_NN.mp4 (.png for an image) for each validation prompt and its seeds.

    The unpatched pipeline denoises with the transformer in training, under the training autocast. With
    `validation.model` it uses that checkpoint's transformer with the present adapter.
    """
    session, sampling_checkpoint = setup.session, setup.data.sampling_checkpoint
    if not session.recipe.validation.prompts:
        return
    # Collective if weights are sharded, so on all ranks.
    weights = setup.engine.trainable_state_dict() if sampling_checkpoint is not None else {}
    # All ranks of a sharded model denoise together, with the same result; a second model is whole on one rank.
    takes_part = session.is_main or (sampling_checkpoint is None and has_collective_forward(setup.model))
    # Collective. Before the adapter has an effect, the samples are the base's, which are cached.
    is_base = step == 0 and has_only_untrained_adapters(setup.transformer)
    prepare = partial(_prepare_samples, setup, step, is_base=is_base) if takes_part else None
    pending = run_with_shared_errors(session, prepare)
    try:
        if pending is not None and pending.inputs:
            _generate_samples(setup, pending, step, weights)
    finally:
        if sampling_checkpoint is not None:
            free_memory()


@dataclass(frozen=True)
class _PendingSamples:
    """The samples of one validation that are to be generated."""

    inputs: Mapping[int, tuple[Tensors, Sampling]]
    """The pipeline's inputs by the sample's number."""
    base_samples: BaseSampleCache | None
    """The cache that they go to; None if they are not the base's."""


def _prepare_samples(setup: Setup[DiffusionTrainingData, Checkpoint], step: int, *, is_base: bool) -> _PendingSamples:
    """Collect the inputs of all samples, and write those of the base that are cached."""
    session, inputs = setup.session, _build_inputs(setup)
    numbered = dict(enumerate(inputs))
    if not session.is_main:
        return _PendingSamples(numbered, None)
    samplings = [sampling for _, sampling in inputs]
    checkpoint = setup.data.sampling_checkpoint or setup.checkpoint
    copy_references(session.dir / "samples", checkpoint.info.reference_spec, samplings)
    base_samples = open_base_samples(setup, samplings) if is_base else None
    if base_samples is None:
        return _PendingSamples(numbered, None)
    missing = {
        index: item
        for index, item in numbered.items()
        if not base_samples.restore_cached_sample(index, _get_sample_path(session, step, index))
    }
    if not missing:
        session.phases.reductions["samples at step 0"] = REUSED
    return _PendingSamples(missing, base_samples)


def _get_sample_path(session: Session, step: int, index: int) -> Path:
    """Path of a sample without its suffix."""
    return session.dir / "samples" / f"step_{step:06d}" / f"prompt_{index:02d}"


def _build_inputs(setup: Setup[DiffusionTrainingData, Checkpoint]) -> list[tuple[Tensors, Sampling]]:
    settings, device = setup.recipe.validation, setup.accelerator.device
    encoded, checkpoint = setup.data, setup.data.sampling_checkpoint or setup.checkpoint
    # All prompts with the same seeds, so that they can be compared.
    return [
        (
            checkpoint.sampler.prompt_kwargs(
                _read_embeddings(encoded, key, device), _read_embeddings(encoded, negative, device)
            ),
            Sampling(
                VideoShape.from_data(setup.recipe.data),
                settings.inference_steps,
                settings.guidance_scale,
                seed,
                image=Path(settings.images[index]) if settings.images else None,
                last_image=Path(settings.last_images[index]) if settings.last_images else None,
                references=tuple(map(Path, settings.references[index])) if settings.references else (),
                fps=setup.recipe.data.fps,
            ),
        )
        for index, (key, negative) in enumerate(encoded.prompt_keys)
        for seed in range(settings.seed, settings.seed + settings.count)
    ]


def _generate_samples(
    setup: Setup[DiffusionTrainingData, Checkpoint],
    pending: _PendingSamples,
    step: int,
    weights: Mapping[str, torch.Tensor],
) -> None:
    sampling_checkpoint = setup.data.sampling_checkpoint
    if sampling_checkpoint is None:
        sample_adapters = list_sample_adapters(setup.recipe)
        with use_eval_mode(setup.model), disable_frozen_adapters(setup.transformer, keep_active=sample_adapters):
            _write_samples(setup, pending, step, setup.checkpoint, setup.transformer)
        return
    with torch.no_grad():
        transformer = load_sampling_transformer(setup, sampling_checkpoint, weights)
        _write_samples(setup, pending, step, sampling_checkpoint, transformer)


def _write_samples(
    setup: Setup[DiffusionTrainingData, Checkpoint],
    pending: _PendingSamples,
    step: int,
    checkpoint: Checkpoint,
    transformer: nn.Module,
) -> None:
    session, base_samples = setup.session, pending.base_samples
    unwritten: list[Exception] = []

    def write_on_main(index: int, video: torch.Tensor, sound: Sound | None) -> Path | None:
        """Write a generated sample on the main process only.

        Errors are kept, because other ranks of a sharded model need it.
        """
        try:
            if session.is_main and not unwritten:
                return write_sample(_get_sample_path(session, step, index), video, session.recipe.data.fps, sound)
        except (OSError, FFmpegError) as error:
            unwritten.append(error)
        return None

    pipeline = checkpoint.sampler.pipeline(setup.dtype, transformer, text=False)
    for name, component in pipeline.components.items():
        # The transformer stays where training has it, possibly on several devices; another expert takes turns with it.
        if isinstance(component, nn.Module) and name not in ("transformer", "transformer_2"):
            component.to(session.accelerator.device)
    VaeMemory.from_config(session.recipe.data).apply(pipeline.vae)
    pipeline.set_progress_bar_config(disable=True)
    is_quiet, items = not session.is_main, pending.inputs.items()
    bar = ProgressBar(items, desc=f"sampling at step {step}", unit="sample", leave=False, disable=is_quiet)
    adapter = find_other_expert_adapter(setup.recipe, setup.checkpoint.info)
    with use_both_experts(pipeline, checkpoint.info, transformer, adapter):
        for index, (prompt_kwargs, sampling) in bar:
            video, sound = checkpoint.sampler.generate_with_sound(pipeline, prompt_kwargs, sampling)
            sound_problem = find_sound_fault(sound)
            # A broken sound costs the sound, not the picture.
            if sound_problem:
                session.say(f"wrote sample {index} of step {step} without sound: {sound_problem}")
                sound = None
            file = write_on_main(index, video, sound)
            if base_samples is not None and file is not None and not sound_problem:
                base_samples.add_new_sample(index, file)
    if base_samples is not None:
        base_samples.write_new_samples()
    # At most one: nothing is written after the first error.
    for error in unwritten:
        raise error


def _read_embeddings(training_data: DiffusionTrainingData, key: str, device: torch.device) -> Tensors:
    texts = training_data.training_set.texts
    tensors, fault = texts.read(key, texts.read_first_entry_spec([key]))
    if fault:
        raise DitLoraError(f"cannot use a validation prompt: {fault}; start again to encode it again")
    # Moved here, because the pipeline does not move given embeddings.
    return {name: tensor[None].to(device) for name, tensor in tensors.items()}
