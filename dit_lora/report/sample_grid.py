"""Samples of one adapter side by side: a row for each prompt and seed, a column for each strength."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dit_lora.report.pages import render, write_page

GridSample = tuple[str, int, float | None, Path]
"""Prompt, seed, strength (None where none was asked for), and file."""


@dataclass(frozen=True)
class GridRow:
    """The samples of one prompt and seed."""

    prompt: str
    seed: int
    cells: Sequence[tuple[str, str]]
    """The words of the strength, and the link to the file."""
    is_video: bool


def write_sample_grid(path: Path, title: str, samples: Sequence[GridSample]) -> Path:
    """Write the page beside the samples, to which it links; they are in the order of rows and columns."""
    rows: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for prompt, seed, strength, file in samples:
        words = "" if strength is None else _words(strength)
        rows.setdefault((prompt, seed), []).append((words, quote(file.name)))
    is_video = samples[0][3].suffix == ".mp4"
    shown = [GridRow(prompt, seed, cells, is_video) for (prompt, seed), cells in rows.items()]
    page = render(
        "sample_grid.html",
        scripts=["sample_grid.js"],
        # Of the page's own folder.
        sources="img-src data: file: 'self'; media-src file: 'self'",
        title=title,
        rows=shown,
        columns=max(len(row.cells) for row in shown),
        is_video=is_video,
    )
    return write_page(path, page)


def _words(strength: float) -> str:
    return "without the adapter" if strength == 0 else f"strength {strength:g}"
