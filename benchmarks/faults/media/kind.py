"""One kind of bad sample: the way it is made, and what must be said of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.media.encode import FPS, HEIGHT, WIDTH, encode, moving
from dit_lora.data.audit.finding import Verdict

Write = Callable[[Path], None]
"""Writes a file of media."""
IMAGES: Mapping[str, Any] = {"height": HEIGHT, "width": WIDTH}
CLIPS: Mapping[str, Any] = {"frames": 9, **IMAGES, "fps": FPS}


@dataclass(frozen=True)
class Kind:
    """A folder of data with one sample in it that the audit must judge so."""

    name: str
    make: Callable[[Path], None]
    """Writes media and captions into a folder that is there; other files in it are left alone."""
    file: str
    """The sample's id."""
    verdict: Verdict
    code: str | None = None
    """A finding that it must have; None where it must have none."""
    data: Mapping[str, Any] = field(default_factory=lambda: CLIPS)
    """The recipe's `data` section that it is bad for, without its path."""
    root_can: bool = True
    """False if root can read it anyway, whom no permission stops: then it is not bad for root."""
    good: str = "good.mp4"
    """The id of a sound sample in the same folder."""
    writes_good: bool = False
    """True if `make` writes the sound sample too."""

    def write(self, folder: Path) -> None:
        """Create the folder and write the sample and a sound one into it."""
        folder.mkdir(parents=True)
        if not self.writes_good:
            write_good(folder / self.good)
        self.make(folder)


def write_good(path: Path) -> None:
    """Write a sound clip or image, by its suffix, and its caption."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".png":
        encode(path, moving(path.stem, frames=1), "png", pixels="rgb24", muxer="image2")
    else:
        encode(path, moving(path.stem))
    write_caption(path)


def write_caption(path: Path, text: str | None = None) -> None:
    """Write a clip's .txt; by default with a caption that no other file has."""
    caption = text if text is not None else f"coloured clouds drift slowly, as in {path.stem!r}"
    path.with_suffix(".txt").write_text(caption, encoding="utf-8")


def media_kind(
    name: str,
    file: str,
    write: Write,
    verdict: Verdict = "ok",
    code: str | None = None,
    data: Mapping[str, Any] = CLIPS,
) -> Kind:
    """A kind that consists of one file with a good caption."""

    def make(folder: Path) -> None:
        write(folder / file)
        write_caption(folder / file)

    good = "good.mp4" if "fps" in data else "good.png"
    return Kind(name, make, file, verdict, code, data, good=good)


def rejected(name: str, file: str, write: Write, code: str, data: Mapping[str, Any] = CLIPS) -> Kind:
    return media_kind(name, file, write, "reject", code, data)


def warned(name: str, file: str, write: Write, code: str, data: Mapping[str, Any] = CLIPS) -> Kind:
    return media_kind(name, file, write, "warn", code, data)
