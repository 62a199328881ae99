"""All patches of forwards and attention processors.

Classes are matched by name, so two patches must not be for the same class. Otherwise the order does not matter.
"""

from dit_lora.fuse import attention, liger, lora
from dit_lora.fuse.models import (
    basic,
    cogvideox,
    flux,
    flux2,
    krea2,
    ltx,
    ltx2,
    qwen_image,
    sana,
    sana_video,
    sd3,
    video_dit,
    wan,
    z_image,
)
from dit_lora.fuse.patches import ForwardPatch, ProcessorPatch

_MODEL_MODULES = (
    basic,
    cogvideox,
    flux,
    flux2,
    krea2,
    ltx,
    ltx2,
    qwen_image,
    sana,
    sana_video,
    sd3,
    video_dit,
    wan,
    z_image,
)
_PATCH_MODULES = (attention, liger, lora, *_MODEL_MODULES)
FORWARDS: tuple[ForwardPatch, ...] = tuple(
    patch for module in _PATCH_MODULES for patch in getattr(module, "FORWARDS", ())
)
PROCESSORS: tuple[ProcessorPatch, ...] = tuple(
    patch for module in _PATCH_MODULES for patch in getattr(module, "PROCESSORS", ())
)
# Plain PyTorch matrix products, which run and save memory on every device.
OPS_WITHOUT_TRITON = ("lora_linear",)
"""Ops that `auto` uses without a GPU."""
