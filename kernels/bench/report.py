"""The rows as Markdown, for people, and as JSON lines, for programs."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from columns import AUTOCAST, COLUMNS, COMPILED, LIBRARY, OURS, Cell, Row

from benchmarks import machine
from dit_lora_kernels.support import triton_support


def facts(device: torch.device, command: Sequence[str], rate: float) -> dict[str, str]:
    """Return the facts that a figure needs: device, date, command, commit, versions, clocks and copy bandwidth."""
    return {
        **machine.facts(device, list(command)),
        "ours": kind_of_ours(device),
        "copy": f"{rate:.4g} bytes a second, read and written",
    }


def kind_of_ours(device: torch.device) -> str:
    """Return `kernels`, or what runs in their place."""
    if device.type == "cuda" and triton_support().mode == "gpu":
        return "kernels"
    return "interpreter" if triton_support().mode == "interpreter" else "reference"


def markdown(about: dict[str, str], rows: Sequence[Row], left_out: Sequence[str], failures: Sequence[str]) -> str:
    """Return two tables of the same rows, then what is missing from them."""
    lines = [f"# Kernels on {about['device']}, {about['date']}", ""]
    lines += [f"- {name}: {value}" for name, value in about.items() if name not in ("device", "date")]
    lines += ["", "Milliseconds, p50 (p20 to p80); the spread is that of the medians of two repetitions, "
              "the largest of the columns.", ""]  # fmt: skip
    # On a GPU inductor; on a CPU, which alone reports threads, one that only traces.
    backend = "aot_eager" if "threads" in about else "inductor"
    lines += _table(
        ["op", "shape", "pass", "eager", "eager under autocast", f"torch.compile ({backend})",
         "library", f"ours ({about['ours']})", "best other / ours", "spread", "MB", "bytes", "floor, ms",
         "% of floor"],
        [_times(row) for row in rows],
    )  # fmt: skip
    lines += ["", "Difference from fp64 (relative root mean square, of the worst output or gradient), peak "
              "memory beside the operands, and launches; columns in the order above.", ""]  # fmt: skip
    names = [f"{what}: {name}" for what in ("error", "MB", "launches") for name in COLUMNS]
    lines += _table(["op", "shape", "pass", *names], [_others(row) for row in rows])
    lines += _list("Left out, the time was up", left_out) + _list("Failed", failures)
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table whose first three columns are words, the others figures."""
    rule = ["---"] * 3 + ["---:"] * (len(head) - 3)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)]


def _list(title: str, items: Sequence[str]) -> list[str]:
    """Return a titled list, nothing if it is empty."""
    return ["", f"{title}:", "", *(f"- {item}" for item in items)] if items else []


def _times(row: Row) -> list[str]:
    """Return a row of the first table."""
    times = [cell.times for cell in row.cells.values() if cell.times]
    spread = f"{100 * max(t.spread for t in times):.1f} %" if times else "-"
    share, ratio, ours = row.percent_of_floor, None, row.cells.get(OURS)
    others = [cell.times.p50 for name, cell in row.cells.items() if name != OURS and cell.times]
    if ours and ours.times and others:
        ratio = min(others) / ours.times.p50
    library = _time(row.cells.get(LIBRARY))
    return [
        row.op, row.shape, row.passed,
        *(_time(row.cells.get(name)) for name in ("eager", AUTOCAST, COMPILED)),
        library if row.library is None or library == "-" else f"{library}, {row.library}",
        _time(ours),
        "-" if ratio is None else f"{ratio:.2f}" + (" **slower**" if ratio < 1 else ""),
        spread, f"{row.bytes / 1e6:.3g}", row.formula,
        "-" if row.floor_ms is None else f"{row.floor_ms:.4g}",
        "-" if share is None else f"{share:.0f}",
    ]  # fmt: skip


def _time(cell: Cell | None) -> str:
    """Return a cell's times, or why there are none."""
    # A bar in an error would end the cell.
    if cell is None:
        return "-"
    if cell.times is None:
        return f"failed: {(cell.failed or 'not measured').replace('|', '/')[:60]}"
    low, middle, high, _ = cell.times
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def _others(row: Row) -> list[str]:
    """Return a row of the second table."""
    cells = [row.cells.get(name) or Cell() for name in COLUMNS]
    errors = ["-" if cell.error is None else f"{cell.error:.2e}" for cell in cells]
    peaks = ["-" if c.peak_bytes is None else f"{c.peak_bytes / 1e6:.3g}" for c in cells]
    launches = ["-" if cell.launches is None else str(cell.launches) for cell in cells]
    return [row.op, row.shape, row.passed, *errors, *peaks, *launches]


def write(folder: Path, about: dict[str, str], text: str, rows: Sequence[Row]) -> None:
    """Write `<device>_<date>.md` and `.jsonl` in the folder, the first line of the latter with what `facts` says."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"[^A-Za-z0-9]+", "-", about["device"]).strip("-").lower()
    path = folder / f"{device}_{about['date']}.md"
    path.write_text(text)
    lines = [json.dumps({"about": about}), *(json.dumps(row.as_json()) for row in rows)]
    path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
