"""The loss of a batch of Stable Diffusion 3.5, computed once more from Diffusers' and Transformers' modules alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from family_cases.subject import CPU, pixels_of
from transformers import AutoTokenizer, CLIPTextModelWithProjection, T5EncoderModel

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomStreams

CAPTIONS = ["a red disc", "", "a longer caption, of a green square below a blue disc, " * 4]


@torch.no_grad()
def losses_by_diffusers(path: Path, pixels: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of uint8 pixels (B, 3, H, W) with these draws: posterior, noise and noise level."""

    def ids(folder: str, length: int) -> torch.Tensor:
        tokenizer = AutoTokenizer.from_pretrained(path / folder)
        options: Any = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        return tokenizer(CAPTIONS, max_length=length, **options).input_ids

    hidden, pooled = [], []
    for number in ("", "_2"):
        clip = CLIPTextModelWithProjection.from_pretrained(path / f"text_encoder{number}")
        encoder_output = clip(ids(f"tokenizer{number}", 77), output_hidden_states=True)
        hidden.append(encoder_output.hidden_states[1])  # of two layers, the last but one
        pooled.append(encoder_output.text_embeds)
    t5 = T5EncoderModel.from_pretrained(path / "text_encoder_3")
    long = t5(ids("tokenizer_3", 256)).last_hidden_state
    text = torch.zeros(3, 77 + 256, long.shape[2])
    text[:, :77, : sum(states.shape[2] for states in hidden)] = torch.cat(hidden, dim=2)
    text[:, 77:] = long
    vae = AutoencoderKL.from_pretrained(path, subfolder="vae")
    latent = vae.encode(2 * (pixels / 255) - 1).latent_dist
    z = (latent.mean + latent.std * given["posterior"] - 0.0609) * 1.5305
    sigma = given["timestep"].view(3, 1, 1, 1)
    transformer: Any = SD3Transformer2DModel.from_pretrained(path, subfolder="transformer")
    velocity = transformer(
        hidden_states=(1 - sigma) * z + sigma * given["noise"],
        timestep=1000 * given["timestep"],
        encoder_hidden_states=text,
        pooled_projections=torch.cat(pooled, dim=1),
    ).sample
    return (velocity - (given["noise"] - z)).square().mean((1, 2, 3))


@pytest.mark.parametrize("variant", ["sd3.5-medium", "sd3.5-large"])
def test_our_loss_is_that_of_diffusers_modules(tiny_checkpoints: dict[str, Path], variant: str) -> None:
    path, generator = tiny_checkpoints[variant], torch.Generator().manual_seed(6)
    checkpoint = get_family("sd3").open(ModelConfig(family="sd3", path=str(path)))
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_picture = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pictures = [pixels_of(VideoShape(1, 48, 80), generator) for _ in CAPTIONS]
    rows = [encode_picture(picture) for picture in pictures]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch |= encode_text(CAPTIONS)
    streams = RandomStreams(3, [1, 2, 3])
    random_inputs = streams.draw_random_tensors(checkpoint.denoiser.get_random_input_samplers(batch), CPU)
    with torch.no_grad():
        ours = checkpoint.denoiser.losses(checkpoint.denoiser.load_transformer(torch.float32), batch, streams).losses
    theirs = losses_by_diffusers(path, torch.cat(pictures), random_inputs)
    assert len(set(ours.tolist())) == len(set(random_inputs["timestep"].tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
