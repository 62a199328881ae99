"""The faults as a table in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dit_lora.faults.fault import Judged
from dit_lora.faults.suite import totals

_WIDE = 240  # characters, in a file or a pipe


def render(judged: Sequence[Judged]) -> None:
    """One row a fault, then the totals, then what was not as expected."""
    table = Table(box=None, pad_edge=False)
    for heading in ("fault", "when", "action", "named", "recovered", "poisoned"):
        longest = max(len(heading), *(len(cells[heading]) for cells in map(_cells, judged)))
        table.add_column(heading, no_wrap=True, min_width=longest)
    table.add_column("verdict", no_wrap=True, overflow="ellipsis")
    for one in judged:
        table.add_row(*_cells(one).values(), one.verdict)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    console.print(table)
    sums = totals(judged)
    console.print(
        f"\n{sums['faults']} faults: {sums['named']} named, {sums['recovered']} recovered as the policy says, "
        f"{sums['poisoned_files']} poisoned files"
    )
    for one in judged:
        for reason in one.why:
            console.print(f"{one.name}: {reason}", highlight=False, markup=False)


def _cells(one: Judged) -> dict[str, str]:
    return {
        "fault": one.name,
        "when": one.when,
        "action": one.action,
        "named": "yes" if one.named else "NO",
        "recovered": "yes" if one.recovered else "NO",
        "poisoned": str(one.poisoned_files),
    }
