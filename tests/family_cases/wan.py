"""Wan."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Call, Case, Smoke


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """Decode clean latents; WanPipeline.__call__ ends so."""
    config = pipeline.vae.config
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
    return pipeline.vae.decode(clean * std + mean, return_dict=False)[0]


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    return pipeline.vae.decode(mean).sample


def noisy_part(call: Call) -> torch.Tensor:
    """Without the mask and the condition, which stand in channels of their own."""
    return call["hidden_states"][:, :16]


def of_the_sample(call: Call) -> torch.Tensor:
    """The one timestep of TI2V-5B, which the pipeline repeats for every token; 0 at those of the image."""
    return call["timestep"].amax(1)


SIDES = (
    (VideoShape(9, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
    (VideoShape(9, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
    (VideoShape(9, 64, 528), r"width can be 512 at most, where its positions end \(rope_max"),
)
FRAMES = (
    (VideoShape(8, 64, 96), r"frames must be 4n \+ 1; got 8, nearest 5 and 9"),
    (VideoShape(15, 64, 96), r"frames must be 4n \+ 1; got 15, nearest 13 and 17"),
    (VideoShape(129, 64, 96), "frames can be 125 at most, where its positions end"),
)
ONE = ((VideoShape(1, 64, 96), "frames must be 5 or more, as the first is given; got 1"),)
OF_5B = (
    (VideoShape(9, 48, 96), "height must be a multiple of 32; got 48, nearest 32 and 64"),
    (VideoShape(9, 64, 1056), "width can be 1024 at most, where its positions end"),
)


def case(variant: str, **other: Any) -> Case:
    common: dict[str, Any] = {
        "family": "wan",
        "variant": variant,
        "native": VideoShape(9, 64, 96),
        "off_native": VideoShape(13, 96, 32),
        "captions": ("clip 0", "clip 1, with  two spaces &amp; a sign", "a far longer one, " * 25),
        "decode": decode,
        "vae_decode": vae_decode,
        "takes": frozenset({"lora_linear", "ada_norm", "qk_norm_rope"}),
        "refused": (*SIDES, *FRAMES),
    }
    return Case(**{**common, **other})


IMAGE: dict[str, Any] = {
    "pictures": ("image",),
    "noisy": noisy_part,
    "refused": (*SIDES, *FRAMES, *ONE),
}
LOW = {"model": {"part": "transformer_2"}}
CASES = (
    case("wan-2.1-t2v"),
    case("wan-2.1-i2v", has_other_modules=True, **IMAGE),
    case("wan-2.1-flf2v", **{**IMAGE, "pictures": ("image", "last_image")}),
    case("wan-2.2-t2v-a14b"),
    case("wan-2.2-t2v-a14b", **LOW),
    case("wan-2.2-i2v-a14b", **IMAGE),
    case("wan-2.2-i2v-a14b", **IMAGE, **LOW),
    case(
        "wan-2.2-ti2v-5b",
        timesteps=of_the_sample,
        call_dtype=torch.bfloat16,
        has_other_modules=True,
        refused=(*OF_5B, *FRAMES),
    ),
    case(
        "wan-2.2-ti2v-5b",
        model={"task": "i2v"},
        pictures=("image",),
        timesteps=of_the_sample,
        refused=(*OF_5B, *FRAMES, *ONE),
    ),
)
SMOKES = {
    "wan": Smoke("wan-2.1-t2v"),
    "wan_i2v": Smoke("wan-2.1-i2v", pictures=("images",)),
    "wan_flf2v": Smoke("wan-2.1-flf2v", pictures=("images", "last_images")),
    "wan_2.2": Smoke("wan-2.2-t2v-a14b"),
    "wan_2.2_i2v": Smoke("wan-2.2-i2v-a14b", pictures=("images",)),
    "wan_5b": Smoke("wan-2.2-ti2v-5b"),
    "wan_5b_i2v": Smoke("wan-2.2-ti2v-5b", overrides=("data.image_dropout=0.5",), pictures=("images",)),
}
