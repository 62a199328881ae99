"""The one place where FFmpeg and Pillow open a file: with limits of size and of what may be opened beside it.

Nothing here needs torch, so that the audit's processes start quickly.
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

from dit_lora.data.media.media import HEIC, Media, read_head, sniffed_suffix

# A forked process, such as a data worker, inherits frames and decoders of its parent, without the threads of FFmpeg that
# belong to them: to free them there would wait for these for ever. What is frozen is not collected.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=gc.freeze)

MOST_PIXELS = 2 * 89_478_485
"""The most pixels of one picture.

Pillow takes a larger image for a decompression bomb (`Image.MAX_IMAGE_PIXELS`, twice), and a video's frame
is one no less.
"""
MOST_FRAMES = 1_000_000
"""The most frames of one video: eleven hours at 25 a second.

A few megabytes can promise more than can be decoded in a day.
"""

# Formats whose files hold all that they show. The others that FFmpeg knows may be texts that name what to open:
# playlists (HLS, DASH, concat), session descriptions (SDP), patterns of file names, filter graphs, devices.
_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,asf,flv,mpeg,mpegts,mpegvideo,m4v,h264,hevc,ivf,ogg,gif,apng,"
    "png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe,mp3,wav,flac,aac"
)
_NO_PROTOCOL = "none"
# Pillow also knows formats whose reading starts another program, as EPS does Ghostscript.
_IMAGES = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "TIFF", "GIF", "AVIF", "JPEG2000", "PPM")

HEIC_REASON = "Pillow does not read HEIC; convert it to JPEG or PNG"

# PyAV 19 reads metadata of any encoding, and has no option for it.
_ANY_ENCODING: dict[str, Any] = (
    {"metadata_errors": "replace"} if Version(av.__version__).major < 19 else {}
)


def open_media(media: Media) -> av.container.InputContainer:
    """Open a container that opens nothing but this file: no other, no address, no device.

    Metadata may be in any encoding. Decoders refuse pictures above `MOST_PIXELS`. Raises `OSError` or
    `av.error.FFmpegError`.
    """
    source = media.source()
    options = {
        "protocol_whitelist": "file" if isinstance(source, Path) else _NO_PROTOCOL,
        "format_whitelist": _FORMATS,
        "max_pixels": str(MOST_PIXELS),
    }
    container = av.open(source, "r", options=options, **_ANY_ENCODING)
    # Options of the container do not reach its decoders.
    for stream in container.streams.video:
        if stream.codec_context is not None:
            stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
    return container


def oversize(height: int, width: int) -> str | None:
    """Return why pictures of this size are not decoded; None if they are."""
    if height * width <= MOST_PIXELS:
        return None
    return f"its header promises pictures of {width} x {height}, and {MOST_PIXELS:,} pixels are decoded at most"


def message_of(error: Exception) -> str:
    """Return FFmpeg's, Pillow's or the system's message without its number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class FrameLimit:
    """Counter of the frames that come out of a video, up to `MOST_FRAMES`."""

    def __init__(self) -> None:
        self._left = MOST_FRAMES

    def take(self) -> None:
        """Count one frame; raises `ValueError` beyond the limit."""
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {MOST_FRAMES:,} frames come out of it; cut it into parts")


@contextmanager
def open_picture(media: Media) -> Iterator[Image.Image]:
    """Open an image of one of the accepted formats, nothing of it decoded yet.

    Raises `OSError`, `Image.DecompressionBombError` above `MOST_PIXELS`, or what Pillow's readers raise at
    damaged headers.
    """
    Image.init()
    # AVIF is an optional part of Pillow.
    formats = [name for name in _IMAGES if name in Image.OPEN]
    try:
        opened = Image.open(media.source(), formats=formats)
    except UnidentifiedImageError as error:
        if sniffed_suffix(read_head(media)) == HEIC:
            raise UnidentifiedImageError(HEIC_REASON) from error
        raise
    with opened as image:
        # Pillow's own limit can be switched off.
        too_large = oversize(image.height, image.width)
        if too_large:
            raise Image.DecompressionBombError(too_large)
        yield image


def own_jpeg(data: bytes) -> Image.Image:
    """Return a picture of which this library made the JPEG, such as an audit's small one; RGB."""
    with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        return image.convert("RGB")
