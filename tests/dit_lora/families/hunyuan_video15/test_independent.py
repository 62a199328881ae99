"""The loss of a batch, computed once more from Diffusers' modules alone."""

from pathlib import Path

import torch
from diffusers import HunyuanVideo15Pipeline
from family_cases.subject import CPU, pixels_of

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomInputs, RandomStreams

CAPTIONS = ["a red disc", "", 'a longer caption, of a sign with the word "open"']
SHAPE = VideoShape(5, 32, 48)


def losses_by_diffusers(path: Path, pixels: torch.Tensor, draws: RandomInputs) -> torch.Tensor:
    """The loss for pixels (B, F, 3, H, W), noises (B, 4, 3, 8, 12) and levels (B,)."""
    pipe = HunyuanVideo15Pipeline.from_pretrained(path)
    text, mask, quotes, quotes_mask = pipe.encode_prompt(CAPTIONS, CPU, batch_size=3)
    # One by one: the autoencoder's attention takes one video without slicing.
    posteriors = [pipe.vae.encode(video.transpose(0, 1)[None] / 127.5 - 1).latent_dist for video in pixels.float()]
    mean, std = (torch.cat([getattr(posterior, name) for posterior in posteriors]) for name in ("mean", "std"))
    clean = (mean + std * draws.tensors["posterior"]) * 1.03682
    noise, sigma = draws.tensors["noise"], draws.tensors["timestep"]
    s = sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - s) * clean + s * noise
    velocity = pipe.transformer(
        hidden_states=torch.cat([noisy, *pipe.prepare_cond_latents_and_mask(noisy, torch.float32, CPU)], dim=1),
        timestep=1000 * sigma,
        encoder_hidden_states=text,
        encoder_attention_mask=mask,
        encoder_hidden_states_2=quotes,
        encoder_attention_mask_2=quotes_mask,
        image_embeds=torch.zeros(3, 729, 12),
    ).sample
    return (velocity - (noise - clean)).square().mean(dim=(1, 2, 3, 4))


def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(tiny_checkpoints: dict[str, Path]) -> None:
    path, generator = tiny_checkpoints["hunyuan-video-1.5"], torch.Generator().manual_seed(6)
    checkpoint = get_family("hunyuan_video15").open(ModelConfig(family="hunyuan_video15", path=str(path)))
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_clip = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    clips = [pixels_of(SHAPE, generator) for _ in CAPTIONS]
    latents = [encode_clip(clip) for clip in clips]
    batch = {
        **{name: torch.stack([latent[name] for latent in latents]) for name in latents[0]},
        **encode_text(CAPTIONS),
    }
    noise = {
        name: draw([generator] * 3) for name, draw in checkpoint.denoiser.get_random_input_samplers(batch).items()
    }
    ahead = RandomInputs(0, (0, 1, 2), noise)
    with torch.no_grad():
        transformer = checkpoint.denoiser.load_transformer(torch.float32)
        ours = checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2], ahead)).losses
        theirs = losses_by_diffusers(path, torch.stack(clips), ahead)
    assert len(set(ours.tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
