"""The model families. `FAMILIES` maps the family names used in recipes to the modules that describe them."""

import importlib
from collections.abc import Mapping
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.families.no_hub_kernel import block_hub_kernel

block_hub_kernel()  # must run before a family imports Diffusers and PEFT

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
"""Families whose checkpoints implement the contract of `families.base`."""
CHAT_FAMILIES = {"videochat2": "dit_lora.families.videochat2", "chat": "dit_lora.families.chat"}
"""Families whose checkpoints implement the contract of `families.chat_base`."""
FAMILIES = DIFFUSION_FAMILIES | CHAT_FAMILIES


def get_family(name: str) -> Any:
    """Import and return a family by its name in recipes.

    Args:
        name: A key of `FAMILIES`.

    Returns:
        A `DiffusionFamily` or a `ChatFamily`.

    Raises:
        DitLoraError: No family has this name.
    """
    if name not in FAMILIES:
        raise DitLoraError(f"no family {name!r}; model.family is one of {', '.join(FAMILIES)}")
    # A family's package is plain data. Its checkpoint code is imported later, when a checkpoint is opened.
    return importlib.import_module(FAMILIES[name]).FAMILY


def get_families() -> Mapping[str, Any]:
    """All families by name. This imports only their descriptions, which takes milliseconds and no torch."""
    return {name: get_family(name) for name in FAMILIES}


def get_default_recipes() -> dict[str, str]:
    """The default recipe of each family, which users select by the family's name."""
    return {name: family.default_recipe for name, family in get_families().items()}
