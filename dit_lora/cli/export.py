"""The verb `dit-lora export`: an adapter in the form that another program takes."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dit_lora.cli.arguments import BaseModel
from dit_lora.terminal import echo

EXAMPLES = {
    "export": (
        "export runs/kitten --to comfyui --out kitten-comfyui",
        "export runs/kitten runs/snow --weight 1 --weight 0.5 --to diffusers --out both",
    )
}


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
    model: BaseModel = None,
) -> None:
    """Write an adapter, or several added up, in another form; what was written is read back and compared."""
    from dit_lora.results.export.export import ExportRequest
    from dit_lora.results.export.export import export as run

    request = ExportRequest(tuple(targets), to, out, tuple(weight or ()), model)
    echo(run(request, echo))
