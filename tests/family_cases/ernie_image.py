"""ERNIE-Image."""

from typing import Any

import torch
from torch.nn import functional

from dit_lora.config.data import VideoShape
from family_cases.case import Case, Smoke, captioned_images


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; ErnieImagePipeline.__call__ ends so."""
    bn = pipeline.vae.bn
    std = torch.sqrt(bn.running_var.view(1, -1, 1, 1) + 1e-5)
    latents = pipeline._unpatchify_latents(clean * std + bn.running_mean.view(1, -1, 1, 1))
    return pipeline.vae.decode(latents).sample


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    """The cache holds what is normalised by place in patches of two by two: each place of its own."""
    bn = pipeline.vae.bn
    patches = functional.pixel_unshuffle(mean, 2)
    patches = patches * (bn.running_var + 1e-5).sqrt().view(-1, 1, 1) + bn.running_mean.view(-1, 1, 1)
    return pipeline.vae.decode(functional.pixel_shuffle(patches, 2)).sample


CASES = (
    Case(
        family="ernie_image",
        variant="ernie-image",
        native=VideoShape(1, 64, 96),
        off_native=VideoShape(1, 80, 48),
        captions=("picture 0", "a Picture 1", "a longer caption than both, of a disc below a square, 2"),
        decode=decode,
        vae_decode=vae_decode,
        takes=frozenset({"lora_linear"}),
        refused=(
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(9, 64, 96), "frames must be 1, ERNIE-Image makes images; got 9"),
        ),
    ),
)
SMOKES = {"ernie_image": Smoke("ernie-image", captioned_images)}
