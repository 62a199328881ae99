"""Every kind of bad sample that the audit must name, and sound ones that it must let pass."""

from benchmarks.faults.media import archives, captions, clips, files, images, pictures
from benchmarks.faults.media.kind import Kind

KINDS: tuple[Kind, ...] = (
    *clips.KINDS,
    *pictures.KINDS,
    *images.KINDS,
    *files.KINDS,
    *captions.KINDS,
    *archives.KINDS,
)
