"""The faults as a table in the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dit_lora.faults.fault import Judged
from dit_lora.faults.suite import totals

_WIDE = 240  # characters, in a file or a pipe


def render(judged: Sequence[Judged]) -> None:
    """Print one row a fault, then the totals, then what was not as expected."""
    table = Table(box=None, pad_edge=False)
    for heading in ("fault", "when", "action", "named", "recovered", "poisoned"):
        longest = max(len(heading), *(len(cells[heading]) for cells in map(_cells, judged)))
        table.add_column(heading, no_wrap=True, min_width=longest)
    table.add_column("verdict", no_wrap=True, overflow="ellipsis")
    for judgment in judged:
        table.add_row(*_cells(judgment).values(), judgment.verdict)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    console.print(table)
    sums = totals(judged)
    console.print(
        f"\n{sums['faults']} faults: {sums['named']} named, {sums['recovered']} recovered as the policy says, "
        f"{sums['poisoned_files']} poisoned files"
    )
    for judgment in judged:
        for reason in judgment.why:
            console.print(f"{judgment.name}: {reason}", highlight=False, markup=False)


def _cells(one: Judged) -> dict[str, str]:
    return {
        "fault": one.name,
        "when": one.when,
        "action": one.action,
        "named": "yes" if one.named else "NO",
        "recovered": "yes" if one.recovered else "NO",
        "poisoned": str(one.poisoned_files),
    }
