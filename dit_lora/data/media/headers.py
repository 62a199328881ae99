"""Headers of media files, remembered by size and modification time."""

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dit_lora.data.media.media import Media
from dit_lora.data.media.video import ClipError, read_header
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.files import write_atomically
from dit_lora.parsing import parse_json

# Raised when the same file would give another header.
_VERSION = 3
# Opening a file waits for the disk, so more threads than cores are useful.
_NUM_THREADS = 8

Progress = Callable[[Sequence[Any]], Iterable[Any]]
"""Wraps a sequence in a progress bar, like tqdm."""


class MediaHeaderCache:
    """Reads headers of media files and remembers them; a file is read again only if its size or time differs."""

    def __init__(self, memo: Path) -> None:
        self._memo = memo
        self._headers_by_location: dict[str, tuple[list[int], dict[str, Any]]] = {}
        # If a killed run left the memo incomplete, headers are read again.
        with suppress(OSError, ValueError):
            stored = parse_json(memo.read_bytes())
            if stored["version"] == _VERSION:
                self._headers_by_location = stored["headers"]

    def read(self, media: Sequence[Media], progress: Progress) -> list[VideoHeader | ClipError]:
        """Read the header of each media file, or the error that tells why it has none."""
        headers: dict[int, VideoHeader | ClipError] = {}
        for index, medium in enumerate(media):
            stored = self._headers_by_location.get(medium.location)
            if stored is not None and stored[0] == _get_file_stamp(medium):
                headers[index] = VideoHeader(**stored[1])
        unread = [index for index in range(len(media)) if index not in headers]
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            fresh = pool.map(lambda index: _read_header_or_error(media[index]), unread)
            # `map` keeps the order of `unread`, so the progress bar and the results advance together.
            for index, header in zip(progress(unread) if unread else (), fresh, strict=False):
                headers[index] = header
                # Errors are not stored: the file may be repaired or come back.
                if isinstance(header, VideoHeader):
                    self._headers_by_location[media[index].location] = (_get_file_stamp(media[index]), asdict(header))
        return [headers[index] for index in range(len(media))]

    def save(self) -> None:
        """Save the headers for the next run."""
        write_atomically(self._memo, json.dumps({"version": _VERSION, "headers": self._headers_by_location}))


def _get_file_stamp(media: Media) -> list[int]:
    try:
        return list(media.get_file_stamp())
    except OSError:
        # The file is missing; reading it will report that.
        return []


def _read_header_or_error(media: Media) -> VideoHeader | ClipError:
    try:
        return read_header(media)
    except ClipError as error:
        return error
