"""The loss of a batch, computed once more from Diffusers' modules alone."""

from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from family_cases.subject import CPU, pixels_of

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomInputs, RandomStreams

CAPTIONS = ("a red disc", "", "a longer caption, of a green square below a blue disc")
SHAPE = VideoShape(1, 48, 80)


def losses_by_diffusers(
    path: Path, pixels: torch.Tensor, drawn: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor
) -> torch.Tensor:
    """The loss for pixels (B, 3, H, W), the posterior's noise, noise (B, tokens, channels) and noise levels (B,)."""
    pipe = DiffusionPipeline.from_pretrained(path)
    text, mask = pipe.encode_prompt(list(CAPTIONS))
    posterior = pipe.vae.encode(pixels[:, :, None].float() / 127.5 - 1).latent_dist
    z = posterior.mean + posterior.std * drawn
    mean, std = (
        torch.tensor(values)[None, :, None, None, None]
        for values in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    z = ((z - mean) / std)[:, :, 0]
    b, c, h, w = z.shape
    z = z.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
    s = sigma.view(b, 1, 1)
    velocity = pipe.transformer(
        hidden_states=(1 - s) * z + s * noise,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=mask,
        timestep=sigma * 1000 / 1000,
        img_shapes=[[(1, h // 2, w // 2)]] * b,
    ).sample
    return (velocity - (noise - z)).square().mean(dim=(1, 2))


def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """All captions at once, as the pipeline pads them; ours are encoded one by one."""
    path, generator = tiny_checkpoints["qwen-image"], torch.Generator().manual_seed(6)
    checkpoint = get_family("qwen_image").open(ModelConfig(family="qwen_image", path=str(path)))
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_picture = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pictures = [pixels_of(SHAPE, generator) for _ in CAPTIONS]
    rows = [encode_picture(picture) for picture in pictures]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    # As wide as the latents themselves, so that a wrong draw would show.
    batch["latent_logvar"] = batch["latent_logvar"] + 6
    batch |= encode_text(CAPTIONS)
    posterior_noise = torch.randn(3, 16, 1, 6, 10, generator=generator)
    noise = torch.randn(3, 15, 64, generator=generator)
    # Of the checkpoint's own density, as it is drawn.
    sigma = checkpoint.denoiser.get_random_input_samplers(batch)["timestep"]([generator] * 3)
    random_inputs = {"posterior": posterior_noise, "noise": noise, "timestep": sigma}
    ahead = RandomInputs(0, (0, 1, 2), random_inputs)
    with torch.no_grad():
        transformer = checkpoint.denoiser.load_transformer(torch.float32)
        ours = checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2], ahead)).losses
        wide = posterior_noise * torch.e**3  # the deviation of a log variance that is 6 larger
        theirs = losses_by_diffusers(path, torch.cat(pictures), wide, noise, sigma)
    assert len(set(ours.tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
