"""The verb `dit-lora doctor`: what this machine has, and whether it can train."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.json_output import JsonFlag, answer
from dit_lora.errors import DitLoraError

EXAMPLES = {
    "doctor": ("doctor", "doctor --config-file one_gpu.yaml", "doctor --measure"),
}


def doctor(
    context: typer.Context,
    as_json: JsonFlag = False,
    config_file: Annotated[
        Path | None, typer.Option(help="The accelerate config that you launch with.")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure what this device reaches, and keep it for plans and runs."
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="With --measure: tiny sizes, to see that it runs; not kept."),
    ] = False,
) -> None:
    """Show versions, device and what a run will use and why; exit 1 if a run would be refused.

    With --measure, what the device reaches instead: a copy, products, attention; a minute on a GPU.
    """
    if measure:
        from dit_lora.commands.ceilings import measured, render_ceilings

        found = measured(quick=quick)
        answer(context, as_json, found, lambda: render_ceilings(found))
        return
    if quick:
        raise DitLoraError("--quick goes with --measure")
    from dit_lora.commands.doctor import render, report
    from dit_lora.environment.versions import probe_environment

    account = report(probe_environment(), config_file)
    answer(context, as_json, account, lambda: render(account), passed=account["ok"])
