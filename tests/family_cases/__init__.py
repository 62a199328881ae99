"""What the contract test must know of each family's tiny checkpoints; one module a family."""

from family_cases import cogvideox, dit, flux, flux2, ltx_video, sana, sd3, video_dit, wan
from family_cases.case import Case

CASES: tuple[Case, ...] = (
    *cogvideox.CASES,
    *dit.CASES,
    *flux.CASES,
    *flux2.CASES,
    *ltx_video.CASES,
    *sana.CASES,
    *sd3.CASES,
    *video_dit.CASES,
    *wan.CASES,
)
