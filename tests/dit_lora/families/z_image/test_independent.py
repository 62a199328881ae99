"""The loss of a batch, computed once more from Diffusers' modules alone."""

from pathlib import Path

import pytest
import torch
from diffusers import ZImagePipeline
from family_cases.subject import CPU, pixels_of

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomInputs, RandomStreams

CAPTIONS = ["a red disc", "", "a longer caption, of a green square below a blue disc"]
SHAPE = VideoShape(1, 48, 80)


def losses_by_diffusers(path: Path, pixels: torch.Tensor, draws: RandomInputs) -> torch.Tensor:
    """The loss for pixels (B, 3, H, W), noise of the posterior, noise (B, 4, 6, 10) and noise levels (B,)."""
    pipe = ZImagePipeline.from_pretrained(path)
    captions, _ = pipe.encode_prompt(CAPTIONS, do_classifier_free_guidance=False)
    posterior = pipe.vae.encode(pixels.float() / 127.5 - 1).latent_dist
    latent = posterior.mean + posterior.std * draws.tensors["posterior"]
    clean = (latent - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    noise, sigma = draws.tensors["noise"], draws.tensors["timestep"]
    s = sigma.view(-1, 1, 1, 1)
    noisy = (1 - s) * clean + s * noise
    outputs = pipe.transformer(
        [sample[:, None] for sample in noisy],  # one frame
        1 - sigma,  # time runs from noise to clean
        captions,
    ).sample
    velocity = -torch.stack([output[:, 0] for output in outputs])
    return (velocity - (noise - clean)).square().mean(dim=(1, 2, 3))


@pytest.mark.parametrize("variant", ["z-image", "z-image-turbo"])
def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(
    tiny_checkpoints: dict[str, Path], variant: str
) -> None:
    path, generator = tiny_checkpoints[variant], torch.Generator().manual_seed(6)
    checkpoint = get_family("z_image").open(ModelConfig(family="z_image", path=str(path)))
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_picture = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pictures = [pixels_of(SHAPE, generator) for _ in CAPTIONS]
    latents = [encode_picture(picture) for picture in pictures]
    batch = {
        **{name: torch.stack([latent[name] for latent in latents]) for name in latents[0]},
        **encode_text(CAPTIONS),
    }
    # Of the checkpoint's own density, as it is drawn.
    noise = {
        name: draw([generator] * 3) for name, draw in checkpoint.denoiser.get_random_input_samplers(batch).items()
    }
    ahead = RandomInputs(0, (0, 1, 2), noise)
    with torch.no_grad():
        transformer = checkpoint.denoiser.load_transformer(torch.float32)
        ours = checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2], ahead)).losses
        theirs = losses_by_diffusers(path, torch.cat(pictures), ahead)
    assert len(set(ours.tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0)
