"""Thumbnails of clips and pictures: a JPEG of some frames, made once for each version of a file."""

import hashlib
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore

import numpy as np
from PIL import Image

from dit_lora.data.media.decode import ArbitraryFrameTimes
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.opened import encode_jpeg
from dit_lora.data.media.pictures import DECODE_ERRORS, open_image, scale_to_cover
from dit_lora.data.media.video import ClipError, decode_pictures, read_header
from dit_lora.data.sources.caption_table import WORK_FOLDER
from dit_lora.files import read_file_inside_folder, write_atomically

_NUM_FRAMES, _HEIGHT = 3, 160  # number of frames of a thumbnail, and its height in pixels
_MAX_RATIO = 4  # largest ratio of its sides
_QUALITY = 75
_MAX_JPEG_BYTES = 2**20
_MAKING = BoundedSemaphore(2)
"""Decoders use several threads each, and a page asks for many thumbnails at once."""
_MAX_WAIT_S = 2.0  # for a decoder that is free


def get_thumbnail(root: Path, file: Path) -> bytes | None:
    """The thumbnail of a file, from the cache of its data set's folder if it is there.

    Empty if the file cannot be read, and None if too many thumbnails are being made.
    """
    # It may have been removed since the page was rendered.
    try:
        stamp = MediaFile(file).get_file_stamp()
    except OSError:
        return b""
    # A file that is replaced has another stamp, and so another thumbnail.
    key = hashlib.sha256(repr((os.fsencode(file), stamp)).encode()).hexdigest()[:40]
    # 256 folders: some file systems are slow with many files in one.
    path = root / WORK_FOLDER / "thumbnails" / key[:2] / f"{key}.jpg"
    with suppress(OSError):
        return read_file_inside_folder(root, path, _MAX_JPEG_BYTES)
    if not _MAKING.acquire(timeout=_MAX_WAIT_S):
        return None
    try:
        thumbnail = make_thumbnail(file)
    finally:
        _MAKING.release()
    # A folder that cannot be written, or is a link, has its thumbnails made each time. Empty ones are kept too.
    with suppress(OSError):
        if not any(folder.is_symlink() for folder in path.parents if folder.is_relative_to(root / WORK_FOLDER)):
            write_atomically(path, thumbnail)
    return thumbnail


def make_thumbnail(file: Path) -> bytes:
    """JPEG of some frames of a clip in a row, or of a picture; empty if it cannot be read."""
    media = MediaFile(file)
    return _make_picture_thumbnail(media) if is_image(media) else _make_clip_thumbnail(media)


def _make_picture_thumbnail(media: MediaFile) -> bytes:
    try:
        picture = open_image(media)
    except DECODE_ERRORS:
        return b""
    # A panorama is as wide as four squares at most.
    picture.thumbnail((_MAX_RATIO * _HEIGHT, _HEIGHT))
    return encode_jpeg(picture, _QUALITY)


def _make_clip_thumbnail(media: MediaFile) -> bytes:
    # A clip without a known length shows its first frame.
    seconds = [0.0]
    try:
        header = read_header(media)
        if header.seconds and header.fps:
            # The middles of equal parts.
            seconds = [header.seconds * (number + 0.5) / _NUM_FRAMES for number in range(_NUM_FRAMES)]
        width = round(min(_MAX_RATIO, max(1 / _MAX_RATIO, header.width / header.height)) * _HEIGHT)
        # uint8 (H, W, 3) each, cropped to the thumbnail's aspect ratio.
        fit = partial(scale_to_cover, height=_HEIGHT, width=width)
        pictures = decode_pictures(media, ArbitraryFrameTimes(tuple(seconds)), fit)
    except ClipError:
        return b""
    if not pictures:
        return b""
    # Side by side; the stated length of a clip may be too long for the last ones.
    return encode_jpeg(Image.fromarray(np.concatenate(pictures, axis=1)), _QUALITY)
