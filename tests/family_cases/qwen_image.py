"""Qwen-Image."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases import flux
from family_cases.case import Case


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; QwenImagePipeline.__call__ ends so."""
    config, native = pipeline.vae.config, flux.NATIVE
    latents = pipeline._unpack_latents(
        clean, native.height, native.width, pipeline.vae_scale_factor
    )
    mean, std = (
        torch.tensor(v, dtype=latents.dtype).view(1, -1, 1, 1, 1)
        for v in (config.latents_mean, config.latents_std)
    )
    return pipeline.vae.decode(latents * std + mean).sample


CASES = (
    Case(
        family="qwen_image",
        variant="qwen-image",
        native=flux.NATIVE,
        off_native=VideoShape(1, 96, 32),
        captions=("picture 0", "a Picture 1", "a longer caption than both, 2"),
        decode=decode,
        vae_decode=flux.vae_decode,
        timesteps=flux.timesteps,
        takes=frozenset({"lora_linear", "qk_norm_rope", "ada_norm"}),
        refused=(
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(9, 64, 96), "frames must be 1, QwenImagePipeline makes images; got 9"),
        ),
    ),
)
