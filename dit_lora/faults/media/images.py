"""Images that are odd or bad, and clean ones."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dit_lora.data.audit.finding import Verdict
from dit_lora.faults.media.encode import HEIGHT, WIDTH, moving
from dit_lora.faults.media.kind import IMAGES, Kind, media_kind

Draw = Callable[[str], Image.Image]


def _kind(
    name: str,
    file: str,
    write: Callable[[Path], None],
    verdict: Verdict = "ok",
    code: str | None = None,
) -> Kind:
    return media_kind(name, file, write, verdict, code, IMAGES)


def _picture(name: str, height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    return Image.fromarray(moving(name, 1, height, width)[0])


def _saved(draw: Draw = _picture, **how: Any) -> Callable[[Path], None]:
    return lambda path: draw(path.stem).save(path, **how)


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
    """Write a PNG of which some bytes in the middle of the pixels differ: zlib's checksum, or a code, is wrong."""
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
    _kind("a clean png", "clean.png", _saved()),
    _kind("a clean jpeg", "clean.jpg", _saved(quality=95)),
    _kind("a clean webp", "clean.webp", _saved(quality=95)),
    _kind("a clean bmp", "clean.bmp", _saved()),
    _kind("a grey jpeg", "clean.jpeg", _saved(_in_mode("L"), quality=95)),
    _kind("a jpeg cut in half", "cut.jpg", cut_jpeg, "reject", "truncated"),
    _kind("a damaged png", "torn.png", damaged_png, "reject", "corrupt"),
    _kind("a png that promises too much", "huge.png", huge_png, "reject", "corrupt"),
    _kind(
        "1 x 1 pixel",
        "dot.png",
        _saved(lambda name: _picture(name, 1, 1)),
        "reject",
        "too_small",
    ),
    _kind("a black image", "black.png", _saved(_one_colour(0, 0, 0)), "reject", "black"),
    _kind("a red image", "red.png", _saved(_one_colour(200, 20, 20)), "reject", "constant"),
    _kind(
        "a CMYK jpeg",
        "print.jpg",
        _saved(_in_mode("CMYK"), quality=95),
        "warn",
        "odd_pixel_format",
    ),
    _kind("a png of 16 bits", "deep.png", _saved(_of_16_bits), "warn", "odd_pixel_format"),
    _kind(
        "a palette with a transparent colour",
        "palette.png",
        _saved(_in_mode("P"), transparency=3),
        "warn",
        "odd_pixel_format",
    ),
    _kind("a png with alpha", "glass.png", _saved(_see_through), "warn", "alpha"),
    _kind("a jpeg that is to be turned", "turned.jpg", _lying, "warn", "rotated"),
    _kind("a webp that moves", "moving.webp", _moving_webp, "warn", "frame_count"),
    _kind(
        "an image of half the size",
        "half.png",
        _saved(lambda name: _picture(name, 16, 24)),
        "warn",
        "upscaled",
    ),
    _kind(
        "a much higher image",
        "high.png",
        _saved(lambda name: _picture(name, 96, 48)),
        "warn",
        "cropped",
    ),
)
