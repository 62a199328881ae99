"""Anima."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Call, Case, Smoke, captioned_images


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; the block AnimaVaeDecoderStep does so."""
    config = pipeline.vae.config
    mean, std = (torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std))
    return pipeline.vae.decode(clean / (1.0 / std) + mean).sample


def timesteps(call: Call) -> torch.Tensor:
    """The pipeline's blocks divide them. In fp64, so that dividing once more gives the same."""
    return (call["timestep"].double() * 1000).float()


CASES = (
    Case(
        family="anima",
        variant="anima",
        native=VideoShape(1, 64, 96),
        off_native=VideoShape(1, 80, 48),
        captions=("picture 0", "a Picture 1", "a longer caption than both, of a disc below a square, 2"),
        decode=decode,
        vae_decode=lambda pipeline, mean: pipeline.vae.decode(mean).sample,
        timesteps=timesteps,
        takes=frozenset({"lora_linear"}),
        refused=(
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(1, 2064, 96), "height can be 2048 at most"),
            (VideoShape(9, 64, 96), "frames must be 1, Anima makes images; got 9"),
        ),
    ),
)
SMOKES = {"anima": Smoke("anima", captioned_images)}
