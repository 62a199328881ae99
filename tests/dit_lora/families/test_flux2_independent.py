"""The loss of a batch, computed once more from Diffusers' modules alone."""

from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from family_cases.subject import CPU, pixels_of

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomInputs, RandomStreams

CAPTIONS = ("a red disc", "", "a longer caption, of a green square below a blue disc")
SHAPE = VideoShape(1, 48, 80)


def losses_by_diffusers(path: Path, pixels: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """The loss for pixels (B, 3, H, W), noise (B, tokens, channels) and noise levels (B,).

    Klein has no guidance, dev a guidance of 1.
    """
    pipe = DiffusionPipeline.from_pretrained(path)
    text = torch.cat([pipe.encode_prompt(caption)[0] for caption in CAPTIONS])
    z = pipe.vae.encode(pixels.float() / 127.5 - 1).latent_dist.mode()
    (b, c, h, w), bn = z.shape, pipe.vae.bn
    z = z.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
    z = (z - bn.running_mean) / torch.sqrt(bn.running_var + pipe.vae.config.batch_norm_eps)
    s = sigma.view(b, 1, 1)
    ids = torch.zeros(z.shape[1], 4, dtype=torch.int64)
    ids[:, 1] = torch.arange(z.shape[1]) // (w // 2)
    ids[:, 2] = torch.arange(z.shape[1]) % (w // 2)
    text_ids = torch.zeros(text.shape[1], 4, dtype=torch.int64)
    text_ids[:, 3] = torch.arange(text.shape[1])
    velocity = pipe.transformer(
        hidden_states=(1 - s) * z + s * noise,
        encoder_hidden_states=text,
        timestep=sigma * 1000 / 1000,
        img_ids=ids,
        txt_ids=text_ids,
        guidance=torch.ones(b) if pipe.transformer.config.guidance_embeds else None,
    ).sample
    return (velocity - (noise - z)).square().mean(dim=(1, 2))


@pytest.mark.parametrize("variant", ["flux2-klein", "flux2-dev"])
def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    path, generator = tiny_checkpoints[variant], torch.Generator().manual_seed(6)
    checkpoint = get_family("flux2").open(ModelConfig(family="flux2", path=str(path)))
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_picture = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pictures = [pixels_of(SHAPE, generator) for _ in CAPTIONS]
    batch = {
        "latent_mean": torch.stack([encode_picture(picture)["latent_mean"] for picture in pictures]),
        **encode_text(CAPTIONS),
    }
    noise = torch.randn(3, 15, 16, generator=generator)
    # Of the checkpoint's own density, as it is drawn.
    sigma = checkpoint.denoiser.get_random_input_samplers(batch)["timestep"]([generator] * 3)
    ahead = RandomInputs(0, (0, 1, 2), {"noise": noise, "timestep": sigma})
    with torch.no_grad():
        transformer = checkpoint.denoiser.load_transformer(torch.float32)
        ours = checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2], ahead)).losses
        theirs = losses_by_diffusers(path, torch.cat(pictures), noise, sigma)
    assert len(set(ours.tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
