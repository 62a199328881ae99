"""The verb `dit-lora export`: an adapter in the form that another program takes."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dit_lora.terminal import echo


def export(
    targets: Annotated[
        list[Path],
        typer.Argument(metavar="TARGET", help="Runs' folders, or adapters'; several are added up."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    to: Annotated[
        Literal["diffusers", "peft", "comfyui", "kohya", "folded", "merged"],
        typer.Option(
            help="folded: for loaders that ignore alpha; merged: the whole checkpoint, adapter included."
        ),
    ] = "merged",
    weight: Annotated[
        list[float] | None, typer.Option(help="One for each adapter, in order; by default 1.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Base checkpoint; by default the run's.")
    ] = None,
) -> None:
    """Write an adapter, or several added up, in another form; what was written is read back and compared."""
    from dit_lora.results.export.export import ExportRequest
    from dit_lora.results.export.export import export as run

    request = ExportRequest(tuple(targets), to, out, tuple(weight or ()), model)
    echo(run(request, echo))


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command()(export)
