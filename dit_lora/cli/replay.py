"""The verb `dit-lora replay`: runs the micro-batch of an event again."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.json_output import JsonFlag, write_command_result
from dit_lora.terminal import echo

EXAMPLES = {
    "replay": (
        "replay runs/kitten/bundles/step_000012",
        "replay dit_lora_guard/bundles/step_000012 --script train.py -- --lr 1e-4",
    )
}


def replay(
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="One of the folders in the run's bundles/.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments for --script, after --.", show_default=False)
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(help="Training script that the bundle comes from. It creates the model and takes no step."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Base checkpoint. Default: the one of the bundle's run.")] = None,
    device: Annotated[str | None, typer.Option(help="Device, such as cpu, cuda or cuda:1.")] = None,
    fp32: Annotated[bool, typer.Option("--fp32", help="Use fp32 for weights and compute.")] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Switch a kernel or backend off, such as attention:flash. Repeat for several."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the micro-batch of an event again, and name the cause. Exit code 1 if it fails again."""
    from dit_lora.commands.replay import replay_bundle

    result = replay_bundle(
        bundle, model=model, device=device, fp32=fp32, without=without or [], script=script, arguments=arguments or []
    )
    passed = result.diagnosis is None
    write_command_result(context, as_json, result.record(), lambda: echo(result.format_text()), passed=passed)
