"""SHA-256 of files and folders, remembered by path, size and time of change."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dit_lora.config.records import read_typed
from dit_lora.data.media.decode_mark import decode_mark
from dit_lora.data.media.media import Media, MediaFile, open_bytes
from dit_lora.files import files_below, write_whole

# Suffixes of the files in a checkpoint component that affect its output, unlike a README.
_COMPONENT_SUFFIXES = {".json", ".safetensors", ".model", ".txt"}


class Digests:
    """Content digests of files; a file is read again only if its stamp (`Media.stamp`) differs."""

    def __init__(self, memo: Path) -> None:
        self._memo = memo
        self._known: dict[str, list[Any]] = {}
        self._changed = False
        # If the memo is incomplete or unreadable, digests are computed again.
        with suppress(OSError, ValueError):
            self._known = read_typed(memo, dict[str, Annotated[list[Any], Field(min_length=2)]])

    def media(self, media: Media) -> str:
        """SHA-256 hex digest of the bytes of a video or image; raises `OSError`."""
        return self._values(media)[0]

    def pixels(self, media: Media) -> str:
        """The digest, with a suffix if this version decodes the same bytes to different pixels; raises `OSError`."""
        values = self._values(media)
        # The mark needs a look into the file, so it is computed only when pixels are asked for.
        if len(values) == 1:
            values.append(decode_mark(media))
            self._known[media.place].append(values[1])
            self._changed = True
        digest, decoder_mark = values
        return f"{digest}+{decoder_mark}" if decoder_mark else digest

    def _values(self, media: Media) -> list[str]:
        """The digest, and the decoder's mark if it was requested before."""
        location, stamp = media.place, list(media.stamp())
        # An entry of the memo is the file's stamp followed by its values.
        entry = self._known.get(location, [])
        if entry[: len(stamp)] != stamp or not _are_values(entry[len(stamp) :]):
            with open_bytes(media) as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            entry = self._known[location] = [*stamp, digest]
            self._changed = True
        return entry[len(stamp) :]

    def file(self, path: Path) -> str:
        """SHA-256 hex digest of the bytes of a file."""
        return self.media(MediaFile(path))

    def component(self, folder: Path) -> str:
        """One digest for a checkpoint component: names and contents of its configs and weights."""
        files = [p for p in files_below(folder) if p.suffix in _COMPONENT_SUFFIXES]
        # Relative names, so that a moved checkpoint keeps its digest.
        lines = [f"{path.relative_to(folder).as_posix()} {self.file(path)}" for path in files]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def save(self) -> None:
        """Write the memo for the next run."""
        if self._changed:
            write_whole(self._memo, json.dumps(self._known))
            self._changed = False


def _are_values(values: list[Any]) -> bool:
    return len(values) in (1, 2) and all(isinstance(value, str) for value in values)
