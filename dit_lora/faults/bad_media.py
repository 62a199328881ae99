"""Every kind of bad sample that the audit must name, and sound ones that it must let pass."""

from dit_lora.faults import (
    bad_archives,
    bad_captions,
    bad_clips,
    bad_files,
    bad_images,
    bad_pictures,
)
from dit_lora.faults.kind import Kind

KINDS: tuple[Kind, ...] = (
    *bad_clips.KINDS,
    *bad_pictures.KINDS,
    *bad_images.KINDS,
    *bad_files.KINDS,
    *bad_captions.KINDS,
    *bad_archives.KINDS,
)
