"""The only module that opens files with FFmpeg and Pillow: with limits on size and on what a file may refer to.

Nothing here needs torch, so that the audit's worker processes start quickly.
"""

import gc
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
from packaging.version import Version
from PIL import Image, UnidentifiedImageError

from dit_lora.data.media.media import HEIC, Media, detect_suffix, read_first_bytes

# A forked process, such as a data worker, inherits its parent's frames and decoders, but not the FFmpeg threads that
# belong to them. Freeing them would wait for those threads forever, so exclude them from garbage collection.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=gc.freeze)

MAX_PIXELS = 2 * 89_478_485
"""Maximum pixels of a picture or frame; Pillow refuses larger ones as bombs (twice `Image.MAX_IMAGE_PIXELS`)."""
MAX_FRAMES = 1_000_000
"""Maximum frames of a video, eleven hours at 25 fps; a few megabytes can claim more than a day can decode."""

# Formats whose files are self-contained. FFmpeg's other formats may be texts that name other things to open:
# playlists (HLS, DASH, concat), session descriptions (SDP), file name patterns, filter graphs, devices.
_SAFE_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,asf,flv,mpeg,mpegts,mpegvideo,m4v,h264,hevc,ivf,ogg,gif,apng,"
    "png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe,mp3,wav,flac,aac"
)
# Pillow also supports formats that start another program, as EPS does with Ghostscript; they are excluded.
_IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "TIFF", "GIF", "AVIF", "JPEG2000", "PPM")

HEIC_REASON = "Pillow does not read HEIC; convert it to JPEG or PNG"

# PyAV 19 reads metadata of any encoding and no longer has this option.
_ENCODING_OPTIONS: dict[str, Any] = {"metadata_errors": "replace"} if Version(av.__version__).major < 19 else {}


def open_media(media: Media) -> av.container.InputContainer:
    """Open a video container without opening anything else: no other file, no address, no device.

    Metadata may be in any encoding. Decoders refuse pictures above `MAX_PIXELS`. Raises `OSError` or
    `av.error.FFmpegError`.
    """
    # Bytes in memory need no protocol at all.
    source = media.get_source()
    options = {
        "protocol_whitelist": "file" if isinstance(source, Path) else "none",
        "format_whitelist": _SAFE_FORMATS,
        "max_pixels": str(MAX_PIXELS),
    }
    container = av.open(source, "r", options=options, **_ENCODING_OPTIONS)
    # The container's options do not reach its decoders, so set the limit on each of them.
    for stream in container.streams.video:
        if stream.codec_context is not None:
            stream.codec_context.options = {"max_pixels": str(MAX_PIXELS)}
    return container


def find_size_problem(height: int, width: int) -> str | None:
    """Why pictures of this size are too large to be decoded; None if they are not."""
    if height * width <= MAX_PIXELS:
        return None
    return f"its header announces pictures of {width} x {height}, and {MAX_PIXELS:,} pixels are the limit"


def get_error_message(error: Exception) -> str:
    """Message of an error of FFmpeg, Pillow or the system, without its error number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class FrameLimit:
    """Counts the decoded frames of a video, up to `MAX_FRAMES`."""

    def __init__(self) -> None:
        self._num_remaining = MAX_FRAMES

    def count_frame(self) -> None:
        """Count one decoded frame; raises `ValueError` above the limit."""
        self._num_remaining -= 1
        if self._num_remaining < 0:
            raise ValueError(f"more than {MAX_FRAMES:,} frames come out of it; cut it into parts")


@contextmanager
def open_picture(media: Media) -> Iterator[Image.Image]:
    """Open an image of an accepted format without decoding it.

    Raises `OSError`, `Image.DecompressionBombError` above `MAX_PIXELS`, or the errors that Pillow raises for damaged
    headers.
    """
    Image.init()
    # AVIF is an optional part of Pillow.
    formats = [name for name in _IMAGE_FORMATS if name in Image.OPEN]
    try:
        opened = Image.open(media.get_source(), formats=formats)
    except UnidentifiedImageError as error:
        # Pillow's own message does not tell the user what to do about phone pictures.
        if detect_suffix(read_first_bytes(media)) == HEIC:
            raise UnidentifiedImageError(HEIC_REASON) from error
        raise
    with opened as image:
        # Check here too, because Pillow's own limit can be switched off.
        too_large = find_size_problem(image.height, image.width)
        if too_large:
            raise Image.DecompressionBombError(too_large)
        yield image


def encode_jpeg(picture: Image.Image, quality: int) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def decode_jpeg(data: bytes) -> Image.Image:
    """Decode a JPEG made by this library, such as a thumbnail of the audit, to RGB."""
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        return image.convert("RGB")
