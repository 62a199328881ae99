"""One file per model family; `FAMILIES` maps the names used in recipes to their modules."""

import importlib

from dit_lora.errors import DitLoraError
from dit_lora.families.base import Family

FAMILIES = {
    "cogvideox": "dit_lora.families.cogvideox",
    "dit": "dit_lora.families.dit",
    "sana": "dit_lora.families.sana",
    "sana_video": "dit_lora.families.sana_video",
    "video_dit": "dit_lora.families.video_dit",
    "latte": "dit_lora.families.latte",
}


def get_family(name: str) -> Family:
    """The family of that name, imported when asked for."""
    if name not in FAMILIES:
        raise DitLoraError(f"no family {name!r}; model.family is one of {', '.join(FAMILIES)}")
    return importlib.import_module(FAMILIES[name]).FAMILY
