"""Decodes one video or image to its end and measures it; every fault of the file becomes a finding.

Nothing here needs torch, so that the audit's worker processes start quickly.
"""

import errno
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dit_lora.data.audit.container import HEAD, foreign_kind, has_end, is_known, missing_bytes
from dit_lora.data.audit.finding import Finding
from dit_lora.data.audit.image_probe import measure_image
from dit_lora.data.audit.mask_probe import measure_mask
from dit_lora.data.audit.video_probe import measure_video
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, open_bytes, sniffed_suffix
from dit_lora.data.sources.clips import LossMask

_NOT_THERE = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}
_GONE = ("there is no such file", "correct its name, or remove the entry")
ANEW = "fetch it again, or remove it"


@dataclass(frozen=True)
class ProbedFile:
    """Measurements of one file, and its faults."""

    faults: tuple[Finding, ...]
    """Reasons why the file cannot be used by any recipe."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Plain values of the header, the frames, the time stamps and the pictures."""
    thumbnail: bytes | None = None
    """A JPEG of up to four frames side by side."""
    broke: bool = False
    """True if the decoder crashed or stopped making progress."""


def probe(probed: Media | LossMask, alive: Callable[[], None] = lambda: None) -> ProbedFile:
    """Measure a file; `alive` is called after every packet. A bad file never raises."""
    media = file_of(probed)
    try:
        if not media.exists():
            return _rejected("missing", *_GONE)
        with open_bytes(media) as stream:
            # Seeking to the end returns the size, also for bytes in memory and members of a tar.
            size = stream.seek(0, io.SEEK_END)
            stream.seek(0)
            head = stream.read(HEAD)
            num_missing, is_terminated = missing_bytes(stream, size), has_end(stream, size)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return _rejected("missing", *_GONE)
        return _rejected("unreadable", f"it cannot be read: {error.strerror or error}")
    if size == 0:
        return _rejected("empty_file", "the file has no bytes")
    # A file that is not media must not reach a decoder, which might open other files that it names.
    foreign = foreign_kind(head)
    if foreign:
        return _rejected("not_media", f"its content is {foreign}")
    if isinstance(probed, LossMask):
        failures, facts, thumbnail = measure_mask(probed, alive)
    else:
        measure = measure_image if is_image(media) else measure_video
        failures, facts, thumbnail = measure(media, alive)
    facts = {"bytes": size, "content": sniffed_suffix(head[:64]), **facts}
    faults = [Finding(code, message, "reject", ANEW) for code, message in failures]
    has_no_video = any(code == "no_video_stream" for code, _ in failures)
    # Decoding failed and the first bytes are of no known format: the file is not a damaged video, but no media at all.
    if "frames" not in facts and not has_no_video and not is_known(head):
        return _rejected("not_media", "its bytes are of no video or image format known here")
    # A file that ends early explains all decoding errors; only faults of another kind are kept.
    if num_missing > 0:
        faults = [fault for fault in faults if fault.code in ("unreadable", "no_video_stream")]
        message = (
            f"the file ends early: {num_missing} bytes of its {size + num_missing} are missing"
        )
        faults.append(Finding("truncated", message, "reject", ANEW))
    elif faults and not is_terminated:
        message = f"the image ends early, after {size} bytes"
        faults = [Finding("truncated", message, "reject", ANEW)]
    return ProbedFile(tuple(faults), facts, thumbnail)


def file_of(probed: Media | LossMask) -> Media:
    """The media file of a clip or of a mask."""
    return probed.media if isinstance(probed, LossMask) else probed


def _rejected(code: str, message: str, remedy: str = ANEW) -> ProbedFile:
    return ProbedFile((Finding(code, message, "reject", remedy),))
