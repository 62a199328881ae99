"""Every patch that there is, of forwards and of attention processors.

Classes are told by name, so that no two patches may be of one class; within that, order does not matter.
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

_MODELS = (
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
_MODULES = (attention, liger, lora, *_MODELS)
FORWARDS: tuple[ForwardPatch, ...] = tuple(
    patch for module in _MODULES for patch in getattr(module, "FORWARDS", ())
)
PROCESSORS: tuple[ProcessorPatch, ...] = tuple(
    patch for module in _MODULES for patch in getattr(module, "PROCESSORS", ())
)
# Matrix products of PyTorch's own, which run, and help, everywhere.
WITHOUT_TRITON = ("lora_linear",)
"""Ops that `auto` takes without a GPU."""
