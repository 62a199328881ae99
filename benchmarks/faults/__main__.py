"""Inject faults into tiny runs, and print a table of how the guard handled each.

python -m benchmarks.faults [--only '*latent*'] [--model sana-600m] [--ranks 2] [--json]
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dit_lora.cli.json_output import JsonFlag, divert_exit_output, write_command_result
from dit_lora.errors import report_errors_and_exit

if TYPE_CHECKING:
    from benchmarks.faults.fault import FaultResult

_EPILOG = "Example:\n  python -m benchmarks.faults --only '*latent*'"
_WIDE = 240  # characters, in a file or a pipe
_GAP, _LEAST = 2, 20  # characters between columns, and of the verdict at least


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main() -> None:
    """Run the command: errors are one line and an exit code."""
    with report_errors_and_exit():
        try:
            app()
        finally:
            if "--json" in sys.argv[1:]:
                divert_exit_output()


@app.command(epilog=_EPILOG)
def faults(
    context: typer.Context,
    as_json: JsonFlag = False,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Processes that torchrun starts.")] = 1,
    only: Annotated[str | None, typer.Option(help="A pattern of names, for instance '*latent*'.")] = None,
    model: Annotated[str, typer.Option(help="The tiny checkpoint, as `dit-lora tiny` names it.")] = "cogvideox-5b",
    kind: Annotated[str, typer.Option(help="The adapter that is trained: lora, dora, lokr, loha or oft.")] = "lora",
    engine: Annotated[str, typer.Option(help="How several ranks share a step: ddp, fsdp2 or zero2.")] = "ddp",
) -> None:
    """Inject faults into tiny runs and show what the guard makes of each; exit 1 if it fails at one."""
    from benchmarks.faults.suite import run_suite, totals
    from benchmarks.faults.world import engine_of

    results = run_suite(only, ranks, model, engine_of(engine), kind)
    sums = totals(results)
    record = {"faults": [asdict(judgment) for judgment in results], "totals": sums}
    passed = all(judgment.passed for judgment in results)
    write_command_result(context, as_json, record, lambda: _render(results, sums), passed=passed)


def _render(results: "Sequence[FaultResult]", sums: Mapping[str, int]) -> None:
    """Print one row a fault, then the totals, then what was not as expected."""
    from rich.console import Console
    from rich.table import Table

    columns = {
        "fault": [result.name for result in results],
        "when": [result.when for result in results],
        "action": [result.action for result in results],
        "named": ["yes" if result.named else "NO" for result in results],
        "recovered": ["yes" if result.recovered else "NO" for result in results],
        "poisoned": [str(result.poisoned_files) for result in results],
    }
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDE)
    table = Table(box=None, pad_edge=False)
    widths = {heading: max(map(len, (heading, *cells))) + _GAP for heading, cells in columns.items()}
    for heading, width in widths.items():
        table.add_column(heading, no_wrap=True, min_width=width - _GAP)
    # What is left: Rich narrows every column else, and the last ones to nothing.
    width_left = max(_LEAST, console.width - sum(widths.values()))
    table.add_column("verdict", no_wrap=True, overflow="ellipsis", max_width=width_left)
    for row in zip(*columns.values(), (result.verdict for result in results), strict=True):
        table.add_row(*row)
    console.print(table)
    console.print(
        f"\n{sums['faults']} faults: {sums['named']} named, {sums['recovered']} recovered as the policy says, "
        f"{sums['poisoned_files']} poisoned files"
    )
    for judgment in results:
        for reason in judgment.why:
            console.print(f"{judgment.name}: {reason}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
