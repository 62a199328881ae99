"""Check that an image holds all of its pixels, where Pillow fills in missing ones silently.

A PNG's compressed stream may end after some rows, and a JPEG's coded data before the marker that ends it.
For every other format that is read, Pillow itself raises.
"""

import zlib
from collections.abc import Iterator
from typing import BinaryIO

import av
import numpy as np
from PIL import Image

_PIECE = 2**18  # bytes that are decompressed at a time
_PNG_START = 8
_METADATA = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Values a pixel by PNG's colour type (PNG specification, 11.2.1)."""
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""First column and row, and steps, of an interlaced PNG's passes (PNG specification, 8.2)."""
_FILLED = (127, 128)
"""The values that libjpeg fills in for missing data: grey in every channel, or its complement in CMYK."""
_CORNER = 4  # pixels; a block has 8, of which the picture may show fewer


def missing_rows(stream: BinaryIO, image: Image.Image) -> str | None:
    """Return why the decoded image is not whole; None if it is. `stream` holds its file."""
    stream.seek(0)
    if image.format == "PNG":
        lacks = _png_lacks(stream)
        # Only a suspicious JPEG is decoded a second time.
        return f"the image is truncated: {lacks:,} bytes of its rows are missing" if lacks else None
    if image.format in ("JPEG", "MPO") and _may_lack(image) and _jpeg_breaks(stream.read()):
        return "the image is truncated: its coded data ends before its last row"
    return None


def _png_lacks(stream: BinaryIO) -> int:
    """Return the number of bytes of filtered rows that do not come out of the IDAT chunks."""
    stream.seek(_PNG_START + 8)  # length and name of IHDR
    header = stream.read(13)
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    bits = header[8] * _SAMPLES[header[9]]
    passes = _ADAM7 if header[12] else ((0, 0, 1, 1),)
    size = 0
    for column, row, across, down in passes:
        # -(-a // b) rounds up; each row that has pixels begins with a byte for its filter.
        columns, rows = -(-max(0, width - column) // across), -(-max(0, height - row) // down)
        size += rows * (1 + -(-columns * bits // 8)) if columns else 0
    inflate = zlib.decompressobj()
    for data in _image_data(stream):
        while data and size > 0 and not inflate.eof:
            size -= len(inflate.decompress(data, _PIECE))
            data = inflate.unconsumed_tail
    return max(0, size)


def has_late_metadata(stream: BinaryIO) -> bool:
    """Return True if a PNG has text or EXIF, which may hold its orientation, behind its pixels."""
    is_late = False
    for kind, _ in _chunks(stream):
        if is_late and kind in _METADATA:
            return True
        is_late = is_late or kind == b"IDAT"
    return False


def _image_data(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the contents of the IDAT chunks."""
    for kind, length in _chunks(stream):
        if kind == b"IDAT":
            yield stream.read(length)


def _chunks(stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield kind and length of each chunk of a PNG, with the stream at its contents."""
    at = _PNG_START
    stream.seek(at)
    while len(head := stream.read(8)) == 8 and head[4:] != b"IEND":
        length = int.from_bytes(head[:4])
        yield head[4:], length
        at += 8 + length + 4  # head, contents, CRC
        stream.seek(at)


def _may_lack(image: Image.Image) -> bool:
    """Return True if the last pixels are a decoder's filling, or if the image is progressive and they cannot tell."""
    corner = np.asarray(image)[-_CORNER:, -_CORNER:]
    return bool("progressive" in image.info or np.isin(corner, _FILLED).all())


def _jpeg_breaks(data: bytes) -> bool:
    """Return True if FFmpeg's decoder, which can be told to stop at errors, stops where libjpeg fills in."""
    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.options = {"err_detect": "explode"}
    decoder.thread_count = 1
    try:
        decoder.decode(av.Packet(data))
    except av.error.InvalidDataError:
        return True
    except av.error.FFmpegError:
        # This decoder does not know every kind of JPEG; such a one is left to Pillow's verdict.
        return False
    return False
