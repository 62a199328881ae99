"""The verb `dit-lora quarantine`: the samples that a run leaves out and why, and how to take one back."""

from dataclasses import asdict
from typing import Annotated

import typer

from dit_lora.cli.arguments import RunFolder
from dit_lora.cli.json_output import JsonFlag, write_command_result
from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo

EXAMPLES = {"quarantine": ("quarantine runs/kitten", "quarantine runs/kitten --release clip.mp4")}


def quarantine(
    context: typer.Context,
    run: RunFolder,
    release: Annotated[
        list[str] | None, typer.Option(help="Use this sample again. Repeat for several.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the samples that a run leaves out, and why.

    With --release, the next resume uses them again.
    """
    from dit_lora.data.loading.quarantine import QUARANTINE_FILE, Quarantine
    from dit_lora.training.session.run_lock import is_run_active, read_holder

    if not run.is_dir():
        raise DitLoraError(f"{run} is not a folder; give a run's folder (run.dir of its recipe)")
    # A run without a list leaves no sample out; a mistyped folder is an error.
    if not any((run / name).exists() for name in (QUARANTINE_FILE, "config.yaml")):
        raise DitLoraError(f"{run} is not a run: it has no config.yaml; give the folder in run.dir")
    # The run keeps the list in memory and writes it again, so a change here would be lost.
    if release and is_run_active(run):
        raise DitLoraError(f"{run} is in use by {read_holder(run)}; release samples when that process has ended")
    table = Quarantine.load(run / QUARANTINE_FILE)
    released = table.release(release or [])
    if released:
        table.save()
    lines = [f"released {name}: train.resume=auto trains on it again" for name in released]
    lines += [record.describe() for record in table.records] or [f"{run} leaves no sample out"]
    record = {"left_out": [asdict(entry) for entry in table.records], "released": released}
    write_command_result(context, as_json, record, lambda: echo("\n".join(lines)))
