"""Prints a plan as tables, readable in 80 columns. Text to copy is on separate lines."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dit_lora.planning.budget import GIB
from dit_lora.planning.search import Planned
from dit_lora.terminal import printable
from dit_lora.training.execution.activation_checkpointing import MODES


def render(planned: Planned) -> None:
    """Print memory by phase, parts of a training step, activations by mode, host, disk; then whether the run fits."""
    console, budget = Console(highlight=False), planned.budget
    limit = f" of {gib(budget.gpu)}" if budget.gpu is not None else ""
    console.print(_table((f"GPU memory{limit}", "GiB"), _rows(budget.phases)))
    # Parts that this run does not have, such as EMA, are left out.
    parts = {name: size for name, size in vars(budget.training).items() if size}
    console.print(_table(("at a training step", "GiB"), _rows(parts)))
    rows = [
        # A model without gradient checkpointing has only some of the modes.
        (shape, *(gib(needs[mode]) if mode in needs else "-" for mode in MODES))
        for shape, needs in budget.activations.items()
    ]
    console.print(_table(("activations, GiB, with checkpointing", *MODES), rows))
    console.print(_table(("host memory", "GiB"), _rows(_some(budget.host))))
    console.print(_table(("disk", "GiB"), _rows(_some(budget.disk))))
    assumed = [f"assumed: {line}" for line in budget.assumed]
    for line in (*assumed, *verdict(planned)):
        console.print(printable(line), markup=False, soft_wrap=True)


def verdict(planned: Planned) -> list[str]:
    """Text that says whether the run fits, and otherwise what to add to the command."""
    budget, change = planned.budget, planned.change
    if budget.gpu is None:
        return [f"needs {gib(budget.needs)} GiB; with --gpu SIZE the plan says whether that fits"]
    if budget.fits:
        return [f"fits: {gib(budget.needs)} of {gib(budget.gpu)} GiB, checkpointing {budget.mode}"]
    lines = [f"does not fit: {gib(budget.needs)} of {gib(budget.gpu)} GiB"]
    if change is None:
        return [*lines, "no change that is known here makes it fit"]
    lines.append(f"the cheapest change with which it takes {gib(change.budget.needs)} GiB:")
    if change.overrides:
        lines.append("  " + " ".join(change.overrides))
    if planned.sharding is not None:
        lines.append(f"  --config_file accelerate_configs/{planned.sharding}.yaml")
    return lines


def gib(size: int) -> str:
    """Format bytes as GiB with about three digits."""
    value = size / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 else f"{value:.2g}"


def _some(sizes: Any) -> dict[str, int]:
    """The sizes that are not zero."""
    return {name: size for name, size in sizes.items() if size}


def _rows(sizes: Any) -> list[tuple[str, str]]:
    """Table rows of names and sizes."""
    return [(name.replace("_", " "), gib(size)) for name, size in sizes.items()]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A borderless table with the first column on the left and sizes on the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", min_width=24 * (not index))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
