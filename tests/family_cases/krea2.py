"""Krea 2."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Case, Smoke, captioned_images
from family_cases.flux import NATIVE, timesteps

# As long as a caption can be: then the pipeline's text has no pads that the family would leave out, and a call of one
# is the other's bit for bit. What is left out changes rounding alone (test_krea2.py).
LONG = tuple(f"picture {index}, " + "a red disc " * 60 for index in (1, 2))


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; Krea2Pipeline.__call__ ends so."""
    latents = pipeline._unpack_latents(clean, NATIVE.height, NATIVE.width)
    config = pipeline.vae.config
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
    return pipeline.vae.decode(latents * std + mean).sample


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    return pipeline.vae.decode(mean).sample


CASES = (
    Case(
        family="krea2",
        variant="krea2-raw",
        native=NATIVE,
        off_native=VideoShape(1, 96, 32),
        captions=("picture 0", *LONG),
        decode=decode,
        vae_decode=vae_decode,
        timesteps=timesteps,
        takes=frozenset({"lora_linear", "qk_norm_rope", "ada_norm"}),
        template_tokens=5,
        refused=(
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(9, 64, 96), "frames must be 1, Krea2Pipeline makes images; got 9"),
        ),
    ),
)
SMOKES = {"krea2": Smoke("krea2-raw", captioned_images)}
