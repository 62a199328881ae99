"""What the contract test must know of each family's tiny checkpoints; one module a family."""

from family_cases import (
    cogvideox,
    dit,
    flux,
    flux2,
    krea2,
    ltx2,
    ltx_video,
    qwen_image,
    sana,
    sd3,
    video_dit,
    wan,
    z_image,
)
from family_cases.case import Case

CASES: tuple[Case, ...] = (
    *cogvideox.CASES,
    *dit.CASES,
    *flux.CASES,
    *flux2.CASES,
    *krea2.CASES,
    *qwen_image.CASES,
    *ltx_video.CASES,
    *ltx2.CASES,
    *sana.CASES,
    *sd3.CASES,
    *video_dit.CASES,
    *wan.CASES,
    *z_image.CASES,
)
