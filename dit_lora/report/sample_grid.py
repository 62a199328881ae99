"""Samples of one adapter in a grid: one row per prompt and seed, one column per LoRA scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from dit_lora.report.pages import render_page, write_page

GridSample = tuple[str, int, float | None, Path]
"""Prompt, seed, strength (None if none was given), and file."""


@dataclass(frozen=True)
class SampleGridRow:
    """One row of a grid page: the samples of one prompt and seed."""

    prompt: str
    seed: int
    cells: Sequence[tuple[str, str]]
    """Label of the strength, and link to the file."""


def write_sample_grid(
    path: Path, title: str, samples: Sequence[GridSample], settings: Mapping[str, str] | None = None
) -> Path:
    """Write an HTML page that shows samples as a grid.

    It links to the files in the same folder; `samples` are in the order of rows and columns. `settings` are shown at
    the top, by name.
    """
    rows: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for prompt, seed, strength, file in samples:
        label = "" if strength is None else f"strength {strength:g}"
        if strength == 0:
            label = "without the adapter"
        # The page lies next to the files, so the quoted name is the link.
        rows.setdefault((prompt, seed), []).append((label, quote(file.name)))
    grid_rows = [SampleGridRow(prompt, seed, cells) for (prompt, seed), cells in rows.items()]
    page = render_page(
        "sample_grid.html",
        scripts=["viewer.js", "sample_grid.js"],
        # Allow files in the page's folder.
        sources="img-src data: file: 'self'; media-src file: 'self'",
        title=title,
        settings=settings or {},
        rows=grid_rows,
        columns=max(len(row.cells) for row in grid_rows),
        # One model makes either videos or images.
        is_video=samples[0][3].suffix == ".mp4",
    )
    return write_page(path, page)
