"""SHA-256 of files and folders, remembered by path, size and time of change.

Files that this version decodes to different pixels than earlier versions have a mark after their digest. Digests of
all other files are unchanged, so that the caches of earlier versions stay valid.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import av
from pydantic import Field

from dit_lora.config.records import read_typed_json
from dit_lora.data.media.colour_profile import has_non_srgb_colours
from dit_lora.data.media.display import Orientation
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media, MediaFile, open_media_bytes
from dit_lora.data.media.opened import open_media, open_picture
from dit_lora.data.media.pictures import DECODE_ERRORS
from dit_lora.data.media.video_header import decode_first_frame, find_video_stream
from dit_lora.files import list_files, write_atomically

# Suffixes of the files in a checkpoint component that affect its output, unlike a README.
_COMPONENT_SUFFIXES = {".json", ".safetensors", ".model", ".txt"}


class Digests:
    """Content digests of files, remembered between runs.

    A file is read again only if its stamp (`Media.get_file_stamp`) differs.
    """

    def __init__(self, memo: Path) -> None:
        self._memo = memo
        self._entries: dict[str, list[Any]] = {}
        self._has_changes = False
        # If the memo is incomplete or unreadable, digests are computed again.
        with suppress(OSError, ValueError):
            self._entries = read_typed_json(memo, dict[str, Annotated[list[Any], Field(min_length=2)]])

    def hash_media(self, media: Media) -> str:
        """SHA-256 hex digest of the bytes of a video or image; raises `OSError`."""
        return self._look_up_values(media)[0]

    def hash_pixels(self, media: Media) -> str:
        """Digest of the bytes of a video or image, for keys of decoded pixels; raises `OSError`.

        It has a suffix if this version decodes the same bytes to different pixels than earlier ones.
        """
        values = self._look_up_values(media)
        # The mark needs a look into the file, so it is computed only when pixels are asked for.
        if len(values) == 1:
            values.append(get_decoded_pixel_conversion(media))
            self._entries[media.location].append(values[1])
            self._has_changes = True
        digest, decoder_mark = values
        return f"{digest}+{decoder_mark}" if decoder_mark else digest

    def _look_up_values(self, media: Media) -> list[str]:
        """Stored or new digest of a file, followed by its decoding variant if that was requested before."""
        location, stamp = media.location, list(media.get_file_stamp())
        # An entry of the memo is the file's stamp followed by its values.
        entry = self._entries.get(location, [])
        values = entry[len(stamp) :]
        is_valid = len(values) in (1, 2) and all(isinstance(value, str) for value in values)
        if entry[: len(stamp)] != stamp or not is_valid:
            with open_media_bytes(media) as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            entry = self._entries[location] = [*stamp, digest]
            self._has_changes = True
        return entry[len(stamp) :]

    def hash_file(self, path: Path) -> str:
        """SHA-256 hex digest of the bytes of a file."""
        return self.hash_media(MediaFile(path))

    def hash_component(self, folder: Path) -> str:
        """Compute one digest for a checkpoint component: names and contents of its configs and weights."""
        files = [p for p in list_files(folder) if p.suffix in _COMPONENT_SUFFIXES]
        # Relative names, so that a moved checkpoint keeps its digest.
        lines = [f"{path.relative_to(folder).as_posix()} {self.hash_file(path)}" for path in files]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def save(self) -> None:
        """Save the digests for the next run."""
        if self._has_changes:
            write_atomically(self._memo, json.dumps(self._entries))
            self._has_changes = False


def get_decoded_pixel_conversion(media: Media) -> str:
    """How a file's pixels are changed after decoding: `srgb` if an ICC profile is applied, `display` if mirrored.

    The former is for pictures, the latter for videos. "" for all others.
    """
    try:
        if is_image(media):
            with open_picture(media) as image:
                return "srgb" if has_non_srgb_colours(image) else ""
        with open_media(media) as container:
            frame = decode_first_frame(container, find_video_stream(container))
            return "display" if Orientation.from_frame(frame).is_mirrored or frame.rotation % 90 else ""
    except (av.error.FFmpegError, *DECODE_ERRORS):
        # Decoding reports what is wrong with the file.
        return ""
