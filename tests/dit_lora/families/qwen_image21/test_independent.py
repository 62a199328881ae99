"""The loss of a batch, computed once more from Diffusers' modules alone."""

from pathlib import Path

import torch
from diffusers import QwenImage21Pipeline
from family_cases.subject import CPU, pixels_of

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.families.qwen_image21.text import load_processor
from dit_lora.numerics.streams import RandomInputs, RandomStreams

CAPTIONS = ["a red disc", "", "a longer caption, of a green square below a blue disc"]
SHAPE = VideoShape(1, 64, 96)


def losses_by_diffusers(path: Path, pixels: torch.Tensor, draws: RandomInputs) -> torch.Tensor:
    """The loss for pixels (B, 3, H, W), noise of the posterior (B, 64, 1, 4, 6), noise (B, 24, 64) and levels (B,)."""
    pipe = QwenImage21Pipeline.from_pretrained(path, processor=load_processor(path))
    rgba = torch.cat([pixels.float() / 127.5 - 1, torch.ones_like(pixels[:, :1], dtype=torch.float32)], dim=1)
    posterior = pipe.vae.encode(rgba[:, :, None]).latent_dist
    latent = posterior.mean + posterior.std * draws.tensors["posterior"]
    config = pipe.vae.config
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
    clean = ((latent - mean) / std).flatten(2).transpose(1, 2)
    noise, sigma, losses = draws.tensors["noise"], draws.tensors["timestep"], []
    for row, caption in enumerate(CAPTIONS):
        text, _, is_image = pipe.encode_prompt(caption)
        noisy = (1 - sigma[row]) * clean[row] + sigma[row] * noise[row]
        velocity = pipe.transformer(
            hidden_states=noisy[None],
            timestep=sigma[row : row + 1],
            encoder_hidden_states=text,
            img_shapes=[[(1, 4, 6)]],
            img_mask=torch.cat([is_image, torch.ones(1, 6, dtype=torch.bool)], dim=1),
        ).sample[0, -24:]
        losses.append((velocity - (noise[row] - clean[row])).square().mean())
    return torch.stack(losses)


def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(tiny_checkpoints: dict[str, Path]) -> None:
    path, generator = tiny_checkpoints["qwen-image-2.1"], torch.Generator().manual_seed(6)
    checkpoint = get_family("qwen_image21").open(ModelConfig(family="qwen_image21", path=str(path)))
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_picture = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pictures = [pixels_of(SHAPE, generator) for _ in CAPTIONS]
    latents = [encode_picture(picture) for picture in pictures]
    batch = {
        **{name: torch.stack([latent[name] for latent in latents]) for name in latents[0]},
        **encode_text(CAPTIONS),
    }
    # Noise and timesteps as the family draws them.
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
