"""Whether an image holds all of its pixels, where Pillow fills in what is missing without a word.

A PNG's compressed stream may end after some rows, and a JPEG's coded data before the marker that ends it. Of every
other format that is read, Pillow itself raises.
"""

import zlib
from collections.abc import Iterator
from typing import BinaryIO

import av
import numpy as np
from PIL import Image

_PIECE = 2**18  # bytes that are decompressed at a time
_PNG_START = 8
_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Values a pixel by PNG's colour type (PNG, 11.2.1)."""
_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""First column and row, and steps, of an interlaced PNG's passes (PNG, 8.2)."""
_FILLED = (127, 128)
"""What libjpeg decodes to where there is no data: grey, in every channel, or its complement in CMYK."""
_CORNER = 4  # pixels; a block has 8, of which the picture may show fewer


def missing_rows(stream: BinaryIO, image: Image.Image) -> str | None:
    """Why the decoded image is not whole; None if it is. `stream` holds its file."""
    stream.seek(0)
    if image.format == "PNG":
        lacks = _png_lacks(stream)
        return f"the image is truncated: {lacks:,} bytes of its rows are missing" if lacks else None
    if image.format in ("JPEG", "MPO") and _may_lack(image) and _jpeg_breaks(stream.read()):
        return "the image is truncated: its coded data ends before its last row"
    return None


def _png_lacks(stream: BinaryIO) -> int:
    """Bytes of filtered rows that do not come out of the IDAT chunks."""
    stream.seek(_PNG_START + 8)  # length and name of IHDR
    header = stream.read(13)
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    bits = header[8] * _SAMPLES[header[9]]
    passes = _ADAM7 if header[12] else ((0, 0, 1, 1),)
    left = 0
    for column, row, across, down in passes:
        columns, rows = -(-max(0, width - column) // across), -(-max(0, height - row) // down)
        left += rows * (1 + -(-columns * bits // 8)) if columns else 0
    for size in _decompressed(stream):
        left -= size
        if left <= 0:
            return 0
    return left


def _decompressed(stream: BinaryIO) -> Iterator[int]:
    """Lengths of the pieces that the IDAT chunks decompress to."""
    inflate = zlib.decompressobj()
    stream.seek(_PNG_START)
    while len(head := stream.read(8)) == 8 and head[4:] != b"IEND":
        length, name = int.from_bytes(head[:4]), head[4:]
        end = stream.tell() + length + 4
        while name == b"IDAT" and length and not inflate.eof:
            data = stream.read(min(length, _PIECE))
            length = length - len(data) if data else 0
            while data and not inflate.eof:
                yield len(inflate.decompress(data, _PIECE))
                data = inflate.unconsumed_tail
        stream.seek(end)


def _may_lack(image: Image.Image) -> bool:
    """Whether its last pixels are those of a decoder without data; of a progressive one that is not to be seen."""
    corner = np.asarray(image)[-_CORNER:, -_CORNER:]
    return bool("progressive" in image.info or np.isin(corner, _FILLED).all())


def _jpeg_breaks(data: bytes) -> bool:
    """Whether FFmpeg's decoder, which can be told to, stops where libjpeg fills in."""
    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.options = {"err_detect": "explode"}
    decoder.thread_count = 1
    try:
        decoder.decode(av.Packet(data))
    except av.error.InvalidDataError:
        return True
    except av.error.FFmpegError:
        return False  # a kind of JPEG that it does not decode
    return False
