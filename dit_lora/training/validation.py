"""Held-out loss and samples during training, on the trained weights themselves: nothing is cast."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import nn
from tqdm import tqdm

from dit_lora.data.training_set import TrainingSet
from dit_lora.data.video import write_sample
from dit_lora.data_config import VideoShape
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Checkpoint, Sampling, Tensors
from dit_lora.numerics.streams import Streams, fold
from dit_lora.training.precompute import Precomputed
from dit_lora.training.runtime import Runtime, agree
from dit_lora.training.task import Trained


def held_out_loss(
    runtime: Runtime, checkpoint: Trained, model: nn.Module, clips: TrainingSet
) -> float | None:
    """Mean loss over noise and timesteps that training never draws; the same draws at every call.

    Ranks share the draws. Clips whose cache entry is bad are left out, and said; training stops at them.
    None where `validation.held_out_draws` is 0.
    """
    settings, accelerator = runtime.recipe.validation, runtime.accelerator
    entries = clips.entries[: settings.held_out_clips]
    draws = [
        (index, draw) for index in range(len(entries)) for draw in range(settings.held_out_draws)
    ]
    if not draws:
        return None
    seed = fold(runtime.recipe.train.seed, "held_out")
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # of losses, of draws
    faults: dict[str, str] = {}
    with evaluating(model):
        for index, draw in draws[accelerator.process_index :: accelerator.num_processes]:
            entry = entries[index]
            sample = clips.sample(entry, index * settings.held_out_draws + draw)
            if sample.faults:
                faults |= sample.faults
                continue
            batch = sample.to(accelerator.device)
            streams = Streams(seed, batch.draws)
            output = checkpoint.losses(accelerator.unwrap_model(model), batch.tensors, streams)
            sums += torch.stack([output.losses.double().sum(), torch.ones_like(sums[0])])
    for sample_id, fault in dict(gather_object(list(faults.items()))).items():
        runtime.say(f"held-out loss leaves out {sample_id}: {fault}")
    total, count = accelerator.reduce(sums, reduction="sum").tolist()
    return total / count if count else None


def sample_videos(
    runtime: Runtime, checkpoint: Checkpoint, model: nn.Module, encoded: Precomputed, step: int
) -> None:
    """Write samples/step_NNNNNN/prompt_NN.mp4 (an image: .png) for each validation prompt, all from one seed.

    The stock pipeline denoises with the transformer in training, under the autocast that training uses.
    """
    if not runtime.recipe.validation.prompts:
        return
    error = None
    if runtime.is_main:
        try:
            _sample_on_main(runtime, checkpoint, model, encoded, step)
        except DitLoraError as problem:
            error = problem
    agree(runtime.accelerator, error)


def _sample_on_main(
    runtime: Runtime, checkpoint: Checkpoint, model: nn.Module, encoded: Precomputed, step: int
) -> None:
    settings, data = runtime.recipe.validation, runtime.recipe.data
    transformer = runtime.accelerator.unwrap_model(model)
    pipeline = checkpoint.pipeline(runtime.precision.dtype, transformer, text=False)
    pipeline.to(runtime.accelerator.device)
    pipeline.set_progress_bar_config(disable=True)
    device = runtime.accelerator.device
    negative = _encoded(encoded, encoded.clips.empty_text_key, device)
    bar = tqdm(encoded.prompt_keys, desc=f"sampling at step {step}", unit="sample", leave=False)
    for index, key in enumerate(bar):
        conditions = checkpoint.conditions(_encoded(encoded, key, device), negative)
        how = Sampling(
            VideoShape.of(data),
            settings.inference_steps,
            settings.guidance_scale,
            settings.seed,
            image=Path(settings.images[index]) if settings.images else None,
        )
        with evaluating(model):
            video = checkpoint.generate(pipeline, conditions, how)
        write_sample(
            runtime.dir / "samples" / f"step_{step:06d}" / f"prompt_{index:02d}", video, data.fps
        )


def _encoded(encoded: Precomputed, key: str, device: torch.device) -> Tensors:
    texts = encoded.clips.texts
    tensors, fault = texts.read(key, texts.first_spec([key]))
    if fault:
        raise DitLoraError(
            f"a validation prompt cannot be used: {fault}; start again: it is encoded anew"
        )
    # The pipeline leaves given ones where they are.
    return {name: tensor[None].to(device) for name, tensor in tensors.items()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout, then training as before."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
