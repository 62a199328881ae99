"""The verb `dit-lora verify`: whether what was saved is whole, finite, effective and as trained."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.json_output import JsonFlag, print_json
from dit_lora.errors import CheckFailedError
from dit_lora.terminal import echo


def verify(
    context: typer.Context,
    target: Annotated[
        Path, typer.Argument(help="A run's folder, an adapter's folder or file, or a pipeline's.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Base checkpoint; by default the run's.")
    ] = None,
    allow_extreme_update: Annotated[
        bool,
        typer.Option(help="Let an update pass that is more than ten times its weight."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Load a result into the stock model and check keys, values, effect, scale and output; exit 1 if one is wrong."""
    from dit_lora.commands.verify import verify_adapter

    verification = verify_adapter(target, model, allow_extreme_update=allow_extreme_update)
    if as_json:
        print_json(context, verification.record())
    else:
        echo("\n".join(verification.lines()))
    if not verification.passed:
        raise typer.Exit(CheckFailedError.exit_code)


def register(app: typer.Typer) -> None:
    """Put the verb into the `dit-lora` command."""
    app.command()(verify)
