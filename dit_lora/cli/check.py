"""The verb `dit-lora check`: whether a recipe trains right on this machine, as a page for a bug report."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import Overrides, RecipeFile
from dit_lora.cli.json_output import JsonFlag, write_answer
from dit_lora.terminal import echo

EXAMPLES = {"check": ("check cogvideox_5b_t2v.yaml", "check cogvideox_5b_t2v.yaml --html report.html")}


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

    report = check_recipe(recipe, overrides or [], partial(echo, err=True))
    write_check_page(html, report)
    text = f"{report.format_text()}\nwrote {html}"
    write_answer(context, as_json, report.to_dict(), lambda: echo(text), passed=report.passed)
