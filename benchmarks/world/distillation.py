"""Distils guidance into the demo's base, so that one prediction equals two of the base combined."""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from diffusers import CogVideoXPipeline
from tqdm import tqdm

from dit_lora.data.synthetic.scenes import KNOWN_SHAPES, draw_scene, render_scene

_LR = 4e-4
_WARMUP_STEPS = 20
_EMPTY_SHARE = 0.1
"""Share of the samples that have an empty caption, whose target is the base's own prediction."""
_EMA = 0.99


def distil_guidance(
    base: Path, folder: Path, *, guidance: float, steps: int, num_clips: int, batch_size: int = 8, seed: int = 0
) -> float:
    """Train a copy of the base to predict u + guidance (c - u) in one call, and save its pipeline in `folder`.

    c is the base's prediction for the caption, u its prediction for an empty one. For an empty caption the copy
    learns u.

    Args:
        base: A CogVideoX pipeline of the demo's size.
        folder: Where the pipeline is saved, with the base's files except for the transformer's, which is in fp32.
        guidance: The guidance that is distilled.
        steps: Steps of `batch_size` samples, with AdamW and a cosine schedule.
        num_clips: Rendered clips of shapes that the base knows.
        batch_size: Samples of a step.
        seed: Seed of clips, noise and timesteps.

    Returns:
        The mean of the last tenth of the losses: squared differences of velocities, whose own square is about 1.
    """
    generator = torch.Generator().manual_seed(seed)
    pipeline: Any = CogVideoXPipeline.from_pretrained(base, torch_dtype=torch.float32, local_files_only=True)
    latents, prompt_embeds, empty_embeds = _encode_clips(pipeline, num_clips, generator)
    teacher = pipeline.transformer.requires_grad_(False).eval()
    student = deepcopy(teacher).requires_grad_(True)
    averaged = deepcopy(teacher)
    rotary = pipeline._prepare_rotary_positional_embeddings(64, 64, latents.shape[1], torch.device("cpu"))
    optimizer = torch.optim.AdamW(student.parameters(), lr=_LR, betas=(0.9, 0.99), weight_decay=0)
    losses = []
    progress = tqdm(range(steps), desc="distillation", mininterval=10)
    for step in progress:
        for group in optimizer.param_groups:
            decay = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / steps)).item())
            group["lr"] = _LR * min(1, (step + 1) / _WARMUP_STEPS) * decay
        indices = torch.randint(len(latents), (batch_size,), generator=generator)
        clean, captions = latents[indices], prompt_embeds[indices]
        noise = torch.randn(clean.shape, generator=generator)
        timesteps = torch.randint(pipeline.scheduler.config.num_train_timesteps, (batch_size,), generator=generator)
        noisy = pipeline.scheduler.add_noise(clean, noise, timesteps)
        is_empty = torch.rand(batch_size, generator=generator) < _EMPTY_SHARE
        captions = torch.where(is_empty[:, None, None], empty_embeds, captions)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                embeds = torch.cat([captions, empty_embeds.expand_as(captions)])
                conditional, unconditional = _predict(teacher, noisy.repeat(2, 1, 1, 1, 1), embeds, timesteps, rotary)
            prediction = _predict(student, noisy, captions, timesteps, rotary)[0]
        # For an empty caption both predictions are equal, and so is the target.
        loss = (prediction - (unconditional + guidance * (conditional - unconditional))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            for mean, parameter in zip(averaged.parameters(), student.parameters(), strict=True):
                mean.lerp_(parameter, 1 - min(_EMA, (step + 1) / (step + 10)))
        progress.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
    # Renamed when it is whole, so that a run that was stopped starts again.
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(base, partial, ignore=shutil.ignore_patterns("transformer"))
    averaged.save_pretrained(partial / "transformer")
    partial.rename(folder)
    recent = losses[-max(1, steps // 10) :]
    return sum(recent) / len(recent)


@torch.no_grad()
def _encode_clips(
    pipeline: Any, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents (count, F, C, H, W), embeddings of the captions (count, T, D), and of the empty caption (1, T, D)."""
    scenes = [draw_scene(generator, KNOWN_SHAPES) for _ in range(count)]
    chunks = []
    for start in tqdm(range(0, count, 8), desc="latents", mininterval=10):
        videos = torch.stack([render_scene(scene, generator) for scene in scenes[start : start + 8]])
        pixels = videos.permute(0, 4, 1, 2, 3) / 127.5 - 1
        posterior = pipeline.vae.encode(pixels).latent_dist
        chunks.append(posterior.sample(generator).transpose(1, 2) * pipeline.vae.config.scaling_factor)
    captions = ["", *(scene.caption for scene in scenes)]
    length = pipeline.transformer.config.max_text_seq_length
    embeds, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=length)
    return torch.cat(chunks), embeds[1:], embeds[:1]


def _predict(
    transformer: Any,
    noisy: torch.Tensor,
    embeds: torch.Tensor,
    timesteps: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Velocities in fp32, in parts of as many samples as there are timesteps."""
    output = transformer(
        hidden_states=noisy,
        encoder_hidden_states=embeds,
        timestep=timesteps.repeat(len(noisy) // len(timesteps)),
        image_rotary_emb=rotary,
        return_dict=False,
    )[0]
    return output.float().split(len(timesteps))
