"""FLUX.2."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases import flux
from family_cases.case import MASKED, Case, Smoke, captioned_images, edit_pairs, edit_pairs_of_two


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; both pipelines end so."""
    height, width = (side // 16 for side in (flux.NATIVE.height, flux.NATIVE.width))
    bn, eps = pipeline.vae.bn, pipeline.vae.config.batch_norm_eps
    squares = clean.transpose(1, 2).unflatten(2, (height, width))
    std = torch.sqrt(bn.running_var.view(1, -1, 1, 1) + eps)
    squares = squares * std + bn.running_mean.view(1, -1, 1, 1)
    return pipeline.vae.decode(pipeline._unpatchify_latents(squares)).sample


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    """The cache holds what is normalised by place in squares of two by two: each place of its own."""
    bn = pipeline.vae.bn
    std, shift = (bn.running_var + pipeline.vae.config.batch_norm_eps).sqrt(), bn.running_mean
    latents = mean.clone()
    for row in (0, 1):
        for column in (0, 1):
            channels = slice(2 * row + column, None, 4)
            at = (..., slice(row, None, 2), slice(column, None, 2))
            latents[at] = mean[at] * std[channels].view(-1, 1, 1) + shift[channels].view(-1, 1, 1)
    return pipeline.vae.decode(latents).sample


def case(variant: str, **other: Any) -> Case:
    return flux.case(variant, family="flux2", decode=decode, vae_decode=vae_decode, **other)


CASES = (
    case("flux2-klein", template_tokens=25),
    case(
        "flux2-klein",
        template_tokens=25,
        noisy=flux.noisy,
        references=(VideoShape(1, 64, 95), VideoShape(1, 80, 66)),
    ),
    case("flux2-dev", template_tokens=173),
)
SMOKES = {
    "flux2": Smoke("flux2-klein", captioned_images),
    "flux2_edit": Smoke("flux2-klein", edit_pairs, references=1),
}
OTHERS = {
    "flux2_dev_edit": SMOKES["flux2_edit"].change("flux2_edit", "flux2-dev", *MASKED, write_data=edit_pairs_of_two)
}
