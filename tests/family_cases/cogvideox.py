"""CogVideoX."""

from typing import Any

import torch

from dit_lora.families.base import VideoShape
from family_cases.case import Case


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    return pipeline.decode_latents(clean)


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    return pipeline.vae.decode(mean).sample


CASES = tuple(
    Case(
        family="cogvideox",
        variant=variant,
        native=VideoShape(9, 64, 96),
        off_native=VideoShape(13, 96, 48),
        captions=("clip 0", "clip 1", "clip 2"),
        decode=decode,
        vae_decode=vae_decode,
        refused=(
            (VideoShape(9, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(9, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(10, 64, 96), r"frames must be 4n \+ 1; got 10, nearest 9 and 13"),
        ),
    )
    for variant in ("cogvideox-2b", "cogvideox-5b")
)
