"""Qwen-Image and Qwen-Image-Edit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

from dit_lora.config.data import VideoShape
from family_cases import flux
from family_cases.case import MASKED, Call, Case, Smoke, captioned_images, edit_pairs, edit_pairs_of_two


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; QwenImagePipeline.__call__ ends so."""
    config, native = pipeline.vae.config, flux.NATIVE
    latents = pipeline._unpack_latents(clean, native.height, native.width, pipeline.vae_scale_factor)
    mean, std = (
        torch.tensor(v, dtype=latents.dtype).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std)
    )
    return pipeline.vae.decode(latents * std + mean).sample


def small_references(patches: pytest.MonkeyPatch) -> None:
    """Scale references to 1/64 of the area: pipelines scale each to a megapixel, which takes a tiny VAE seconds."""
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        original = module.calculate_dimensions

        def smaller(area: float, ratio: float, own: Callable[..., Any] = original) -> Any:
            return own(area / 64, ratio)

        patches.setattr(module, "calculate_dimensions", smaller)


def noisy(call: Call) -> torch.Tensor:
    """The tokens in front of the references'."""
    _, rows, columns = call["img_shapes"][0][0]
    tokens: torch.Tensor = call["hidden_states"][:, : rows * columns]
    return tokens


def case(variant: str, **other: Any) -> Case:
    kind = {"-": "", "-edit": "Edit", "-edit-plus": "EditPlus"}[variant.removeprefix("qwen-image") or "-"]
    common: dict[str, Any] = {
        "family": "qwen_image",
        "variant": variant,
        "native": flux.NATIVE,
        "off_native": VideoShape(1, 96, 32),
        "captions": ("picture 0", "a Picture 1", "a longer caption than both, 2"),
        "decode": decode,
        "vae_decode": flux.vae_decode,
        "timesteps": flux.timesteps,
        "takes": frozenset({"lora_linear", "qk_norm_rope", "ada_norm"}),
        "refused": (
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (
                VideoShape(9, 64, 96),
                f"frames must be 1, QwenImage{kind}Pipeline makes images; got 9",
            ),
        ),
    }
    return Case(**{**common, **other})


EDIT: dict[str, Any] = {"noisy": noisy, "without": ("processor",), "prepare": small_references}
CASES = (
    case("qwen-image"),
    # A smoke run, its loss by Diffusers alone and tests of its own are in CI, and Plus asks more here.
    case("qwen-image-edit", references=(VideoShape(1, 80, 57),), thorough=True, **EDIT),
    case(
        "qwen-image-edit-plus",
        references=(VideoShape(1, 80, 57), VideoShape(1, 64, 95)),
        # Its blocks modulate by token.
        takes=frozenset({"lora_linear", "qk_norm_rope"}),
        **EDIT,
    ),
)
SMOKES = {
    "qwen_image": Smoke("qwen-image", captioned_images),
    "qwen_image_edit": Smoke("qwen-image-edit", edit_pairs, references=1, prepare=small_references),
}
OTHERS = {
    "qwen_image_edit_masked": SMOKES["qwen_image_edit"].change("qwen_image_edit", None, *MASKED),
    "qwen_image_edit_plus": SMOKES["qwen_image_edit"].change(
        "qwen_image_edit",
        "qwen-image-edit-plus",
        *MASKED,
        write_data=edit_pairs_of_two,
        references_each=2,
    ),
}
