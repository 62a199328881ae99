"""Checks that an image has all of its pixels, in formats where Pillow silently fills in missing ones.

A PNG's compressed stream may end after some rows, and a JPEG's coded data before its end marker. For every
other supported format, Pillow raises an error itself.
"""

import zlib
from collections.abc import Iterator
from typing import BinaryIO

import av
import numpy as np
from PIL import Image

_CHUNK_BYTES = 2**18
_PNG_SIGNATURE_BYTES = 8
_METADATA_CHUNKS = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
_VALUES_PER_PIXEL = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Number of values per pixel by PNG's colour type (PNG specification, 11.2.1)."""
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column, first row, and their steps, for each pass of an interlaced PNG (PNG specification, 8.2)."""
_FILL_VALUES = (127, 128)
"""Values that libjpeg fills in for missing data: grey in every channel, or its complement in CMYK."""
# Pixels; a block of a JPEG has 8, of which the picture may show fewer.
_CORNER_SIDE = 4


def find_missing_rows(stream: BinaryIO, image: Image.Image) -> str | None:
    """Why a decoded image is incomplete (truncated); None if it is complete. `stream` contains its file."""
    stream.seek(0)
    if image.format == "PNG":
        num_missing = _count_missing_png_bytes(stream)
        return f"the image is truncated: {num_missing:,} bytes of its rows are missing" if num_missing else None
    if image.format not in ("JPEG", "MPO"):
        return None
    # Missing data is always at the end of the picture, so the lower right corner has the decoder's filling value. The
    # corner of a progressive image tells nothing. An image that is suspected is decoded a second time to be sure.
    corner = np.asarray(image)[-_CORNER_SIDE:, -_CORNER_SIDE:]
    is_suspect = "progressive" in image.info or np.isin(corner, _FILL_VALUES).all()
    if is_suspect and _is_jpeg_broken(stream.read()):
        return "the image is truncated: its coded data ends before its last row"
    return None


def _count_missing_png_bytes(stream: BinaryIO) -> int:
    """Number of bytes of filtered pixel rows that are missing from a PNG's IDAT chunks."""
    # Skip the length and the type of IHDR.
    stream.seek(_PNG_SIGNATURE_BYTES + 8)
    header = stream.read(13)
    # PNG numbers are big-endian, the default of `int.from_bytes`.
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    bits = header[8] * _VALUES_PER_PIXEL[header[9]]
    # Byte 12 of IHDR is the interlace method; without interlacing there is one pass over all pixels.
    passes = _ADAM7 if header[12] else ((0, 0, 1, 1),)
    size = 0
    for column, row, across, down in passes:
        # -(-a // b) rounds up; each row with pixels begins with a byte for its filter type.
        columns, rows = -(-max(0, width - column) // across), -(-max(0, height - row) // down)
        size += rows * (1 + -(-columns * bits // 8)) if columns else 0
    inflate = zlib.decompressobj()
    for kind, length in _iter_chunks(stream):
        data = stream.read(length) if kind == b"IDAT" else b""
        while data and size > 0 and not inflate.eof:
            # Decompress in pieces, so that a small file cannot fill the memory.
            size -= len(inflate.decompress(data, _CHUNK_BYTES))
            data = inflate.unconsumed_tail
    return max(0, size)


def has_metadata_after_pixels(stream: BinaryIO) -> bool:
    """True if a PNG has text or EXIF, which may contain its orientation, after its pixels."""
    is_late = False
    for kind, _ in _iter_chunks(stream):
        if is_late and kind in _METADATA_CHUNKS:
            return True
        is_late = is_late or kind == b"IDAT"
    return False


def _iter_chunks(stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield type and length of each chunk of a PNG, with the stream at its contents."""
    offset = _PNG_SIGNATURE_BYTES
    stream.seek(offset)
    while len(head := stream.read(8)) == 8 and head[4:] != b"IEND":
        length = int.from_bytes(head[:4])
        yield head[4:], length
        # Length and type, contents, CRC.
        offset += 8 + length + 4
        stream.seek(offset)


def _is_jpeg_broken(data: bytes) -> bool:
    """True if a JPEG's data is incomplete: FFmpeg's decoder fails where libjpeg would fill in pixels."""
    decoder = av.CodecContext.create("mjpeg", "r")
    # By default this decoder conceals errors.
    decoder.options = {"err_detect": "explode"}
    decoder.thread_count = 1
    try:
        decoder.decode(av.Packet(data))
    except av.error.FFmpegError as error:
        # Other errors tell that this decoder does not support this kind of JPEG; then rely on Pillow.
        return isinstance(error, av.error.InvalidDataError)
    return False
