"""Prints a plan as tables, readable in 80 columns. Text to copy is on separate lines."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dit_lora.planning.budget import GIB
from dit_lora.planning.search import MemoryPlan
from dit_lora.terminal import make_printable
from dit_lora.training.execution.activation_checkpointing import CHECKPOINTING_MODES


def print_plan(planned: MemoryPlan) -> None:
    """Print a memory plan: memory by phase, parts of a training step, activations by mode, host and disk.

    Then whether the run fits.
    """
    console, budget = Console(highlight=False), planned.budget
    limit = f" of {format_gib(budget.gpu_bytes)}" if budget.gpu_bytes is not None else ""
    console.print(_build_table((f"GPU memory{limit}", "GiB"), _build_rows(budget.phase_bytes)))
    # Parts that this run does not have, such as EMA, are left out.
    parts = {name: size for name, size in vars(budget.training).items() if size}
    console.print(_build_table(("at a training step", "GiB"), _build_rows(parts)))
    rows = [
        # A model without gradient checkpointing has only some of the modes.
        (shape, *(format_gib(needs[mode]) if mode in needs else "-" for mode in CHECKPOINTING_MODES))
        for shape, needs in budget.activations.items()
    ]
    console.print(_build_table(("activations, GiB, with checkpointing", *CHECKPOINTING_MODES), rows))
    for title, sizes in (("host memory", budget.host_bytes), ("disk", budget.disk_bytes)):
        nonzero = {name: size for name, size in sizes.items() if size}
        console.print(_build_table((title, "GiB"), _build_rows(nonzero)))
    assumed = [f"assumed: {line}" for line in budget.assumptions]
    for line in (*assumed, *describe_memory_fit(planned)):
        console.print(make_printable(line), markup=False, soft_wrap=True)


def describe_memory_fit(planned: MemoryPlan) -> list[str]:
    """Text that says whether the planned run fits, and otherwise what to add to the command."""
    budget, change = planned.budget, planned.change
    if budget.gpu_bytes is None:
        return [f"needs {format_gib(budget.needed_bytes)} GiB; to see whether that fits, add --gpu SIZE"]
    if budget.fits:
        return [
            f"fits: {format_gib(budget.needed_bytes)} of {format_gib(budget.gpu_bytes)} GiB, "
            f"checkpointing {budget.checkpointing_mode}"
        ]
    lines = [f"does not fit: {format_gib(budget.needed_bytes)} of {format_gib(budget.gpu_bytes)} GiB"]
    if change is None:
        return [*lines, "no known change makes it fit"]
    lines.append(f"the cheapest change that fits, in {format_gib(change.budget.needed_bytes)} GiB:")
    if change.overrides:
        lines.append("  " + " ".join(change.overrides))
    if planned.sharding is not None:
        lines.append(f"  --config_file accelerate_configs/{planned.sharding}.yaml")
    return lines


def format_gib(size: int) -> str:
    """Format bytes as GiB with about three digits."""
    value = size / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 else f"{value:.2g}"


def _build_rows(sizes: Any) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), format_gib(size)) for name, size in sizes.items()]


def _build_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without borders: the first column is left-aligned, all others are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", min_width=24 * (not index))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
