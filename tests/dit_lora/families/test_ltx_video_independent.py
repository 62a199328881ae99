"""LTX-Video's loss, recomputed directly from Diffusers' and Transformers' modules, without any of our code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel
from family_cases.subject import CPU, pixels_of
from transformers import AutoTokenizer, T5EncoderModel

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomStreams

CAPTIONS = ["clip 0", "a longer caption of another clip", "many words, " * 30]


@torch.no_grad()
def losses_by_diffusers(
    path: Path, task: str, pixels: torch.Tensor, given: dict[str, torch.Tensor], fps: float
) -> torch.Tensor:
    """The loss of uint8 clips (B, F, 3, H, W) with these draws; of image-to-video the first frame is given."""
    vae = AutoencoderKLLTXVideo.from_pretrained(path, subfolder="vae")
    transformer: Any = LTXVideoTransformer3DModel.from_pretrained(path, subfolder="transformer")
    tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer")
    options: Any = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    tokens = tokenizer(CAPTIONS, max_length=128, **options)
    text = T5EncoderModel.from_pretrained(path / "text_encoder")(tokens.input_ids)
    mean, std = (statistic[:, None, None, None] for statistic in (vae.latents_mean, vae.latents_std))
    video = 2 * (pixels.transpose(1, 2) / 255) - 1
    latent = vae.encode(video).latent_dist
    clean = (latent.mean + latent.std * given["posterior"] - mean) / std
    (b, c, f, h, w), level = clean.shape, given["timestep"][:, None, None, None, None]
    noise = given["noise"].view(b, f, h, w, c).movedim(-1, 1)  # a row of channels for each token
    hidden, timestep = (1 - level) * clean + level * noise, 1000 * given["timestep"]
    if task == "i2v":
        first_posterior = vae.encode(video[:, :, :1]).latent_dist
        hidden[:, :, :1] = (first_posterior.mean + first_posterior.std * given["image_posterior"] - mean) / std
        timestep = timestep[:, None].repeat(1, f * h * w)
        timestep[:, : h * w] = 0
    velocity = transformer(
        hidden_states=hidden.flatten(2).transpose(1, 2),
        encoder_hidden_states=text.last_hidden_state,
        timestep=timestep,
        encoder_attention_mask=tokens.attention_mask,
        num_frames=f,
        height=h,
        width=w,
        rope_interpolation_scale=(8 / fps, 32, 32),
    ).sample
    error = (velocity.view(b, f, h, w, c).movedim(-1, 1) - (noise - clean)).square()
    return (error[:, :, 1:] if task == "i2v" else error).flatten(1).mean(1)


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_our_loss_is_that_of_diffusers_modules(tiny_checkpoints: dict[str, Path], task: Any) -> None:
    path, family = tiny_checkpoints["ltx-video"], get_family("ltx_video")
    opened = family.open(ModelConfig(family="ltx_video", path=str(path), task=task))
    checkpoint = opened.copy_with_training_metadata({"video": {"fps": 12.5}})
    generator = torch.Generator().manual_seed(7)
    pixels = torch.stack([pixels_of(VideoShape(17, 64, 96), generator) for _ in CAPTIONS])
    encode_video = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(CAPTIONS)
    rows = [encode_video(clip) for clip in pixels]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]} | text
    streams = RandomStreams(3, [1, 2, 3])
    random_inputs = dict(streams.draw_random_tensors(checkpoint.denoiser.get_random_input_samplers(batch), CPU))
    with torch.no_grad():
        ours = checkpoint.denoiser.losses(checkpoint.denoiser.load_transformer(torch.float32), batch, streams).losses
    theirs = losses_by_diffusers(path, task, pixels, random_inputs, 12.5)
    assert len(set(random_inputs["timestep"].tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
