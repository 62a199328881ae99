"""Qwen-Image 2.1. Its pipeline pads prompts of several lengths, and the family calls the network for each."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Call, Case, Smoke, captioned_images
from family_cases.flux import NATIVE, timesteps, vae_decode

NUM_IMAGE_TOKENS = 24
"""Image tokens of both shapes, 64x96 and 32x192 pixels: one for 16x16 pixels."""


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; QwenImage21Pipeline.__call__ ends so."""
    config = pipeline.vae.config
    latents = pipeline._unpack_latents(clean, NATIVE.height, NATIVE.width, pipeline.vae_scale_factor)
    mean, std = (
        torch.tensor(v, dtype=latents.dtype).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std)
    )
    return pipeline.vae.decode(latents * std + mean).sample


def predicted(output: torch.Tensor) -> torch.Tensor:
    """The image's tokens, which follow the text's."""
    return output[:, -NUM_IMAGE_TOKENS:]


def compared(call: Call) -> bool:
    """Later steps read text from the cache of the first one, which rounds in another order."""
    return call["kv_cache_mode"] != "cached"


CASES = (
    Case(
        family="qwen_image21",
        variant="qwen-image-2.1",
        native=NATIVE,
        off_native=VideoShape(1, 32, 192),
        captions=("picture 0", "a Picture 1", "a longer caption than both, of a disc below a square, 2"),
        decode=decode,
        vae_decode=vae_decode,
        timesteps=timesteps,
        predicted=predicted,
        compared=compared,
        takes_several_prompts=False,
        template_tokens=8,
        takes=frozenset({"lora_linear"}),
        refused=(
            (VideoShape(1, 80, 96), "height must be a multiple of 32; got 80, nearest 64 and 96"),
            (VideoShape(1, 64, 7), "width must be a multiple of 32; got 7, nearest 32"),
            (VideoShape(9, 64, 96), "frames must be 1, QwenImage21Pipeline makes images; got 9"),
        ),
    ),
)
SMOKES = {"qwen_image21": Smoke("qwen-image-2.1", captioned_images)}
