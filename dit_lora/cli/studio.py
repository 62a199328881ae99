"""The verb `dit-lora studio`: runs, their samples and curves in the browser of this machine."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import Port, require_studio
from dit_lora.terminal import echo

EXAMPLES = {"studio": ("studio", "studio runs /data/more-runs")}


def studio(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER...]", help="Folders with runs. Default: this one.")
    ] = None,
    port: Port = None,
) -> None:
    """Look through runs in the browser of this machine. The pages follow runs that are training."""
    require_studio()
    from dit_lora.studio.app import serve_studio

    serve_studio(folders or [Path()], port or 0, echo)
