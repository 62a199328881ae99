"""Images that are odd or bad, and clean ones."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.faults.media.encode import HEIGHT, WIDTH, moving
from benchmarks.faults.media.kind import IMAGES, media_kind, rejected, warned

Draw = Callable[[str], Image.Image]


def _picture(name: str, height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    return Image.fromarray(moving(name, 1, height, width)[0])


def _saved(draw: Draw = _picture, **options: Any) -> Callable[[Path], None]:
    return lambda path: draw(path.stem).save(path, **options)


def _in_mode(mode: str) -> Draw:
    return lambda name: _picture(name).convert(mode)


def _of_16_bits(name: str) -> Image.Image:
    levels = moving(name, 1)[0, ..., 0].astype(np.uint16) * 257
    return Image.fromarray(levels)


def _see_through(name: str) -> Image.Image:
    picture = _picture(name)
    picture.putalpha(_picture(f"alpha of {name}").convert("L"))
    return picture


def _one_colour(*colour: int) -> Draw:
    return lambda name: Image.new("RGB", (WIDTH, HEIGHT), colour)


def _lying(path: Path) -> None:
    """Store an image lying, with a tag that says how to turn it."""
    exif = Image.Exif()
    # Orientation: turn by 90 degrees.
    exif[0x0112] = 6
    _picture(path.stem, WIDTH, HEIGHT).save(path, exif=exif)


def _moving_webp(path: Path) -> None:
    pictures = [Image.fromarray(frame) for frame in moving(path.stem, 5)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100)


def cut_jpeg(path: Path) -> None:
    """Write a JPEG whose second half is gone."""
    data = io.BytesIO()
    _picture(path.stem).save(data, "JPEG", quality=95)
    path.write_bytes(data.getvalue()[: len(data.getvalue()) // 2])


def damaged_png(path: Path) -> None:
    """Write a PNG with changed bytes in the middle of its pixels, so that zlib's checksum or a code is wrong."""
    _picture(path.stem).save(path)
    data = bytearray(path.read_bytes())
    start = data.index(b"IDAT") + 4
    middle = (start + len(data)) // 2
    data[middle : middle + 16] = bytes(16)
    path.write_bytes(data)


def huge_png(path: Path) -> None:
    """Write a few bytes that promise 3.6 gigapixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1_000_000))
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


KINDS = (
    media_kind("a clean png", "clean.png", _saved(), data=IMAGES),
    media_kind("a clean jpeg", "clean.jpg", _saved(quality=95), data=IMAGES),
    media_kind("a clean webp", "clean.webp", _saved(quality=95), data=IMAGES),
    media_kind("a clean bmp", "clean.bmp", _saved(), data=IMAGES),
    media_kind("a grey jpeg", "clean.jpeg", _saved(_in_mode("L"), quality=95), data=IMAGES),
    rejected("a jpeg cut in half", "cut.jpg", cut_jpeg, "truncated", IMAGES),
    rejected("a damaged png", "torn.png", damaged_png, "corrupt", IMAGES),
    rejected("a png that promises too much", "huge.png", huge_png, "corrupt", IMAGES),
    rejected("1 x 1 pixel", "dot.png", _saved(lambda name: _picture(name, 1, 1)), "too_small", IMAGES),
    rejected("a black image", "black.png", _saved(_one_colour(0, 0, 0)), "black", IMAGES),
    rejected("a red image", "red.png", _saved(_one_colour(200, 20, 20)), "constant", IMAGES),
    warned("a CMYK jpeg", "print.jpg", _saved(_in_mode("CMYK"), quality=95), "odd_pixel_format", IMAGES),
    warned("a png of 16 bits", "deep.png", _saved(_of_16_bits), "odd_pixel_format", IMAGES),
    warned(
        "a palette with a transparent colour",
        "palette.png",
        _saved(_in_mode("P"), transparency=3),
        "odd_pixel_format",
        IMAGES,
    ),
    warned("a png with alpha", "glass.png", _saved(_see_through), "alpha", IMAGES),
    warned("a jpeg that is to be turned", "turned.jpg", _lying, "rotated", IMAGES),
    warned("a webp that moves", "moving.webp", _moving_webp, "frame_count", IMAGES),
    warned(
        "an image of half the size",
        "half.png",
        _saved(lambda name: _picture(name, 16, 24)),
        "upscaled",
        IMAGES,
    ),
    warned(
        "a much higher image",
        "high.png",
        _saved(lambda name: _picture(name, 96, 48)),
        "cropped",
        IMAGES,
    ),
)
