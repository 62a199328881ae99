"""Stable Diffusion 3.5."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases import flux
from family_cases.case import Smoke, captioned_images, timestep


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; StableDiffusion3Pipeline.__call__ ends so."""
    config = pipeline.vae.config
    return pipeline.vae.decode(clean / config.scaling_factor + config.shift_factor).sample


CASES = tuple(
    flux.case(
        variant,
        family="sd3",
        decode=decode,
        timesteps=timestep,
        has_other_modules=variant == "sd3.5-large",
        template_tokens=77,  # CLIP's, which stand before T5's
        refused=(
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(1, 144, 64), r"height can be 128 at most, where its positions end \(pos_"),
            (VideoShape(1, 64, 144), r"width can be 128 at most, where its positions end \(pos_"),
            (VideoShape(9, 64, 96), "frames must be 1, Stable Diffusion 3 makes images; got 9"),
        ),
    )
    for variant in ("sd3.5-medium", "sd3.5-large")
)
SMOKES = {"sd3": Smoke("sd3.5-medium", captioned_images)}
OTHERS = {"sd3_large": SMOKES["sd3"].change("sd3", "sd3.5-large")}
