"""The model families; `FAMILIES` maps the names used in recipes to the modules of their facts."""

import importlib
from collections.abc import Mapping
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.families.no_hub_kernel import keep_from_hub

keep_from_hub()  # before any family, and with it Diffusers and PEFT, is imported

DIFFUSION_FAMILIES = {
    "cogvideox": "dit_lora.families.cogvideox",
    "dit": "dit_lora.families.dit",
    "flux": "dit_lora.families.flux",
    "flux2": "dit_lora.families.flux2",
    "krea2": "dit_lora.families.krea2",
    "qwen_image": "dit_lora.families.qwen_image",
    "ltx_video": "dit_lora.families.ltx_video",
    "ltx2": "dit_lora.families.ltx2",
    "sana": "dit_lora.families.sana",
    "sana_video": "dit_lora.families.sana_video",
    "sd3": "dit_lora.families.sd3",
    "video_dit": "dit_lora.families.video_dit",
    "latte": "dit_lora.families.latte",
    "wan": "dit_lora.families.wan",
    "z_image": "dit_lora.families.z_image",
}
"""They have the contract of `families.base`."""
CHAT_FAMILIES = {
    "videochat2": "dit_lora.families.videochat2",
    "chat": "dit_lora.families.chat",
}
"""They have the contract of `families.chat_base`."""
FAMILIES = DIFFUSION_FAMILIES | CHAT_FAMILIES


def get_family(name: str) -> Any:
    """The family of that name, a `DiffusionFamily` or a `ChatFamily`, imported when asked for."""
    if name not in FAMILIES:
        raise DitLoraError(f"no family {name!r}; model.family is one of {', '.join(FAMILIES)}")
    return importlib.import_module(FAMILIES[name]).FAMILY


def every_family() -> Mapping[str, Any]:
    """Each family by its name; their facts are read in milliseconds."""
    return {name: get_family(name) for name in FAMILIES}


def default_recipes() -> dict[str, str]:
    """The recipe that each family's name stands for."""
    return {name: family.default_recipe for name, family in every_family().items()}
