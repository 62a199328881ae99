"""Every patch that there is."""

from dit_lora.fuse import (
    attention,
    basic,
    cogvideox,
    flux,
    hunyuan_video,
    liger,
    lora,
    ltx,
    mochi,
    sana,
    sana_video,
    sd3,
    video_dit,
    wan,
)
from dit_lora.fuse.core import ForwardPatch, ProcessorPatch

FORWARDS: tuple[ForwardPatch, ...] = (
    *(
        ForwardPatch(b, lora.OP, lora.lora_forward, for_now=lora.why_not, whole=True)
        for b in lora.BASES
    ),
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
WITHOUT_TRITON = ("lora_linear",)
"""Ops that are matrix products of PyTorch's own, so that they run, and help, everywhere."""
