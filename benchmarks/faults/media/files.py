"""Files that are cut, damaged, something else than their name says, or not to be had; and odd names."""

import io
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.faults.media.encode import encode, moving
from benchmarks.faults.media.kind import (
    CLIPS,
    IMAGES,
    Kind,
    media_kind,
    rejected,
    warned,
    write_caption,
)

_FAST_START = {"movflags": "faststart"}
_SHARP = {"crf": "10"}


def content(path: Path) -> tuple[bytearray, int, int]:
    """An mp4's bytes, and the offsets where its coded frames (`mdat`) begin and end."""
    data = bytearray(path.read_bytes())
    at = 0
    while at < len(data):
        size, box = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8]
        if box == b"mdat":
            return data, at + 8, at + size
        at += size
    raise ValueError(f"{path} has no mdat")


def _cut(path: Path, muxing: dict[str, str]) -> None:
    encode(path, moving(path.stem), muxing=muxing)
    data, start, end = content(path)
    path.write_bytes(data[: (start + end) // 2])


def cut_in_the_frames(path: Path) -> None:
    """Write a file whose header says everything, and half of whose frames are gone."""
    _cut(path, _FAST_START)


def cut_before_the_header(path: Path) -> None:
    """Cut a file whose header is at its end, so that the rest cannot be read."""
    _cut(path, {})


def damaged_in_the_middle(path: Path) -> None:
    """Make a fifth of the coded frames random bytes."""
    encode(path, moving(path.stem), options=_SHARP)
    data, start, end = content(path)
    damage_start, damage_end = start + (end - start) * 2 // 5, start + (end - start) * 3 // 5
    data[damage_start:damage_end] = np.random.default_rng(0).bytes(damage_end - damage_start)
    path.write_bytes(data)


def flipped_bits(path: Path) -> None:
    """Flip one bit in every 200 bytes of the second half of the coded frames."""
    encode(path, moving(path.stem), options=_SHARP)
    data, start, end = content(path)
    for at in range((start + end) // 2, end, 200):
        data[at] ^= 0x10
    path.write_bytes(data)


def _bytes(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def _zip() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("readme.txt", "not a clip")
    return packed.getvalue()


def _png(path: Path) -> None:
    encode(path, moving(path.stem, 1), "png", pixels="rgb24", muxer="image2")


_TEXT = b"This is where the clip should have been.\n" * 20
_PAGE = b"<!DOCTYPE html><html><head><title>404 Not Found</title></head><body>gone</body></html>\n"
_MADE_OF_BYTES = (
    rejected("no bytes", "empty.mp4", _bytes(b""), "empty_file"),
    rejected("text named .mp4", "text.mp4", _bytes(_TEXT), "not_media"),
    rejected("an error page named .jpg", "page.jpg", _bytes(_PAGE), "not_media", IMAGES),
    rejected("a zip named .mp4", "zip.mp4", _bytes(_zip()), "not_media"),
    rejected(
        "random bytes named .mov",
        "noise.mov",
        _bytes(np.random.default_rng(1).bytes(4096)),
        "not_media",
    ),
    rejected("no bytes in an image", "empty.png", _bytes(b""), "empty_file", IMAGES),
    rejected("cut in the frames", "cut.mp4", cut_in_the_frames, "truncated"),
    rejected("cut before the header", "headless.mp4", cut_before_the_header, "unreadable"),
    rejected("damaged in the middle", "torn.mp4", damaged_in_the_middle, "corrupt"),
    rejected("flipped bits", "flipped.mp4", flipped_bits, "corrupt"),
    warned("a png named .mp4", "still.mp4", _png, "wrong_extension", IMAGES),
    warned("a png named .jpg", "still.jpg", _png, "wrong_extension", IMAGES),
    warned(
        "an mp4 named .avi",
        "clip.avi",
        lambda path: encode(path, moving(path.stem), muxer="mp4"),
        "wrong_extension",
    ),
)


def _of_a_name(kind: str, file: str) -> Kind:
    return media_kind(kind, file, lambda path: encode(path, moving(path.stem), muxer="mp4"))


def _instead(act: Callable[[Path], None]) -> Callable[[Path], None]:
    """Put something other than a regular file in the clip's place, with a caption."""

    def make(folder: Path) -> None:
        write_caption(folder / "clip.mp4")
        act(folder / "clip.mp4")

    return make


def _loop(path: Path) -> None:
    path.symlink_to(path.with_name("other.mp4"))
    path.with_name("other.mp4").symlink_to(path)
    write_caption(path.with_name("other.mp4"))


def _locked(path: Path) -> None:
    encode(path, moving(path.stem))
    os.chmod(path, 0)


def _linked(path: Path) -> None:
    """Link to a sound clip that lies elsewhere."""
    store = path.with_name(".store")
    store.mkdir()
    encode(store / "blob", moving(path.stem), muxer="mp4")
    path.symlink_to(store / "blob")


def _kind(name: str, act: Callable[[Path], None], code: str | None) -> Kind:
    return Kind(name, _instead(act), "clip.mp4", "reject" if code else "ok", code, CLIPS)


_NAMES = (
    _of_a_name("a name with spaces and quotes", 'it\'s "one" clip.mp4'),
    _of_a_name("a name with # and %", "50% of #1 at %d ?x=1.mp4"),
    _of_a_name("a name with a line break", "two\nlines.mp4"),
    _of_a_name("a name beyond ASCII", "Zug\u0308e 鷺 🐦.mp4"),
    _of_a_name("a name that looks like a protocol", "concat:a|b.mp4"),
    _of_a_name("a name in capitals", "CLIP.MP4"),
    _of_a_name("a name that begins with a dash", "-i.mp4"),
    _kind("a link to a clip", _linked, None),
    _kind("a link to itself", _loop, "missing"),
    _kind("a link to nothing", lambda path: path.symlink_to("gone.mp4"), "missing"),
    replace(_kind("no permission to read", _locked, "unreadable"), root_can=False),
)
KINDS = (*_MADE_OF_BYTES, *_NAMES)
