"""Damaged headers give a message of one line each: no traceback, no hang.

`python tests/dit_lora/data/media/test_damaged_headers.py 2000` tries more of them.
"""

import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dit_lora.data.audit.judge import display_size
from dit_lora.data.audit.probe import probe_file
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import ClipError, read_frames, read_header

VIDEOS = Path(__file__).parents[3] / "fixtures" / "media"
CLIPS = (
    "cut.mp4",
    "cut.mkv",
    "live.webm",
    "late_sound_cut.mp4",
    "fragments_cut.mp4",
    "hevc_cut.mp4",
)
PICTURES = ("png", "jpg", "webp", "tif", "gif", "avif", "bmp", "jp2", "ppm")
MAX_S = 10.0
"""Seconds for one file of a few kilobytes, on a machine that does other things too."""


def whole_files(folder: Path) -> list[Path]:
    """The sound files from which damaged ones are drawn."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)
    for end in PICTURES:
        options = {"exif": exif} if end in ("png", "jpg", "webp", "tif", "avif") else {}
        Image.fromarray(pixels).save(folder / f"whole.{end}", **options)
    return [*(VIDEOS / name for name in CLIPS), *(folder / f"whole.{end}" for end in PICTURES)]


def damage(data: bytes, chance: random.Random) -> bytes:
    """Change a few bytes, most of them near the beginning; cut, repeat or remove a piece."""
    damaged_data = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        offset = min(int(chance.expovariate(1 / 200)), len(damaged_data) - 1)
        offset = chance.choice((offset, offset, chance.randrange(len(damaged_data))))
        kind = chance.randrange(6)
        if kind <= 2:
            damaged_data[offset] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))
        elif kind == 3:
            damaged_data[offset : offset + 4] = chance.choice((bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff"))
        elif kind == 4:
            del damaged_data[offset : offset + chance.randrange(1, 40)]
        else:
            damaged_data[offset:offset] = damaged_data[max(0, offset - 40) : offset]
        if not damaged_data:
            break
    return bytes(damaged_data[: chance.choice((len(damaged_data), len(damaged_data), len(damaged_data) // 2))])


def check(path: Path) -> None:
    """Every reader refuses the file in its own words, or reads it, and what the audit passes can be read."""
    begins = time.monotonic()
    messages = []
    for read_media in (
        lambda: read_header(path),
        lambda: read_frames(path, frames=1, height=16, width=16, fps=None),
        lambda: read_frames(path, frames=3, height=16, width=16, fps=8, start=0.5),
    ):
        try:
            read_media()
        except ClipError as error:
            messages.append(str(error))
    probed = probe_file(MediaFile(path))
    if not probed.faults:
        header = read_header(path)
        assert (header.height, header.width) == tuple(map(round, display_size(probed.facts)))
        assert not any("cannot be" in message for message in messages)
    messages += [fault.message for fault in probed.faults]
    assert all(message and "\n" not in message for message in messages)
    Digests(path.parent / "memo.json").hash_pixels(MediaFile(path))
    assert time.monotonic() - begins < MAX_S


def check_damaged(folder: Path, numbers: range) -> None:
    content_by_name = whole_files(folder)
    for number in numbers:
        chance = random.Random(number)
        source = content_by_name[number % len(content_by_name)]
        path = folder / f"{number}{source.suffix}"
        path.write_bytes(damage(source.read_bytes(), chance))
        try:
            check(path)
        except Exception as error:
            raise AssertionError(f"file {number}, from {source.name}") from error
        path.unlink()


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_cost_one_line_each(tmp_path: Path, seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_damaged(tmp_path, range(15 * seed, 15 * (seed + 1)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        check_damaged(Path(temporary), range(int(sys.argv[1])))
