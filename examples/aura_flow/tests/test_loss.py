"""The loss of AuraFlow, computed once more with Diffusers' and Transformers' modules only."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AuraFlowTransformer2DModel, AutoencoderKL
from transformers import AutoTokenizer, UMT5EncoderModel

from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomStreams

CAPTIONS = ["a red disc", "", "a longer caption, of a green square below a blue disc, " * 4]
CPU = torch.device("cpu")


@torch.no_grad()
def compute_reference_losses(path: Path, pixels: torch.Tensor, draws: dict[str, torch.Tensor]) -> torch.Tensor:
    """Losses (B,) of uint8 pixels (B, 3, H, W) with these random tensors: posterior, noise and noise level."""
    tokenizer = AutoTokenizer.from_pretrained(path / "tokenizer")
    options: Any = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    tokens = tokenizer(CAPTIONS, max_length=256, **options)
    states = UMT5EncoderModel.from_pretrained(path / "text_encoder")(**tokens).last_hidden_state
    vae: Any = AutoencoderKL.from_pretrained(path, subfolder="vae")
    posterior = vae.encode(2 * (pixels / 255) - 1).latent_dist
    clean = (posterior.mean + posterior.std * draws["posterior"]) * 0.13025
    sigma = draws["timestep"].view(3, 1, 1, 1)
    transformer: Any = AuraFlowTransformer2DModel.from_pretrained(path, subfolder="transformer")
    velocity = transformer(
        (1 - sigma) * clean + sigma * draws["noise"],
        encoder_hidden_states=states * tokens.attention_mask[..., None],
        timestep=draws["timestep"],
    ).sample
    return (velocity - (draws["noise"] - clean)).square().mean((1, 2, 3))


def test_the_loss_equals_that_of_diffusers_modules(tmp_path: Path) -> None:
    path, family = tmp_path / "tiny", get_family("aura_flow")
    family.build_tiny_checkpoint("aura-flow", path, seed=0)
    checkpoint = family.open(ModelConfig(family="aura_flow", path=str(path)))
    encode_picture = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    generator = torch.Generator().manual_seed(6)
    pixels = torch.randint(0, 256, (3, 3, 48, 80), generator=generator).to(torch.uint8)
    rows = [encode_picture(picture[None]) for picture in pixels]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch |= checkpoint.encoders.load_text_encoder(torch.float32, CPU)(CAPTIONS)
    streams = RandomStreams(3, [1, 2, 3])
    draws = streams.draw_random_tensors(checkpoint.denoiser.get_random_input_samplers(batch), CPU)
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    with torch.no_grad():
        losses = checkpoint.denoiser.losses(transformer, batch, streams).losses
    assert len(set(losses.tolist())) == 3
    torch.testing.assert_close(losses, compute_reference_losses(path, pixels, draws), rtol=1e-6, atol=0)
