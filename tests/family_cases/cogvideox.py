"""CogVideoX."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Call, Case, Smoke

LATENTS = 4  # channels


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    return pipeline.decode_latents(clean)


def decode_after_padding(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    """The native 3 latent frames are 4 with the one that stands in front."""
    assert clean.shape[1] == 4
    return pipeline.decode_latents(clean[:, 1:])


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    return pipeline.vae.decode(mean).sample


def noisy_half(call: Call) -> torch.Tensor:
    """Without the image's latents, which stand in channels of their own."""
    return call["hidden_states"][:, :, :LATENTS]


def as_sampled(batch: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The pipeline draws the image's latent from its posterior, before the noise and by the same generator."""
    mean, logvar = batch["image_latent_mean"], batch["image_latent_logvar"]
    noise = torch.randn(mean[:, 0].shape, generator=torch.Generator().manual_seed(seed))
    latent = mean[:, 0] + torch.exp(0.5 * logvar[:, 0]) * noise
    return {**batch, "image_latent_mean": torch.cat([latent[:, None], mean[:, 1:]], dim=1)}


def case(variant: str, **other: Any) -> Case:
    common: dict[str, Any] = {
        "family": "cogvideox",
        "variant": variant,
        "native": VideoShape(9, 64, 96),
        "off_native": VideoShape(17, 96, 48),
        "captions": ("clip 0", "clip 1", "clip 2"),
        "decode": decode,
        "vae_decode": vae_decode,
        "takes": frozenset({"lora_linear", "qk_norm_rope", "ada_norm"}),
        "refused": (
            (VideoShape(9, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(9, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(10, 64, 96), r"frames must be 8n \+ 1; got 10, nearest 9 and 17"),
            (VideoShape(13, 64, 96), r"frames must be 8n \+ 1; got 13, nearest 9 and 17"),
        ),
    }
    return Case(**{**common, **other})


# What an image-to-video pipeline does with the image. It takes one image for one prompt.
FROM_IMAGE: dict[str, Any] = {
    "takes_several_prompts": False,
    "pictures": ("image",),
    "noisy": noisy_half,
    "as_sampled": as_sampled,
}
LEARNED = (
    (VideoShape(9, 96, 48), "height must be 64, which its learned positions are for; got 96"),
    (VideoShape(9, 96, 48), "width must be 96, which its learned positions are for; got 48"),
    (VideoShape(17, 64, 96), "frames must be 9, which its learned positions are for; got 17"),
)
BEYOND = (
    (VideoShape(9, 176, 96), "height can be 160 at most, where its positions end; got 176"),
    (VideoShape(9, 64, 176), "width can be 160 at most, where its positions end; got 176"),
)
ANY = case("").refused
CASES = (
    case("cogvideox-2b"),
    case("cogvideox-5b", has_other_modules=True),
    case("cogvideox-5b-i2v", off_native=None, refused=(*ANY, *LEARNED), **FROM_IMAGE),
    case("cogvideox-1.5", decode=decode_after_padding, refused=(*ANY, *BEYOND)),
    case(
        "cogvideox-1.5-i2v",
        decode=decode_after_padding,
        refused=(*ANY, *BEYOND),
        has_other_modules=True,
        **FROM_IMAGE,
    ),
)
SMOKES = {
    "cogvideox": Smoke("cogvideox-5b"),
    "cogvideox_1.5": Smoke("cogvideox-1.5"),
    "cogvideox_i2v": Smoke(
        "cogvideox-5b-i2v",
        overrides=("data.image_dropout=0.5", "train.batch_size=1"),
        pictures=("images",),
    ),
}
