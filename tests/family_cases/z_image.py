"""Z-Image, whose network takes lists, runs backwards in time and gives the negative velocity."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Call, Case, Smoke, captioned_images
from family_cases.flux import vae_decode


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; ZImagePipeline.__call__ ends so."""
    config = pipeline.vae.config
    return pipeline.vae.decode((clean / config.scaling_factor) + config.shift_factor).sample


def noisy(call: Call) -> torch.Tensor:
    return torch.cat(call["x"], dim=1).transpose(0, 1)


def timesteps(call: Call) -> torch.Tensor:
    return (1000 - 1000 * call["t"].double()).float()


def velocity(output: list[torch.Tensor]) -> torch.Tensor:
    return -torch.cat(output, dim=1).transpose(0, 1)


def case(variant: str) -> Case:
    return Case(
        family="z_image",
        variant=variant,
        # Neither 24 nor 15 patches are a multiple of the 32 that the network pads to.
        native=VideoShape(1, 64, 96),
        off_native=VideoShape(1, 80, 48),
        # With the 19 tokens of the template they are padded to 32, 32 and 96.
        captions=(
            "picture 0",
            "a Picture 1",
            "a longer caption than both, of a disc below a square, 2",
        ),
        decode=decode,
        vae_decode=vae_decode,
        noisy=noisy,
        timesteps=timesteps,
        predicted=velocity,
        takes=frozenset({"lora_linear", "qk_norm_rope", "ada_norm"}),
        template_tokens=19,
        refused=(
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(9, 64, 96), "frames must be 1, Z-Image makes images; got 9"),
            (VideoShape(1, 528, 96), "height can be 512 at most, where its positions end"),
            (VideoShape(1, 64, 544), r"width can be 512 at most.*axes_lens\); got 544"),
        ),
    )


CASES = (case("z-image"), case("z-image-turbo"))
SMOKES = {"z_image": Smoke("z-image", captioned_images)}
OTHERS = {"z_image_turbo": SMOKES["z_image"].change("z_image", "z-image-turbo")}
