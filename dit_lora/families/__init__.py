"""The model families. `FAMILIES` maps the family names used in recipes to the modules that describe them.

Other packages add diffusion families by the entry point group `dit_lora.families`: the name of the family, and the
module that has its description as `FAMILY`. Names of this package win.
"""

import importlib
import logging
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.families.no_hub_kernel import hide_kernels_from_bitsandbytes
from dit_lora.terminal import echo

hide_kernels_from_bitsandbytes()  # must run before a family imports Diffusers and PEFT
# Diffusers' pipelines import CLIP's image processor. Its warning asks for torchvision, which no family needs.
logging.getLogger("transformers.utils.import_utils").addFilter(
    lambda record: "requires torchvision (not installed)" not in record.getMessage()
)
# Each guider of a modular pipeline warns that guiders are experimental.
logging.getLogger("diffusers.guiders.guider_utils").addFilter(
    lambda record: "Guiders are currently an experimental feature" not in record.getMessage()
)

_OWN_DIFFUSION_FAMILIES = {
    "anima": "dit_lora.families.anima",
    "chroma": "dit_lora.families.chroma",
    "cogvideox": "dit_lora.families.cogvideox",
    "dit": "dit_lora.families.dit",
    "ernie_image": "dit_lora.families.ernie_image",
    "flux": "dit_lora.families.flux",
    "flux2": "dit_lora.families.flux2",
    "hunyuan_video15": "dit_lora.families.hunyuan_video15",
    "ideogram4": "dit_lora.families.ideogram4",
    "kandinsky5": "dit_lora.families.kandinsky5",
    "krea2": "dit_lora.families.krea2",
    "qwen_image": "dit_lora.families.qwen_image",
    "qwen_image21": "dit_lora.families.qwen_image21",
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
CHAT_FAMILIES = {"videochat2": "dit_lora.families.videochat2", "chat": "dit_lora.families.chat"}
"""Families whose checkpoints implement the contract of `families.chat_base`."""
_OWN_FAMILIES = _OWN_DIFFUSION_FAMILIES | CHAT_FAMILIES
# Only names are read here: a module is imported when its family is used.
_OTHER_FAMILIES = {
    point.name: point.value for point in entry_points(group="dit_lora.families") if point.name not in _OWN_FAMILIES
}
DIFFUSION_FAMILIES = _OWN_DIFFUSION_FAMILIES | _OTHER_FAMILIES
"""Families whose checkpoints implement the contract of `families.base`."""
FAMILIES = DIFFUSION_FAMILIES | CHAT_FAMILIES


def get_family(name: str) -> Any:
    """Import and return a family by its name in recipes.

    Args:
        name: A key of `FAMILIES`.

    Returns:
        A `DiffusionFamily` or a `ChatFamily`.

    Raises:
        DitLoraError: No family has this name, or the package that adds it cannot be imported.
    """
    if name not in FAMILIES:
        raise DitLoraError(f"no family {name!r}; model.family is one of {', '.join(FAMILIES)}")
    # A family's package is plain data. Its checkpoint code is imported later, when a checkpoint is opened.
    if name in _OWN_FAMILIES:
        return importlib.import_module(FAMILIES[name]).FAMILY
    try:
        return importlib.import_module(FAMILIES[name]).FAMILY
    # What importing somebody else's module may raise; an interrupt or exit of the process passes.
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        NameError,
        OSError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
    ) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DitLoraError(
            f"cannot load family {name} from {FAMILIES[name]} ({reason}); update its package"
        ) from error


def get_families() -> Mapping[str, Any]:
    """All model families by name.

    A family of another package that cannot be imported is left out with a warning. This imports only their
    descriptions, which takes milliseconds and no torch.
    """
    families = {name: get_family(name) for name in _OWN_FAMILIES}
    # A broken package of somebody else must not end a command that does not need it.
    for name in _OTHER_FAMILIES:
        try:
            families[name] = get_family(name)
        except DitLoraError as error:
            _warn_once(str(error))
    return families


def get_diffusion_families() -> Mapping[str, Any]:
    """The diffusion families among all model families, by name."""
    return {name: family for name, family in get_families().items() if name in DIFFUSION_FAMILIES}


@cache
def _warn_once(message: str) -> None:
    echo(f"warning: {message}", err=True)


def get_default_recipes() -> dict[str, str]:
    """Name of the default recipe of each family; users select that recipe with the family's name."""
    return {name: family.default_recipe for name, family in get_families().items()}
