"""The verb `dit-lora report`: writes or serves the page of a run, or of a guard's folder."""

from typing import Annotated

import typer

from dit_lora.cli.arguments import Port, RunFolder, require_studio
from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo

EXAMPLES = {
    "report": (
        "report runs/kitten",
        "report runs/kitten --serve",
        "report runs/kitten --mark-best 200",
        "report dit_lora_guard",
    )
}


def report(
    run: RunFolder,
    serve: Annotated[bool, typer.Option("--serve", help="Show a live page in the browser of this machine.")] = False,
    port: Port = None,
    mark_best: Annotated[
        int | None,
        typer.Option(min=0, help="Mark the save of this step as best, for export --best. 0 removes the mark."),
    ] = None,
) -> None:
    """Write report.html for a run, or for the folder of a guard. The run need not be finished."""
    if port is not None and not serve:
        raise DitLoraError(f"--port {port} needs --serve: dit-lora report {run} --serve --port {port}")
    from dit_lora.config.experts import find_expert_runs
    from dit_lora.report.guard_page import is_guard_folder, write_guard_report

    # The folder of a guard in another training loop has events and statistics, and no recipe.
    if is_guard_folder(run):
        if serve:
            raise DitLoraError(f"--serve needs a run, and {run} is the folder of a guard; remove --serve")
        echo(write_guard_report(run))
        return
    # A run of both experts has a folder for each.
    runs = find_expert_runs(run)
    if mark_best is not None:
        from dit_lora.adapters.marked_save import mark_step_as_best

        for run_folder in runs:
            mark_step_as_best(run_folder, mark_best or None)
    if serve:
        if len(runs) > 1:
            raise DitLoraError(
                f"--serve shows one run, and {run} has one for each expert; give {' or '.join(map(str, runs))}"
            )
        require_studio()
        from dit_lora.studio.app import serve_report

        serve_report(run, port or 0, echo)
        return
    from dit_lora.report.run.page import write_report

    for run_folder in runs:
        echo(write_report(run_folder))
