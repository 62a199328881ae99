"""Wan's loss, recomputed directly from Diffusers' and Transformers' modules, without any of our code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from family_cases.subject import CPU, pixels_of
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPVisionModel, UMT5EncoderModel

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomStreams

CAPTIONS = ["clip 0", "a longer caption of another clip", "many words, " * 30]


@torch.no_grad()
def losses_by_diffusers(
    path: Path,
    kind: str,
    pixels: torch.Tensor,  # uint8 (B, F, 3, H, W)
    sigma: torch.Tensor,
    noise: torch.Tensor,
    posterior: torch.Tensor,
) -> torch.Tensor:
    """The mean squared error of each sample's velocity at noise level `sigma`."""
    vae = AutoencoderKLWan.from_pretrained(path, subfolder="vae")
    transformer: Any = WanTransformer3DModel.from_pretrained(path, subfolder="transformer")
    text = UMT5EncoderModel.from_pretrained(path / "text_encoder")
    tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer")
    tokens = tokenizer(CAPTIONS, padding="max_length", max_length=512, return_tensors="pt")
    mask = tokens.attention_mask
    prompt = text(tokens.input_ids, mask).last_hidden_state * mask[:, :, None]
    mean, std = (torch.tensor(v)[:, None, None, None] for v in (vae.config.latents_mean, vae.config.latents_std))
    video = 2 * (pixels.transpose(1, 2) / 255) - 1
    latent = vae.encode(video).latent_dist
    clean = (latent.mean + latent.std * posterior - mean) / std
    level = sigma[:, None, None, None, None]
    hidden, timestep, embeds = (1 - level) * clean + level * noise, 1000 * sigma, None
    if kind == "i2v":
        video[:, :, 1:] = 0
        condition = (vae.encode(video).latent_dist.mean - mean) / std
        mask_channels = torch.zeros_like(clean[:, :4])
        mask_channels[:, :, 0] = 1
        hidden = torch.cat([hidden, mask_channels, condition], dim=1)
        first_frames = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in pixels[:, 0]]
        processor = CLIPImageProcessor.from_pretrained(path / "image_processor")
        clip = CLIPVisionModel.from_pretrained(path / "image_encoder")
        pictures = processor(images=first_frames, return_tensors="pt").pixel_values
        embeds = clip(pictures, output_hidden_states=True).hidden_states[-2]
    if kind == "5b-i2v":
        hidden[:, :, :1] = (vae.encode(video[:, :, :1]).latent_dist.mean - mean) / std
        tokens_of_frame = hidden.shape[3] * hidden.shape[4] // 4
        timestep = timestep[:, None].repeat(1, hidden.shape[2] * tokens_of_frame)
        timestep[:, :tokens_of_frame] = 0
    velocity = transformer(hidden, timestep, prompt, embeds).sample
    error = (velocity - (noise - clean)).square()
    return (error[:, :, 1:] if kind == "5b-i2v" else error).flatten(1).mean(1)


@pytest.mark.parametrize(
    ("kind", "variant", "task"),
    [
        ("t2v", "wan-2.1-t2v", None),
        ("i2v", "wan-2.1-i2v", None),
        ("5b-i2v", "wan-2.2-ti2v-5b", "i2v"),
    ],
)
def test_our_loss_is_that_of_diffusers_modules(
    tiny_checkpoints: dict[str, Path], kind: str, variant: str, task: Any
) -> None:
    path = tiny_checkpoints[variant]
    checkpoint = get_family("wan").open(ModelConfig(family="wan", path=str(path), task=task))
    generator = torch.Generator().manual_seed(7)
    pixels = torch.stack([pixels_of(VideoShape(13, 64, 96), generator) for _ in CAPTIONS])
    encode_video = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    rows = [
        encode_video(clip) | {name: t[0] for name, t in encode_text([caption]).items()}
        for clip, caption in zip(pixels, CAPTIONS, strict=True)
    ]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    streams = RandomStreams(3, [1, 2, 3])
    random_inputs = streams.draw_random_tensors(checkpoint.denoiser.get_random_input_samplers(batch), CPU)
    with torch.no_grad():
        ours = checkpoint.denoiser.losses(checkpoint.denoiser.load_transformer(torch.float32), batch, streams).losses
    theirs = losses_by_diffusers(
        path,
        kind,
        pixels,
        random_inputs["timestep"],
        random_inputs["noise"],
        random_inputs["posterior"],
    )
    assert len(set(random_inputs["timestep"].tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
