"""FLUX.1, and what FLUX.2 is asked alike."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import MASKED, Call, Case, Smoke, captioned_images, edit_pairs

NATIVE = VideoShape(1, 64, 96)


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; FluxPipeline.__call__ ends so."""
    config, factor = pipeline.vae.config, pipeline.vae_scale_factor
    latents = pipeline._unpack_latents(clean, NATIVE.height, NATIVE.width, factor)
    return pipeline.vae.decode(latents / config.scaling_factor + config.shift_factor).sample


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    return pipeline.vae.decode(mean).sample


def timesteps(call: Call) -> torch.Tensor:
    """The pipeline divides what `predict` takes."""
    return (call["timestep"].double() * 1000).float()


def case(variant: str, **other: Any) -> Case:
    common: dict[str, Any] = {
        "family": "flux",
        "variant": variant,
        "native": NATIVE,
        "off_native": VideoShape(1, 96, 32),
        "captions": ("picture 0", "a Picture 1", "a longer caption than both, 2"),
        "decode": decode,
        "vae_decode": vae_decode,
        "timesteps": timesteps,
        "takes": frozenset({"lora_linear", "qk_norm_rope", "ada_norm"}),
        "refused": (
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(9, 64, 96), "frames must be 1, FLUX makes images; got 9"),
        ),
    }
    return Case(**{**common, **other})


def noisy(call: Call) -> torch.Tensor:
    """The tokens in front of the references', whose first position is not 0."""
    image_ids = call["img_ids"] if call["img_ids"].ndim == 2 else call["img_ids"][0]
    tokens: torch.Tensor = call["hidden_states"][:, image_ids[:, 0] == 0]
    return tokens


CASES = (
    case("flux-dev"),
    case("flux-schnell"),
    case(
        "flux-kontext",
        noisy=noisy,
        references=(VideoShape(1, 80, 57),),
        reference_resolution=48,
    ),
)
SMOKES = {
    "flux": Smoke("flux-dev", captioned_images),
    "flux_kontext": Smoke("flux-kontext", edit_pairs, references=1),
}
OTHERS = {"flux_kontext_masked": SMOKES["flux_kontext"].change("flux_kontext", None, *MASKED)}
