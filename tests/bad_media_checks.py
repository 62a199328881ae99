"""What each kind of bad sample claims of itself, seen by PyAV and Pillow alone: no audit is asked."""

import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageOps

from benchmarks.faults.media.encode import FPS, HEIGHT, WIDTH
from dit_lora.data.media.media import IMAGE_SUFFIXES

_FORMATS = {".mp4": "mp4", ".avi": "avi", ".png": "png", ".jpg": "jpeg"}
_USUAL = {"yuv420p", "RGB", "L"}
_FRAMES_OF_TEN_BITS = {"yuv420p10le", "yuva444p12le"}


@dataclass(frozen=True)
class Seen:
    """One file, decoded as far as it goes."""

    path: Path

    @cached_property
    def _decoded(self) -> tuple[dict[str, Any], list[np.ndarray], list[float | None], str]:
        """Facts, pictures in RGB, times in seconds, and why it ended too early."""
        if self.path.suffix.lower() in IMAGE_SUFFIXES:
            return self._image()
        facts: dict[str, Any] = {"streams": 0}
        pictures: list[np.ndarray] = []
        times: list[float | None] = []
        try:
            with av.open(self.path) as container:
                videos = [s for s in container.streams.video if not s.disposition & 0x400]
                facts["streams"] = len(videos)
                facts["format"] = container.format.name
                if not videos:
                    return facts, [], [], ""
                stream = videos[0]
                context = stream.codec_context
                facts |= {
                    "rate": stream.average_rate,
                    "count": stream.frames - sum(entry.is_discard for entry in stream.index_entries),
                    "seconds": (container.duration or 0) / av.time_base,
                    "square": (stream.sample_aspect_ratio or 1) == 1,
                    "colour": (context.color_primaries, context.color_trc),
                    "full_range": context.color_range == 2,
                    "codec": context.name,
                    "alpha": stream.metadata.get("alpha_mode") == "1",
                }
                for frame in container.decode(stream):
                    facts |= {
                        "pixels": frame.format.name,
                        "turned": frame.rotation,
                        "fields": frame.interlaced_frame,
                        "alpha": facts["alpha"] or any(c.is_alpha for c in frame.format.components),
                    }
                    pictures.append(frame.to_ndarray(format="rgb24"))
                    times.append(frame.time)
                    if frame.is_corrupt:
                        return facts, pictures, times, "a corrupt frame"
        except av.error.FFmpegError as error:
            return facts, pictures, times, str(error)
        return facts, pictures, times, ""

    def _image(self) -> tuple[dict[str, Any], list[np.ndarray], list[float | None], str]:
        facts: dict[str, Any] = {"streams": 0}
        try:
            with Image.open(self.path) as image:
                facts |= {"streams": 1, "pixels": image.mode, "count": 1}
                facts |= {
                    "turned": image.getexif().get(0x0112, 1) - 1,
                    "alpha": "A" in image.mode or "transparency" in image.info,
                    "moves": getattr(image, "n_frames", 1) > 1,
                }
                upright = ImageOps.exif_transpose(image).convert("RGB")
                return facts, [np.asarray(upright)], [0.0], ""
        except (OSError, Image.DecompressionBombError) as error:
            return facts, [], [], str(error) or type(error).__name__

    @property
    def facts(self) -> dict[str, Any]:
        return self._decoded[0]

    @property
    def video(self) -> np.ndarray:
        """(F, H, W, 3) in float."""
        return np.stack(self._decoded[1]).astype(np.float32)

    @property
    def frames(self) -> int:
        return len(self._decoded[1])

    @property
    def times(self) -> list[float | None]:
        return self._decoded[2]

    @property
    def error(self) -> str:
        return self._decoded[3]

    @property
    def gaps(self) -> np.ndarray:
        return np.diff(np.array(self.times, float))

    @property
    def size(self) -> tuple[int, int]:
        return self.video.shape[1], self.video.shape[2]

    @property
    def opens(self) -> bool:
        return bool(self.facts["streams"])

    @property
    def changes(self) -> np.ndarray:
        """Mean absolute difference from each frame to the next, in grey levels."""
        return np.abs(np.diff(self.video, axis=0)).mean(axis=(1, 2, 3))

    @property
    def bytes(self) -> bytes:
        return self.path.read_bytes()

    @property
    def caption(self) -> str:
        return self.path.with_suffix(".txt").read_text(encoding="utf-8-sig")


def is_sound(seen: Seen) -> bool:
    """It decodes to its end, in as many frames as it says."""
    return not seen.error and seen.frames > 0 and seen.facts["count"] in (0, seen.frames)


def _longest_still(seen: Seen) -> int:
    longest = run = 1
    for change in seen.changes:
        run = run + 1 if change < 0.5 else 1
        longest = max(longest, run)
    return longest


def _kept(seen: Seen) -> float:
    height, width = seen.size
    ratio = (width / height) / (WIDTH / HEIGHT)
    return min(ratio, 1 / ratio)


def _is_like(seen: Seen, other: Seen) -> bool:
    return bool(np.abs(seen.video - other.video).mean() < 12)


def _wrong_extension(seen: Seen) -> bool:
    with av.open(seen.path) as container:
        return _FORMATS[seen.path.suffix] not in container.format.name


Check = Callable[[Seen, Seen], bool]
"""Of the bad sample, and of the sound one beside it."""

OF_MEDIA: dict[str, Check] = {
    "empty_file": lambda bad, good: not bad.bytes,
    "not_media": lambda bad, good: not bad.opens and b"moov" not in bad.bytes,
    "no_video_stream": lambda bad, good: not bad.opens and "format" in bad.facts,
    "unreadable": lambda bad, good: not bad.opens and b"mdat" in bad.bytes,
    "truncated": lambda bad, good: bool(bad.opens and bad.error) and not _has_its_end(bad),
    "corrupt": lambda bad, good: bool(bad.error) and _has_its_end(bad) and (bad.opens or b"IHDR" in bad.bytes),
    "no_time_stamps": lambda bad, good: None in bad.times,
    "too_short": lambda bad, good: not bad.error and bad.frames < 9,
    "too_small": lambda bad, good: min(bad.size) < 16,
    "black": lambda bad, good: bad.video.max() < 8,
    "constant": lambda bad, good: bad.video[..., 0].std() < 1 and bad.video.max() > 40,
    "wrong_extension": lambda bad, good: is_sound(bad) and _wrong_extension(bad),
    "frame_count": lambda bad, good: bool(bad.facts["count"] != bad.frames or bad.facts.get("moves")),
    "duration": lambda bad, good: bad.facts["seconds"] > 2 * bad.frames / FPS,
    "fps_low": lambda bad, good: bad.facts["rate"] < FPS,
    "upscaled": lambda bad, good: bad.size[0] < HEIGHT or bad.size[1] < WIDTH,
    "cropped": lambda bad, good: _kept(bad) < 0.75,
    "rotated": lambda bad, good: bool(bad.facts["turned"]),
    "ten_bit": lambda bad, good: bad.facts["pixels"] in _FRAMES_OF_TEN_BITS,
    "hdr": lambda bad, good: bad.facts["colour"][0] == 9 or bad.facts["colour"][1] in (16, 18),
    "alpha": lambda bad, good: bad.facts["alpha"],
    "variable_frame_rate": lambda bad, good: bad.gaps.max() > 4 * bad.gaps.min(),
    "interlaced": lambda bad, good: bad.facts["fields"],
    "non_square_pixels": lambda bad, good: not bad.facts["square"],
    "frozen": lambda bad, good: _longest_still(bad) >= FPS,
    "black_frames": lambda bad, good: (bad.video.max(axis=(1, 2, 3)) < 8).sum() == FPS,
    "near_constant": lambda bad, good: 0 < bad.video.std() < 4,
    "hard_cut": lambda bad, good: bad.changes.max() > 4 * np.median(bad.changes),
    "low_range": lambda bad, good: np.ptp(bad.video) < 100 and bad.video.std() > 8,
    "odd_pixel_format": lambda bad, good: bad.facts["pixels"] not in _USUAL or bad.facts.get("full_range", False),
    "several_streams": lambda bad, good: bad.facts["streams"] > 1,
    "duplicate_clip": lambda bad, good: bad.bytes == good.bytes,
    "near_duplicate_clip": lambda bad, good: bad.bytes != good.bytes and _is_like(bad, good),
}
"""By code: a kind's file must have this property, and the sound file must not."""


def _has_its_end(seen: Seen) -> bool:
    """Whether no bytes are missing, as the file counts them."""
    data = seen.bytes
    if data.startswith(b"\xff\xd8"):
        return data.endswith(b"\xff\xd9")
    if data.startswith(b"\x89PNG"):
        return b"IEND" in data
    at = 0
    while 0 < at + 8 <= len(data) or not at:
        at += int.from_bytes(data[at : at + 4]) or len(data)
    return at == len(data)


def members(folder: Path) -> list[tarfile.TarInfo]:
    """Of the one uncompressed tar in a folder."""
    (path,) = folder.glob("*.tar")
    with tarfile.open(path, "r:") as tar:
        return list(tar)


def _is_unsafe(member: tarfile.TarInfo) -> bool:
    return not member.isfile() or ".." in member.name or member.name.startswith("/")


def _same_names(folder: Path) -> bool:
    if (folder / "metadata.jsonl").exists():
        lines = (folder / "metadata.jsonl").read_text().splitlines()
        return len(set(lines)) < len(lines)
    names = [member.name for member in members(folder)]
    return len(set(names)) < len(names)


def _has_no_caption(folder: Path) -> bool:
    if (folder / "metadata.jsonl").exists():
        rows = map(json.loads, (folder / "metadata.jsonl").read_text().splitlines())
        return sum(row.get("text") is None for row in rows) == 1
    names = [p.name for p in folder.iterdir()]
    if list(folder.glob("*.tar")):
        names = [member.name for member in members(folder)]
    stems = [Path(name).stem for name in names]
    return stems.count("clip") == 1 and stems.count("good") == 2


def _captions(folder: Path) -> list[str]:
    return [path.read_text(encoding="utf-8-sig") for path in folder.glob("*.txt")]


def _counts(folder: Path) -> dict[str, int]:
    return {path.name: len(list(path.iterdir())) for path in folder.iterdir()}


def _is_damaged_list(folder: Path) -> bool:
    """A tar that is packed, or a line that is cut."""
    if (folder / "metadata.jsonl").exists():
        return not (folder / "metadata.jsonl").read_text().splitlines()[-1].endswith("}")
    return (folder / "shard-000000.tar").read_bytes().startswith(b"\x1f\x8b")


def _is_torn(folder: Path) -> bool:
    try:
        members(folder)
    except tarfile.ReadError as error:
        return "unexpected end" in str(error)
    return False


def _is_not_utf8(folder: Path) -> bool:
    try:
        (folder / "clip.txt").read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return True
    return False


OF_FOLDER: dict[str, Callable[[Path], bool]] = {
    "missing": lambda folder: not (folder / "clip.mp4").is_file() or _lists_what_is_not_there(folder),
    "caption_missing": _has_no_caption,
    "caption_empty": lambda folder: (
        not (folder / "clip.txt").read_text("utf-8-sig").strip("\u200b\u2060\ufeff \n\t\r")
    ),
    "caption_reserved_token": lambda folder: any("</s>" in text for text in _captions(folder)),
    "caption_long": lambda folder: max(len(text.split()) for text in _captions(folder)) > 512,
    "caption_not_text": _is_not_utf8,
    "caption_duplicate": lambda folder: len(set(_captions(folder))) == 2 < len(_captions(folder)),
    "label_unknown": lambda folder: "green" in _counts(folder),
    "label_imbalance": lambda folder: _counts(folder) == {"blue": 1, "red": 25},
    "unsafe_name": lambda folder: sum(map(_is_unsafe, members(folder))) in (1, 2),
    "duplicate_clip": _same_names,
    "truncated": _is_torn,
    "unreadable": _is_damaged_list,
}
"""By code, of kinds that are more than one file."""


def _lists_what_is_not_there(folder: Path) -> bool:
    rows = map(json.loads, (folder / "metadata.jsonl").read_text().splitlines())
    return sum(not (folder / row["file_name"]).is_file() for row in rows) == 1
