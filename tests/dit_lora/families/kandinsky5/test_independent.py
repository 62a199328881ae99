"""The loss of a batch, computed once more from Diffusers' modules alone."""

from pathlib import Path

import torch
from diffusers import Kandinsky5T2VPipeline
from family_cases.kandinsky5 import LATENTS
from family_cases.subject import CPU, pixels_of

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.families.qwen_image.picture_text import PictureProcessor
from dit_lora.numerics.streams import RandomInputs, RandomStreams

CAPTIONS = ["a red disc", "", "a longer caption, of a green square below a blue disc"]
SHAPE = VideoShape(9, 64, 96)


def losses_by_diffusers(path: Path, pixels: torch.Tensor, draws: RandomInputs) -> torch.Tensor:
    """The loss for clips (B, 9, 3, 64, 96), noises (B, C, 3, 8, 12) of posterior and latents, and levels (B,)."""
    processor = PictureProcessor.from_pretrained(path / "tokenizer")
    pipe = Kandinsky5T2VPipeline.from_pretrained(path, tokenizer=processor)
    posterior = pipe.vae.encode(pixels.transpose(1, 2).float() / 127.5 - 1).latent_dist
    latent = posterior.mean + posterior.std * draws.tensors["posterior"]
    clean = latent * pipe.vae.config.scaling_factor
    noise, sigma, losses = draws.tensors["noise"], draws.tensors["timestep"], []
    for row, caption in enumerate(CAPTIONS):
        text, pooled, lengths = pipe.encode_prompt(caption)
        noisy = ((1 - sigma[row]) * clean[row] + sigma[row] * noise[row]).movedim(0, -1)[None]
        nothing = torch.zeros(1, 3, 8, 12, LATENTS + 1)  # no first frame
        velocity = pipe.transformer(
            hidden_states=torch.cat([noisy, nothing], dim=-1),
            encoder_hidden_states=text,
            timestep=1000 * sigma[row : row + 1],
            pooled_projections=pooled,
            visual_rope_pos=[torch.arange(3), torch.arange(4), torch.arange(6)],
            text_rope_pos=torch.arange(int(lengths[-1])),
            scale_factor=(1, 3.16, 3.16),  # outside of 480 to 854 pixels
        ).sample[0]
        losses.append((velocity.movedim(-1, 0) - (noise[row] - clean[row])).square().mean())
    return torch.stack(losses)


def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(tiny_checkpoints: dict[str, Path]) -> None:
    path, generator = tiny_checkpoints["kandinsky-5-t2v"], torch.Generator().manual_seed(6)
    checkpoint = get_family("kandinsky5").open(ModelConfig(family="kandinsky5", path=str(path)))
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_video = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    clips = [pixels_of(SHAPE, generator) for _ in CAPTIONS]
    latents = [encode_video(clip) for clip in clips]
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
        theirs = losses_by_diffusers(path, torch.stack(clips), ahead)
    assert len(set(ours.tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
