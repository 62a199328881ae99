"""A plan as tables on standard output, readable in 80 columns; what is to be pasted is on lines of its own."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dit_lora.terminal import printable
from dit_lora.training.budget import GIB, Budget
from dit_lora.training.budget_fit import Change, Planned
from dit_lora.training.checkpointing import MODES


def render(planned: Planned, *, tflops: float | None = None, tbps: float | None = None) -> None:
    """Phases, what a training step is made of, activations by mode, host and disk; then whether it fits."""
    console, budget = Console(highlight=False), planned.budget
    limit = f" of {gib(budget.gpu)}" if budget.gpu is not None else ""
    console.print(_table((f"GPU memory{limit}", "GiB"), _rows(budget.phases)))
    parts = {name: size for name, size in vars(budget.training).items() if size}
    console.print(_table(("at a training step", "GiB"), _rows(parts)))
    rows = [
        (shape, *(gib(needs[mode]) if mode in needs else "-" for mode in MODES))
        for shape, needs in budget.activations.items()
    ]
    console.print(_table(("activations, GiB, with checkpointing", *MODES), rows))
    console.print(_table(("host memory", "GiB"), _rows(_some(budget.host))))
    console.print(_table(("disk", "GiB"), _rows(_some(budget.disk))))
    for line in (*work(budget, tflops, tbps), *(f"assumed: {one}" for one in budget.assumed)):
        console.print(printable(line), markup=False, soft_wrap=True)
    for line in verdict(planned):
        console.print(printable(line), markup=False, soft_wrap=True)


def work(budget: Budget, tflops: float | None, tbps: float | None) -> list[str]:
    """Arithmetic and traffic of a step, and, at a given rate, the time that no step is shorter than."""
    step, steps = budget.step, budget.recipe.train.steps
    lines = [
        f"a step of one rank: {step.flops / 1e12:,.3g} TFLOP in products and attention, and "
        f"{step.moved / 1e9:,.4g} GB read and written if no op's result stays in a cache"
    ]
    for rate, amount, unit in (
        (tflops, step.flops / 1e12, "TFLOP/s"),
        (tbps, step.moved / 1e12, "TB/s"),
    ):
        if rate is not None:
            seconds = amount / rate
            lines.append(
                f"at {rate:g} {unit} that alone is {seconds:.3g} s, and {steps * seconds / 3600:.3g} hours for "
                f"{steps} steps: a bound, no prediction"
            )
    return lines


def verdict(planned: Planned) -> list[str]:
    """Whether it fits, and what to add to the command if not."""
    budget, change = planned.budget, planned.change
    if budget.gpu is None:
        return [f"needs {gib(budget.needs)} GiB; with --gpu SIZE the plan says whether that fits"]
    if budget.fits:
        return [f"fits: {gib(budget.needs)} of {gib(budget.gpu)} GiB, checkpointing {budget.mode}"]
    lines = [f"does not fit: {gib(budget.needs)} of {gib(budget.gpu)} GiB"]
    if change is None:
        return [*lines, "no change that is known here makes it fit"]
    return [*lines, *told(budget, change)]


def told(budget: Budget, change: Change) -> list[str]:
    """The change, as it is typed."""
    lines = [f"the cheapest change with which it takes {gib(change.budget.needs)} GiB:"]
    if change.overrides:
        lines.append("  " + " ".join(change.overrides))
    if change.launch != budget.launch:
        lines.append(f"  --config_file accelerate_configs/{change.launch.sharding}.yaml")
    return lines


def gib(size: int) -> str:
    """Three digits, of small sizes fewer."""
    value = size / GIB
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.01 else f"{value:.2g}"


def _some(sizes: Any) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size}


def _rows(sizes: Any) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), gib(size)) for name, size in sizes.items()]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", min_width=24 * (not index))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
