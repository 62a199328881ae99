"""The verb `dit-lora replay`: the micro-batch of an event, run again."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.json_output import JsonFlag, write_answer
from dit_lora.terminal import echo

EXAMPLES = {
    "replay": (
        "replay runs/kitten/bundles/step_000012",
        "replay dit_lora_guard/bundles/step_000012 --script train.py -- --lr 1e-4",
    )
}


def replay(
    context: typer.Context,
    bundle: Annotated[Path, typer.Argument(help="A folder below a run's bundles/.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of --script, behind --.", show_default=False)
    ] = None,
    script: Annotated[
        str | None, typer.Option(help="The script of a loop of your own: it makes the model, and no step.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Base checkpoint; by default the one of the run beside it.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1.")] = None,
    fp32: Annotated[bool, typer.Option("--fp32", help="Weights and compute in fp32.")] = False,
    without: Annotated[
        list[str] | None, typer.Option(help="Switch this off, for instance attention:flash; repeatable.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the micro-batch of an event again and name the cause; exit 1 if it is still not healthy."""
    from dit_lora.commands.replay import replay_bundle

    result = replay_bundle(
        bundle, model=model, device=device, fp32=fp32, without=without or [], script=script, arguments=arguments or []
    )
    passed = result.diagnosis is None
    write_answer(context, as_json, result.record(), lambda: echo(result.format_text()), passed=passed)
