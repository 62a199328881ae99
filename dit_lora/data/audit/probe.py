"""Decodes one video or image to its end and measures it; every fault of the file becomes a finding.

Nothing here needs torch, so that the audit's worker processes start quickly.
"""

import errno
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dit_lora.data.audit.container import (
    HEAD_BYTES,
    count_missing_bytes,
    find_foreign_format,
    has_end_marker,
    has_media_signature,
)
from dit_lora.data.audit.finding import Finding
from dit_lora.data.audit.image_probe import measure_image
from dit_lora.data.audit.mask_probe import measure_mask
from dit_lora.data.audit.video_probe import measure_video
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, detect_suffix, open_media_bytes
from dit_lora.data.sources.clips import LossMask

_MISSING_ERRNOS = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}
_MISSING_FAULT = ("there is no such file", "correct its name, or remove the entry")
REFETCH_REMEDY = "download it again, or remove it"


@dataclass(frozen=True)
class ProbedFile:
    """Measurements of one media file, and its faults."""

    faults: tuple[Finding, ...]
    """Reasons why the file cannot be used by any recipe."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Plain values of the header, the frames, the time stamps and the pictures."""
    thumbnail: bytes | None = None
    """A JPEG of up to four frames side by side."""
    broke: bool = False
    """True if the decoder crashed or stopped making progress."""


def probe_file(medium: Media | LossMask, heartbeat: Callable[[], None] = lambda: None) -> ProbedFile:
    """Measure a media file; `heartbeat` is called after every packet. A bad file never raises."""
    media = get_media(medium)
    try:
        if not media.exists():
            return _make_rejection("missing", *_MISSING_FAULT)
        with open_media_bytes(media) as stream:
            # Seeking to the end returns the size, also for bytes in memory and members of a tar.
            size = stream.seek(0, io.SEEK_END)
            stream.seek(0)
            head = stream.read(HEAD_BYTES)
            num_missing, is_terminated = count_missing_bytes(stream, size), has_end_marker(stream, size)
    except OSError as error:
        if error.errno in _MISSING_ERRNOS:
            return _make_rejection("missing", *_MISSING_FAULT)
        return _make_rejection("unreadable", f"it cannot be read: {error.strerror or error}")
    if size == 0:
        return _make_rejection("empty_file", "the file has no bytes")
    # A file that is not media must not reach a decoder, which might open other files that it names.
    foreign = find_foreign_format(head)
    if foreign:
        return _make_rejection("not_media", f"its content is {foreign}")
    if isinstance(medium, LossMask):
        failures, facts, thumbnail = measure_mask(medium, heartbeat)
    else:
        measure = measure_image if is_image(media) else measure_video
        failures, facts, thumbnail = measure(media, heartbeat)
    facts = {"bytes": size, "content": detect_suffix(head[:64]), **facts}
    faults = [Finding(code, message, "reject", REFETCH_REMEDY) for code, message in failures]
    has_no_video = any(code == "no_video_stream" for code, _ in failures)
    # Decoding failed and the first bytes are of no known format: the file is not a damaged video, but no media at all.
    if "frames" not in facts and not has_no_video and not has_media_signature(head):
        return _make_rejection("not_media", "it is not a supported video or image format")
    # A file that ends early explains all decoding errors; only faults of another kind are kept.
    if num_missing > 0:
        faults = [fault for fault in faults if fault.code in ("unreadable", "no_video_stream")]
        message = f"the file ends early: {num_missing} bytes of its {size + num_missing} are missing"
        faults.append(Finding("truncated", message, "reject", REFETCH_REMEDY))
    elif faults and not is_terminated:
        faults = [Finding("truncated", f"the image ends early, after {size} bytes", "reject", REFETCH_REMEDY)]
    return ProbedFile(tuple(faults), facts, thumbnail)


def get_media(medium: Media | LossMask) -> Media:
    """Media file of a clip, or of a mask."""
    return medium.media if isinstance(medium, LossMask) else medium


def _make_rejection(code: str, message: str, remedy: str = REFETCH_REMEDY) -> ProbedFile:
    return ProbedFile((Finding(code, message, "reject", remedy),))
