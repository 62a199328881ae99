"""What media files say of themselves, remembered by size and time of change."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dit_lora.data.media import Media
from dit_lora.data.video import ClipError, VideoHeader, read_header
from dit_lora.files import write_whole
from dit_lora.parsing import parse_json

_VERSION = 1  # raised when a header would be read otherwise
_THREADS = 8  # opening a file waits for the disk

Progress = Callable[[Sequence[Any]], Iterable[Any]]
"""A progress bar around what is worked through, as tqdm is."""


class Headers:
    """Headers of media; a file is opened again only if its size or time of change differs."""

    def __init__(self, memo: Path) -> None:
        self._memo = memo
        self._known: dict[str, tuple[list[int], dict[str, Any]]] = {}
        if memo.is_file():
            try:
                stored = parse_json(memo.read_text(encoding="utf-8"))
            except ValueError:
                return  # torn by a killed run; headers are read anew
            if stored["version"] == _VERSION:
                self._known = stored["headers"]

    def read(self, media: Sequence[Media], progress: Progress) -> list[VideoHeader | ClipError]:
        """The header of each, or why it has none."""
        found: list[VideoHeader | ClipError | None] = [self._remembered(one) for one in media]
        unread = [index for index, header in enumerate(found) if header is None]
        with ThreadPoolExecutor(_THREADS) as pool:
            headers: Iterator[VideoHeader | ClipError] = pool.map(
                lambda index: _read(media[index]), unread
            )
            for index in progress(unread) if unread else ():
                found[index] = self._keep(media[index], next(headers))
        return [header for header in found if header is not None]

    def save(self) -> None:
        """Keep the memo for the next run."""
        write_whole(self._memo, json.dumps({"version": _VERSION, "headers": self._known}))

    def _remembered(self, media: Media) -> VideoHeader | None:
        known = self._known.get(media.place)
        if known is None or known[0] != _stamp(media):
            return None
        return VideoHeader(**known[1])

    def _keep(self, media: Media, header: VideoHeader | ClipError) -> VideoHeader | ClipError:
        if isinstance(header, VideoHeader):
            self._known[media.place] = (_stamp(media), asdict(header))
        return header


def _stamp(media: Media) -> list[int]:
    try:
        return list(media.stamp())
    except OSError:
        return []  # gone: reading it says so


def _read(media: Media) -> VideoHeader | ClipError:
    try:
        return read_header(media)
    except ClipError as error:
        return error
