"""The loss of Qwen-Image-Edit and of 2511, computed once more from Diffusers' modules alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from family_cases.qwen_image import small_references
from family_cases.subject import CPU, pixels_of
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.families.qwen_image.picture_text import load_processor
from dit_lora.numerics.streams import RandomInputs, RandomStreams

SHAPE, CAPTIONS = VideoShape(1, 48, 80), ("make it red", "", "move the green square to the left")
SIDES = {"": ((128, 128), (128, 128)), "-plus": ((128, 128), (64, 64))}
"""Sides of a 72 x 72 reference for the VAE and for the text encoder.

They are those of 1/64 of 1024 x 1024 and, rounded to multiples of 32, of 384 x 384.
"""


def latents_of(pipe: Any, pixels: torch.Tensor, drawn: torch.Tensor | float) -> torch.Tensor:
    """Return packed latents (1, tokens, channels) of pixels (1, 3, H, W) from -1 to 1."""
    mean, std = (
        torch.tensor(values)[None, :, None, None, None]
        for values in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
    )
    posterior = pipe.vae.encode(pixels[:, :, None]).latent_dist
    z = ((posterior.mean + posterior.std * drawn - mean) / std)[:, :, 0]
    b, c, h, w = z.shape
    return z.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)


def loss_by_diffusers(
    pipe: Any, row: int, pixels: torch.Tensor, picture: Image.Image, given: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return one sample's loss, of pixels (1, 3, H, W), its reference, and its draws (1, ...)."""
    plus = "Plus" in type(pipe).__name__
    of_vae, of_text = (picture.resize(s, Image.LANCZOS) for s in SIDES["-plus" if plus else ""])
    before = "Picture 1: <|vision_start|><|image_pad|><|vision_end|>" if plus else ""
    text = pipe.prompt_template_encode.format(before + CAPTIONS[row])
    inputs = pipe.processor(text=[text], images=[of_text], return_tensors="pt")
    inputs.pop("mm_token_type_ids")
    hidden = pipe.text_encoder(**inputs, output_hidden_states=True).hidden_states[-1][:, 64:]
    levels = torch.frombuffer(bytearray(of_vae.tobytes()), dtype=torch.uint8)
    values = levels.view(1, 128, 128, 3).permute(0, 3, 1, 2) / 127.5 - 1
    z, reference = (
        latents_of(pipe, pixels / 127.5 - 1, given["posterior"]),
        latents_of(pipe, values, 0),
    )
    s, noise = given["timestep"].view(1, 1, 1), given["noise"]
    velocity = pipe.transformer(
        hidden_states=torch.cat([(1 - s) * z + s * noise, reference], dim=1),
        encoder_hidden_states=hidden,
        timestep=given["timestep"],
        img_shapes=[[(1, 3, 5), (1, 8, 8)]],
    ).sample[:, :15]
    return (velocity - (noise - z)).square().mean()


@pytest.mark.parametrize("kind", ["", "-plus"])
def test_the_loss_of_a_batch_is_that_of_diffusers_modules_alone(
    tiny_checkpoints: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captions of three lengths in a batch, each compared on its own. A 72 x 72 reference is scaled as in the
    pipelines.
    """
    small_references(monkeypatch)
    path, g = tiny_checkpoints[f"qwen-image-edit{kind}"], torch.Generator().manual_seed(6)
    checkpoint = get_family("qwen_image").open(ModelConfig(family="qwen_image", path=str(path)))
    encode_text: Any = checkpoint.encoders.load_text_encoder(torch.float32, CPU)
    encode_picture: Any = checkpoint.encoders.load_video_encoder(torch.float32, CPU)
    pictures = [pixels_of(SHAPE, g) for _ in CAPTIONS]
    references = [pixels_of(VideoShape(1, 72, 72), g) for _ in CAPTIONS]
    rows = [
        {
            **encode_picture(picture),
            **encode_picture.encode_references([reference], SHAPE),
            **{n: t[0] for n, t in encode_text.encode_with_references(caption, [reference], SHAPE).items()},
        }
        for caption, picture, reference in zip(CAPTIONS, pictures, references, strict=True)
    ]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    random_inputs = {
        "posterior": torch.randn(3, 16, 1, 6, 10, generator=g),
        "noise": torch.randn(3, 15, 64, generator=g),
        "timestep": checkpoint.denoiser.get_random_input_samplers(batch)["timestep"]([g] * 3),
    }
    pipe = DiffusionPipeline.from_pretrained(path, processor=load_processor(path))
    with torch.no_grad():
        ours = checkpoint.denoiser.losses(
            checkpoint.denoiser.load_transformer(torch.float32),
            batch,
            RandomStreams(0, [0, 1, 2], RandomInputs(0, (0, 1, 2), random_inputs)),
        ).losses
        theirs = [
            loss_by_diffusers(
                pipe,
                row,
                pictures[row].float(),
                Image.fromarray(references[row][0].permute(1, 2, 0).numpy()),
                {name: tensor[row : row + 1] for name, tensor in random_inputs.items()},
            )
            for row in range(3)
        ]
    assert len(set(ours.tolist())) == 3
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=1e-5, atol=0)
