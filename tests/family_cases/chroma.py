"""Chroma, which has FLUX.1's latents. Its pipeline pads prompts of several lengths, and the family cuts each."""

from dit_lora.config.data import VideoShape
from family_cases import flux
from family_cases.case import Smoke, captioned_images

CASES = (
    flux.case(
        "chroma",
        family="chroma",
        takes=frozenset({"lora_linear", "qk_norm_rope"}),
        takes_several_prompts=False,
        refused=(
            (VideoShape(1, 60, 96), "height must be a multiple of 16; got 60, nearest 48 and 64"),
            (VideoShape(1, 64, 7), "width must be a multiple of 16; got 7, nearest 16"),
            (VideoShape(9, 64, 96), "frames must be 1, Chroma makes images; got 9"),
        ),
    ),
)
SMOKES = {"chroma": Smoke("chroma", captioned_images)}
