"""The loss of a batch, computed once more from Diffusers' modules alone."""

from pathlib import Path

import torch
from diffusers import Ideogram4Pipeline
from family_cases.subject import CPU, pixels_of

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomInputs, RandomStreams

CAPTIONS = ['{"high_level_description":"a red disc"}', "", "a longer caption, of a green square below a blue disc"]
SHAPE = VideoShape(1, 48, 80)


def losses_by_diffusers(path: Path, pixels: torch.Tensor, draws: RandomInputs) -> torch.Tensor:
    """The loss for pixels (B, 3, H, W), noise (B, 15, 16) and noise levels (B,)."""
    pipe = Ideogram4Pipeline.from_pretrained(path)
    text, positions, segments, indicator = pipe.encode_prompt(CAPTIONS, 3, 5, 128, CPU)
    latent = pipe.vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode()
    # Diffusers' training script packs so: columns of a square, then its channels, are innermost.
    tokens = latent.view(3, 4, 3, 2, 5, 2).permute(0, 2, 4, 3, 5, 1).reshape(3, 15, 16)
    std = (pipe.vae.bn.running_var + pipe.vae.config.batch_norm_eps).sqrt()
    clean = (tokens - pipe.vae.bn.running_mean) / std
    noise, sigma = draws.tensors["noise"], draws.tensors["timestep"]
    s = sigma.view(-1, 1, 1)
    noisy = (1 - s) * clean + s * noise
    output = pipe.transformer(
        hidden_states=torch.cat([torch.zeros(3, 128, 16), noisy], dim=1),
        timestep=1 - sigma,
        encoder_hidden_states=text,
        position_ids=positions,
        segment_ids=segments,
        indicator=indicator,
    ).sample
    return (output[:, 128:] - (clean - noise)).square().mean(dim=(1, 2))


def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(tiny_checkpoints: dict[str, Path]) -> None:
    path, generator = tiny_checkpoints["ideogram-4"], torch.Generator().manual_seed(6)
    checkpoint = get_family("ideogram4").open(ModelConfig(family="ideogram4", path=str(path)))
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_picture = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pictures = [pixels_of(SHAPE, generator) for _ in CAPTIONS]
    latents = [encode_picture(picture) for picture in pictures]
    batch = {
        **{name: torch.stack([latent[name] for latent in latents]) for name in latents[0]},
        **encode_text(CAPTIONS),
    }
    # Drawn with the checkpoint's density of noise levels.
    noise = {
        name: draw([generator] * 3) for name, draw in checkpoint.denoiser.get_random_input_samplers(batch).items()
    }
    ahead = RandomInputs(0, (0, 1, 2), noise)
    with torch.no_grad():
        transformer = checkpoint.denoiser.load_transformer(torch.float32)
        ours = checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2], ahead)).losses
        theirs = losses_by_diffusers(path, torch.cat(pictures), ahead)
    assert len(set(ours.tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
