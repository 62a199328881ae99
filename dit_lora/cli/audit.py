"""The verb `dit-lora audit`: which samples of a data set cannot be used, and why."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import Overrides, complete_recipe_files
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.terminal import echo

EXAMPLES = {"audit": ("audit clips --html audit.html", "audit cogvideox_5b_t2v.yaml data.path=clips")}


def audit(
    target: Annotated[
        str,
        typer.Argument(
            help="A recipe (.yaml), or the data itself: a folder, a .tar file or a dataset on the Hub.",
            autocompletion=complete_recipe_files,
        ),
    ],
    overrides: Overrides = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result for every sample to this file.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures to this file.")] = None,
    fix_list: Annotated[
        Path | None, typer.Option(help="Write what to do about each file, as tab-separated values.")
    ] = None,
    encode: Annotated[
        bool, typer.Option("--encode", help="Fill the recipe's cache, and check the encoded samples too.")
    ] = False,
) -> None:
    """Check every clip of a data set, with its caption or class. Exit code 1 if training would reject one."""
    from dit_lora.config.load import is_recipe
    from dit_lora.data.audit.summary import build_audit_json, write_fix_list, write_json
    from dit_lora.report.audit.page import write_audit_page

    # Imports are inside the verbs, so that help and completion load little.
    if is_recipe(target):
        from dit_lora.commands.audit_recipe import audit_recipe_file

        result = audit_recipe_file(target, overrides or [], encode=encode)
    elif encode:
        raise DitLoraError(f"--encode needs a recipe (.yaml); got {target}")
    else:
        # Without torch and Diffusers, whose import takes seconds.
        from dit_lora.commands.audit import audit_folder

        result = audit_folder(target, overrides or [])
    for line in result.lines():
        # Standard output then has only the JSON.
        echo(line, err=json_file == Path("/dev/stdout"))
    samples, notes, buckets, encoded = result.audited_samples, result.notes, result.buckets, result.encoded
    try:
        if json_file:
            write_json(json_file, build_audit_json(samples, notes=notes, buckets=buckets, encoded=encoded))
        if fix_list:
            write_fix_list(fix_list, samples)
    except OSError as error:
        raise DitLoraError(f"cannot write {error.filename}: {error.strerror}") from error
    if html:
        write_audit_page(
            html, samples, title=result.title, totals=result.totals, notes=notes, buckets=buckets, encoded=encoded
        )
    if not result.passed:
        raise typer.Exit(CheckFailedError.exit_code)
