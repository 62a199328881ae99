"""One file per model family; `FAMILIES` maps the names used in recipes to their modules."""

import importlib
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.families.no_hub_kernel import keep_from_hub

keep_from_hub()  # before any family, and with it Diffusers and PEFT, is imported

DIFFUSION_FAMILIES = {
    "cogvideox": "dit_lora.families.cogvideox",
    "dit": "dit_lora.families.dit",
    "sana": "dit_lora.families.sana",
    "sana_video": "dit_lora.families.sana_video",
    "video_dit": "dit_lora.families.video_dit",
    "latte": "dit_lora.families.latte",
}
"""They have the contract of `families.base`."""
CHAT_FAMILIES = {
    "videochat2": "dit_lora.families.videochat2",
    "chat": "dit_lora.families.chat",
}
"""They have the contract of `families.chat_base`."""
FAMILIES = DIFFUSION_FAMILIES | CHAT_FAMILIES
TINY_VARIANTS = {
    "cogvideox": (
        "cogvideox-2b",
        "cogvideox-5b",
        "cogvideox-5b-i2v",
        "cogvideox-1.5",
        "cogvideox-1.5-i2v",
    ),
    "dit": ("dit-tiny",),
    "sana": ("sana-600m", "sana-1.5", "sana-fp16"),
    "sana_video": ("sana-video",),
    "video_dit": ("video-dit-class", "video-dit-text"),
    "latte": ("latte",),
    "videochat2": (
        "videochat2-mistral",
        "videochat2-vicuna",
        "videochat2-phi3",
        "videochat2-hd",
    ),
    "chat": ("llava-next-video", "qwen2.5-vl", "qwen3-vl", "smolvlm2", "internvl"),
}
"""Each family's own, repeated here because importing a family takes seconds."""


def get_family(name: str) -> Any:
    """The family of that name, a `Family` or a `ChatFamily`, imported when asked for."""
    if name not in FAMILIES:
        raise DitLoraError(f"no family {name!r}; model.family is one of {', '.join(FAMILIES)}")
    return importlib.import_module(FAMILIES[name]).FAMILY
