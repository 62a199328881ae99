"""Generates samples during training with the trained weights themselves, without casting them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from av.error import FFmpegError
from torch import nn
from tqdm import tqdm

from dit_lora.adapters.under import under_off
from dit_lora.config.data import VideoShape
from dit_lora.data.media.sound import unplayable
from dit_lora.data.media.video import write_sample
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Checkpoint, Sampling, Tensors
from dit_lora.families.vae_memory import VaeMemory
from dit_lora.numerics.dtensors import needs_all_ranks
from dit_lora.training.execution.modes import evaluating
from dit_lora.training.session.session import agreed
from dit_lora.training.task import Setup
from dit_lora.training.tasks.diffusion.experts import both_experts, other_adapter
from dit_lora.training.tasks.diffusion.precompute import Precomputed
from dit_lora.training.tasks.diffusion.second_model import forget, second_transformer
from dit_lora.training.tasks.diffusion.shown_references import keep_references
from dit_lora.training.tasks.diffusion.stored_loras import in_samples


def sample_videos(setup: Setup[Precomputed, Checkpoint], step: int) -> None:
    """Write samples/step_NNNNNN/prompt_NN.mp4 (.png for an image) for each validation prompt and seed, prompt by
    prompt.

    The unpatched pipeline denoises with the transformer in training, under the training autocast. With
    `validation.model` it uses that checkpoint's transformer with the present adapter.
    """
    session, sampling_checkpoint = setup.session, setup.data.second
    if not session.recipe.validation.prompts:
        return
    # Collective if weights are sharded, so on all ranks.
    weights = setup.engine.weights() if sampling_checkpoint is not None else {}
    # All ranks of a sharded model denoise together, with the same result; a second model is whole on one rank.
    takes_part = session.is_main or (sampling_checkpoint is None and needs_all_ranks(setup.model))
    inputs = agreed(session, partial(_inputs, setup) if takes_part else None)
    try:
        if inputs is not None:
            _sample(setup, inputs, step, weights)
    finally:
        if sampling_checkpoint is not None:
            forget(session.accelerator.device)


def _inputs(setup: Setup[Precomputed, Checkpoint]) -> list[tuple[Tensors, Sampling]]:
    settings, device = setup.recipe.validation, setup.session.accelerator.device
    encoded, checkpoint = setup.data, setup.data.second or setup.checkpoint
    return [
        (
            checkpoint.conditions(
                _encoded(encoded, key, device), _encoded(encoded, negative, device)
            ),
            Sampling(
                VideoShape.of(setup.recipe.data),
                settings.inference_steps,
                settings.guidance_scale,
                seed,
                image=Path(settings.images[index]) if settings.images else None,
                last_image=Path(settings.last_images[index]) if settings.last_images else None,
                references=tuple(map(Path, settings.references[index]))
                if settings.references
                else (),
                fps=setup.recipe.data.fps,
            ),
        )
        for index, (key, negative) in enumerate(encoded.prompt_keys)
        for seed in range(settings.seed, settings.seed + settings.count)
    ]


def _sample(
    setup: Setup[Precomputed, Checkpoint],
    inputs: list[tuple[Tensors, Sampling]],
    step: int,
    weights: Mapping[str, torch.Tensor],
) -> None:
    sampling_checkpoint = setup.data.second
    if sampling_checkpoint is None:
        sample_adapters = in_samples(setup.recipe)
        with evaluating(setup.model), under_off(setup.transformer, but=sample_adapters):
            _write(setup, inputs, step, setup.checkpoint, setup.transformer)
        return
    with torch.no_grad():
        _write(
            setup,
            inputs,
            step,
            sampling_checkpoint,
            second_transformer(setup, sampling_checkpoint, weights),
        )


def _write(
    setup: Setup[Precomputed, Checkpoint],
    inputs: list[tuple[Tensors, Sampling]],
    step: int,
    checkpoint: Checkpoint,
    transformer: nn.Module,
) -> None:
    session = setup.session
    unwritten: list[Exception] = []

    def written(write: Callable[..., object], *arguments: object) -> None:
        """Write on the main process only; errors are kept, because other ranks of a sharded model need it to
        continue.
        """
        try:
            if session.is_main and not unwritten:
                write(*arguments)
        except (OSError, FFmpegError) as error:
            unwritten.append(error)

    samplings = [sampling for _, sampling in inputs]
    written(keep_references, session.dir / "samples", checkpoint.references, samplings)
    pipeline = checkpoint.pipeline(setup.dtype, transformer, text=False)
    for name, component in pipeline.components.items():
        # The transformer stays where training has it, possibly on several devices; another expert takes turns with it.
        if isinstance(component, nn.Module) and name not in ("transformer", "transformer_2"):
            component.to(session.accelerator.device)
    VaeMemory.of(session.recipe.data).set(pipeline.vae)
    pipeline.set_progress_bar_config(disable=True)
    description = f"sampling at step {step}"
    bar = tqdm(inputs, desc=description, unit="sample", leave=False, disable=not session.is_main)
    adapter = other_adapter(setup.recipe, setup.checkpoint)
    with both_experts(pipeline, checkpoint, transformer, adapter):
        for index, (prompt_kwargs, sampling) in enumerate(bar):
            video, sound = checkpoint.generate_with_sound(pipeline, prompt_kwargs, sampling)
            sound_problem = unplayable(sound)
            # A broken sound costs the sound, not the picture.
            if sound_problem:
                session.say(
                    f"sample {index} of step {step} is written without sound: {sound_problem}"
                )
                sound = None
            path = session.dir / "samples" / f"step_{step:06d}" / f"prompt_{index:02d}"
            written(write_sample, path, video, session.recipe.data.fps, sound)
    # At most one: nothing is written after the first error.
    for error in unwritten:
        raise error


def _encoded(encoded: Precomputed, key: str, device: torch.device) -> Tensors:
    texts = encoded.clips.texts
    tensors, fault = texts.read(key, texts.first_spec([key]))
    if fault:
        raise DitLoraError(
            f"a validation prompt cannot be used: {fault}; start again: it is encoded anew"
        )
    # Moved here, because the pipeline does not move given embeddings.
    return {name: tensor[None].to(device) for name, tensor in tensors.items()}
