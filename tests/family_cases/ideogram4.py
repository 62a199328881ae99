"""Ideogram 4, whose network takes text and image as one sequence, with time and velocity reversed."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Call, Case, Smoke, captioned_images

NATIVE = VideoShape(1, 64, 96)
_IMAGE_TOKEN = 2


def unpack(tokens: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Ideogram4Pipeline.__call__ unpacks so: (B, S, 4 C) to (B, C, 2 rows, 2 columns)."""
    squares = tokens.view(len(tokens), rows, columns, 2, 2, -1)
    return squares.permute(0, 5, 1, 3, 2, 4).reshape(len(tokens), -1, 2 * rows, 2 * columns)


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; Ideogram4Pipeline.__call__ ends so."""
    vae = pipeline.vae
    std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    latents = unpack(clean * std + vae.bn.running_mean, NATIVE.height // 16, NATIVE.width // 16)
    return vae.decode(latents).sample


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation of cached latents, which has a mean and a variance for each place in squares of 2 x 2."""
    vae, latents = pipeline.vae, mean.clone()
    shift, variance = (values.view(2, 2, -1) for values in (vae.bn.running_mean, vae.bn.running_var))
    for y in range(2):
        for x in range(2):
            std = (variance[y, x] + vae.config.batch_norm_eps).sqrt()
            latents[:, :, y::2, x::2] = mean[:, :, y::2, x::2] * std.view(-1, 1, 1) + shift[y, x].view(-1, 1, 1)
    return vae.decode(latents).sample


def noisy(call: Call) -> torch.Tensor:
    return call["hidden_states"][:, call["indicator"][0] == _IMAGE_TOKEN]


def timesteps(call: Call) -> torch.Tensor:
    """Those whose distance to 1000, over 1000, is the network's time in fp32."""
    time = call["timestep"]
    rounded = (1000 - 1000 * time.double()).float()
    for candidate in (rounded, rounded.nextafter(rounded + 1), rounded.nextafter(rounded - 1)):
        rounded = torch.where(1.0 - candidate / 1000 == time, candidate, rounded)
    return rounded


CASES = (
    Case(
        family="ideogram4",
        variant="ideogram-4",
        native=NATIVE,
        off_native=VideoShape(1, 80, 48),
        captions=(
            "picture 0",
            '{"high_level_description":"a Picture 1"}',
            "a longer caption, of a disc and a square, 2",
        ),
        decode=decode,
        vae_decode=vae_decode,
        noisy=noisy,
        timesteps=timesteps,
        predicted=torch.neg,
        has_text_before_image=True,
        takes=frozenset({"lora_linear"}),
        template_tokens=19,
        refused=(
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(9, 64, 96), "frames must be 1, Ideogram 4 makes images; got 9"),
        ),
    ),
)
SMOKES = {"ideogram4": Smoke("ideogram-4", captioned_images)}
