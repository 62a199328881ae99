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

ARCHITECTURES = {
    *("cogvideox-2b", "cogvideox-5b", "cogvideox-1.5-i2v", "dit-tiny", "flux-dev", "flux2-klein"),
    *("krea2-raw", "latte", "ltx-2.3", "ltx-video", "qwen-image", "sana-600m", "sana-video"),
    *("sd3.5-medium", "sd3.5-large", "video-dit-class", "video-dit-text"),
    *("wan-2.1-t2v", "wan-2.1-i2v", "wan-2.2-ti2v-5b", "z-image"),
}
"""A case of each network; the others of its family have the same modules in other sizes, or another task."""
