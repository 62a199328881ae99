"""The verbs `plan` and `check`: the memory and disk that a run needs, and whether it trains right on this machine."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from dit_lora.cli.arguments import Overrides, RecipeFile
from dit_lora.cli.json_output import JsonFlag, write_command_result
from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo

EXAMPLES = {
    "plan": ("plan cogvideox_5b_t2v.yaml --gpu 24GiB", "plan cogvideox_5b_t2v.yaml lora.rank=16"),
    "check": ("check cogvideox_5b_t2v.yaml", "check cogvideox_5b_t2v.yaml --html report.html"),
}
_UNIT_BYTES = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "": 2**30}


def plan(
    context: typer.Context,
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Memory of each GPU, such as 24GiB. Default: that of this machine's GPU.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of processes, with one GPU each.")] = 1,
    sharding: Annotated[
        Literal["ddp", "zero2", "fsdp2"], typer.Option(help="How weights, gradients and optimizer state are sharded.")
    ] = "ddp",
    as_json: JsonFlag = False,
) -> None:
    """Compute the memory and disk that a run needs. Exit code 1 if it does not fit.

    No weights are downloaded.
    """
    import torch

    from dit_lora.commands.plan import print_plan
    from dit_lora.environment.progress_bar import hide_progress_bars
    from dit_lora.planning.budget import LaunchLayout
    from dit_lora.planning.search import plan_memory as run

    hide_progress_bars()
    size = None
    if gpu is not None:
        size = parse_size(gpu)
    elif torch.cuda.is_available():
        size = int(torch.cuda.get_device_properties(0).total_memory)
    planned = run(recipe, overrides or [], LaunchLayout(ranks, sharding), size)
    write_command_result(
        context, as_json, planned.to_json_values(), lambda: print_plan(planned), passed=planned.budget.fits
    )


def parse_size(text: str) -> int:
    """Parse a memory size such as `24GiB`, `24 GB` or `24` (GiB) to bytes. Raises `DitLoraError` for anything else."""
    # A number, then an optional unit.
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNIT_BYTES or float(match[1]) == 0:
        raise DitLoraError(f"--gpu must be a size such as 24GiB, 80GB or 24; got {text!r}")
    return int(float(match[1]) * _UNIT_BYTES[match[2]])


def check(
    context: typer.Context,
    recipe: RecipeFile,
    overrides: Overrides = None,
    html: Annotated[Path, typer.Option(help="The page to write.")] = Path("check.html"),
    as_json: JsonFlag = False,
) -> None:
    """Check a recipe with a few steps on this machine. Exit code 1 if something differs.

    Checked are kernels, the gradient, resuming, and two ranks against one. No run folder is left.
    """
    from dit_lora.commands.check import check_recipe, write_check_page

    report = check_recipe(recipe, overrides or [], lambda line: echo(line, err=True))
    write_check_page(html, report)
    text = f"{report.format_text()}\nwrote {html}"
    write_command_result(context, as_json, report.to_dict(), lambda: echo(text), passed=report.passed)
