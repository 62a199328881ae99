"""Every patch that there is, of forwards and of attention processors.

Classes are told by name, so that no two patches may be of one class; within that, order does not matter.
"""

from dit_lora.fuse import attention, liger, lora
from dit_lora.fuse.models import (
    basic,
    cogvideox,
    flux,
    hunyuan_video,
    ltx,
    mochi,
    sana,
    sana_video,
    sd3,
    video_dit,
    wan,
)
from dit_lora.fuse.patches import ForwardPatch, ProcessorPatch

FORWARDS: tuple[ForwardPatch, ...] = (
    *lora.FORWARDS,
    *cogvideox.FORWARDS,
    *basic.FORWARDS,
    *video_dit.FORWARDS,
    *wan.FORWARDS,
    *ltx.FORWARDS,
    *sana.FORWARDS,
    *sana_video.FORWARDS,
    *flux.FORWARDS,
    *sd3.FORWARDS,
    *hunyuan_video.FORWARDS,
    *mochi.FORWARDS,
    *liger.FORWARDS,
)
PROCESSORS: tuple[ProcessorPatch, ...] = (
    *attention.PROCESSORS,
    *cogvideox.PROCESSORS,
    *wan.PROCESSORS,
    *ltx.PROCESSORS,
    *sana.PROCESSORS,
    *sana_video.PROCESSORS,
    *flux.PROCESSORS,
    *sd3.PROCESSORS,
    *hunyuan_video.PROCESSORS,
    *mochi.PROCESSORS,
)
# Matrix products of PyTorch's own, which run, and help, everywhere.
WITHOUT_TRITON = ("lora_linear",)
"""Ops that `auto` takes without a GPU."""
