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


def losses_by_diffusers(path: Path, pixels: torch.Tensor, drawn: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of pixels (B, 3, H, W) with all pads in place, as the pipeline would have them."""
    pipe = DiffusionPipeline.from_pretrained(path)
    text, mask = pipe.encode_prompt(list(CAPTIONS))
    posterior = pipe.vae.encode(pixels[:, :, None].float() / 127.5 - 1).latent_dist
    mean, std = (torch.tensor(pipe.vae.config[n]).view(1, -1, 1, 1, 1) for n in ("latents_mean", "latents_std"))
    z = (posterior.mean + posterior.std * drawn["posterior"] - mean) / std
    b, c, _, h, w = z.shape
    z = z.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
    s, noise = drawn["timestep"].view(b, 1, 1), drawn["noise"]
    tokens = torch.arange(z.shape[1])
    ids = torch.zeros(text.shape[1] + len(tokens), 3)
    ids[text.shape[1] :, 1:] = torch.stack([tokens // (w // 2), tokens % (w // 2)], dim=1)
    velocity = pipe.transformer(
        hidden_states=(1 - s) * z + s * noise,
        encoder_hidden_states=text,
        timestep=drawn["timestep"],
        position_ids=ids,
        encoder_attention_mask=mask,
    ).sample
    return (velocity - (noise - z)).square().mean(dim=(1, 2))


def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(
    tiny_checkpoints: dict[str, Path],
) -> None:
    path, generator = tiny_checkpoints["krea2-raw"], torch.Generator().manual_seed(6)
    checkpoint = get_family("krea2").open(ModelConfig(family="krea2", path=str(path)))
    encode_text = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_picture = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pictures = [pixels_of(SHAPE, generator) for _ in CAPTIONS]
    encodings = [encode_picture(picture) for picture in pictures]
    batch = {name: torch.stack([encoding[name] for encoding in encodings]) for name in encodings[0]}
    batch |= encode_text(CAPTIONS)
    # Of the checkpoint's own density, as it is drawn.
    noise = {
        name: draw([generator] * 3) for name, draw in checkpoint.denoiser.get_random_input_samplers(batch).items()
    }
    with torch.no_grad():
        transformer = checkpoint.denoiser.load_transformer(torch.float32)
        ahead = RandomInputs(0, (0, 1, 2), noise)
        ours = checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2], ahead)).losses
        theirs = losses_by_diffusers(path, torch.cat(pictures), noise)
    assert len(set(ours.tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
