"""LTX-2's loss, computed once more straight from Diffusers' and Transformers' modules: none of our code has a part in it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLLTX2Video, LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf
from family_cases.subject import CPU, pixels_of
from ltx2_cases import CAPTIONS, FPS, for_recipe
from transformers import AutoTokenizer, Gemma3ForConditionalGeneration

from dit_lora.config.data import VideoShape
from dit_lora.numerics.streams import Streams

SHAPE = VideoShape(17, 64, 96)


@torch.no_grad()
def losses_by_diffusers(
    path: Path,
    kind: str,
    pixels: torch.Tensor,  # uint8 (B, F, 3, H, W)
    drawn: dict[str, torch.Tensor],
    sound: torch.Tensor | None,  # (B, L, W), normalised
) -> torch.Tensor:
    """The mean squared error of each sample's velocity; with sound, that of its sound added."""
    vae = AutoencoderKLLTX2Video.from_pretrained(path, subfolder="vae")
    transformer: Any = LTX2VideoTransformer3DModel.from_pretrained(path, subfolder="transformer")
    connectors = LTX2TextConnectors.from_pretrained(path, subfolder="connectors")
    gemma = Gemma3ForConditionalGeneration.from_pretrained(path / "text_encoder")
    tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer", padding_side="left")
    tokens = tokenizer(
        [one.strip() for one in CAPTIONS],
        padding="max_length",
        max_length=1024,
        truncation=True,
        return_tensors="pt",
    )
    states = gemma(**tokens, output_hidden_states=True).hidden_states
    text, of_sound, mask = connectors(torch.stack(states, dim=-1), tokens.attention_mask)
    mean, std = (t[:, None, None, None] for t in (vae.latents_mean, vae.latents_std))
    clean = (vae.encode(2 * (pixels.transpose(1, 2) / 255) - 1).latent_dist.mean - mean) / std
    size, sigma = clean.shape, drawn["timestep"]
    clean = clean.flatten(2).mT
    noisy = clean + sigma[:, None, None] * (drawn["noise"] - clean)
    timestep = (1000 * sigma)[:, None].repeat(1, noisy.shape[1])
    frame = size[3] * size[4]
    if kind == "i2v":
        first = [one.permute(1, 2, 0).numpy() for one in pixels[:, 0]]
        sent = torch.tensor(np.stack([apply_image_conditioning_crf(one, 33) for one in first]))
        pictures = 2 * (sent.permute(0, 3, 1, 2)[:, :, None] / 255) - 1
        latents = (vae.encode(pictures).latent_dist.mean - mean) / std
        noisy[:, :frame], timestep[:, :frame] = latents.flatten(2).mT, 0
    level, heard = sigma, torch.zeros(len(clean), 1, 16)
    if sound is not None:
        level = drawn["audio_timestep"]
        heard = sound + level[:, None, None] * (drawn["audio_noise"] - sound)
    video, audio = transformer(
        noisy, heard, text, of_sound, timestep, 1000 * level, 1000 * sigma, 1000 * level, mask, mask,
        *size[2:], FPS, heard.shape[1], isolate_modalities=sound is None, use_cross_timestep=True,
        return_dict=False,
    )  # fmt: skip
    errors = (video - (drawn["noise"] - clean)).square()
    losses = errors[:, frame if kind == "i2v" else 0 :].flatten(1).mean(1)
    if sound is not None:
        losses = losses + (audio - (drawn["audio_noise"] - sound)).square().flatten(1).mean(1)
    return losses


@pytest.mark.parametrize("with_sound", [False, True])
@pytest.mark.parametrize(("variant", "kind"), [("ltx-2", "t2v"), ("ltx-2.3", "i2v")])
def test_our_loss_is_that_of_diffusers_modules(
    tiny_checkpoints: dict[str, Path], variant: str, kind: str, with_sound: bool
) -> None:
    path = tiny_checkpoints[variant]
    checkpoint = for_recipe(path, model={"task": kind}, data={"sound": with_sound})
    generator = torch.Generator().manual_seed(7)
    pixels = torch.stack([pixels_of(SHAPE, generator) for _ in CAPTIONS])
    encode_video = checkpoint.load_video_encoder(torch.float32, CPU)
    encode_text = checkpoint.load_text_encoder(torch.float32, CPU)
    rows = [
        encode_video(clip) | {name: t[0] for name, t in encode_text([caption]).items()}
        for clip, caption in zip(pixels, CAPTIONS, strict=True)
    ]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    sound = torch.randn(len(CAPTIONS), 11, 16, generator=generator) if with_sound else None
    if sound is not None:
        batch["audio_latent_mean"] = sound
    streams = Streams(3, [1, 2, 3])
    drawn = streams.drawn(checkpoint.draws(batch), CPU)
    with torch.no_grad():
        ours = checkpoint.losses(checkpoint.load_transformer(torch.float32), batch, streams).losses
    theirs = losses_by_diffusers(path, kind, pixels, drawn, sound)
    assert len(set(drawn["timestep"].tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
