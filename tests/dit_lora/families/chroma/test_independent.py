"""The loss of a batch, computed once more from Diffusers' modules alone, with pads that attention cannot see."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ChromaPipeline
from family_cases.subject import CPU, pixels_of

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.numerics.streams import RandomInputs, RandomStreams
from dit_lora.training.execution.activation_checkpointing import set_checkpointing

CAPTIONS = ["a red disc", "", "a longer caption, of a green square below a blue disc"]
SHAPE = VideoShape(1, 48, 80)


def losses_by_diffusers(path: Path, pixels: torch.Tensor, drawn: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of pixels (B, 3, H, W) with all 512 tokens of text, whose pads but one no query attends to."""
    pipe = ChromaPipeline.from_pretrained(path)
    text, text_ids, mask = pipe.encode_prompt(CAPTIONS, do_classifier_free_guidance=False)[:3]
    posterior = pipe.vae.encode(pixels.float() / 127.5 - 1).latent_dist
    latent = posterior.mean + posterior.std * drawn["posterior"]
    clean = (latent - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    b, c, h, w = clean.shape
    clean = clean.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
    tokens = torch.arange(clean.shape[1])
    ids = torch.stack([0 * tokens, tokens // (w // 2), tokens % (w // 2)], dim=1)
    bias = torch.cat([torch.where(mask == 1, 0.0, -1e9), torch.zeros(clean.shape[:2])], dim=1)[:, None, None]
    for module in pipe.transformer.modules():
        if type(module).__name__ == "FluxAttention":
            module.register_forward_pre_hook(hide_pads(bias), with_kwargs=True)
    s, noise = drawn["timestep"].view(b, 1, 1), drawn["noise"]
    velocity = pipe.transformer(
        hidden_states=(1 - s) * clean + s * noise,
        timestep=drawn["timestep"],
        encoder_hidden_states=text,
        txt_ids=text_ids,
        img_ids=ids.float(),
    ).sample
    return (velocity - (noise - clean)).square().mean(dim=(1, 2))


def hide_pads(bias: torch.Tensor) -> Any:
    return lambda _module, args, kwargs: (args, {**kwargs, "attention_mask": bias})


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(
    tiny_checkpoints: dict[str, Path], checkpointing: Any
) -> None:
    """Diffusers' own checkpointing of Chroma forgets the mask of the single blocks; there is none here to forget."""
    path, generator = tiny_checkpoints["chroma"], torch.Generator().manual_seed(6)
    checkpoint = get_family("chroma").open(ModelConfig(family="chroma", path=str(path)))
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
    transformer = checkpoint.denoiser.load_transformer(torch.float32)
    set_checkpointing(transformer, checkpointing)
    ours = checkpoint.denoiser.losses(transformer, batch, RandomStreams(0, [0, 1, 2], ahead)).losses.detach()
    with torch.no_grad():
        theirs = losses_by_diffusers(path, torch.cat(pictures), noise)
    assert len(set(ours.tolist())) == 3
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
