"""The video DiT, of classes and of text, and Latte."""

from typing import Any

import torch

from dit_lora.config.data import VideoShape
from family_cases.case import Case, Smoke, class_clips


def decode(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    return pipeline.decode_latents(clean)


def decode_latte(pipeline: Any, clean: torch.Tensor) -> torch.Tensor:
    return pipeline.decode_latents(clean, clean.shape[2])


def vae_decode(pipeline: Any, mean: torch.Tensor) -> torch.Tensor:
    """Frame by frame: the VAE is an image's."""
    frames = [pipeline.vae.decode(frame).sample for frame in mean.unbind(2)]
    return torch.stack(frames, dim=2)


REFUSED = (
    (VideoShape(4, 40, 32), "height must be a multiple of 16; got 40, nearest 32 and 48"),
    (VideoShape(4, 32, 9), "width must be a multiple of 16; got 9, nearest 16"),
)

CASES = (
    Case(
        family="video_dit",
        variant="video-dit-class",
        native=VideoShape(4, 32, 48),
        off_native=VideoShape(5, 48, 32),
        captions=("red disc", "green square", "blue disc"),
        decode=decode,
        vae_decode=vae_decode,
        refused=REFUSED,
        takes_several_prompts=False,
    ),
    Case(
        family="video_dit",
        variant="video-dit-text",
        has_other_modules=True,
        native=VideoShape(4, 32, 48),
        off_native=VideoShape(1, 48, 32),
        captions=("clip 0", "Boxing Punching Bag", "a third one"),
        decode=decode,
        vae_decode=vae_decode,
        refused=REFUSED,
        takes_several_prompts=False,
    ),
    Case(
        family="latte",
        variant="latte",
        native=VideoShape(4, 32, 32),
        off_native=VideoShape(1, 48, 32),
        captions=("clip 0", "Boxing Punching Bag", "a third one, longer than the others"),
        decode=decode_latte,
        takes_several_prompts=False,
        vae_decode=vae_decode,
        refused=(
            *REFUSED,
            (VideoShape(5, 32, 32), "frames must be 4, as its config's video_length, or 1"),
        ),
    ),
)
SMOKES = {
    "video_dit": Smoke("video-dit-class", class_clips, prompt="red disc"),
    "video_dit_lora": Smoke("video-dit-text", class_clips),
    "latte": Smoke("latte"),
}
