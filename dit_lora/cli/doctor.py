"""The verb `dit-lora doctor`: versions, devices, and whether this machine can train."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.json_output import JsonFlag, write_command_result

EXAMPLES = {"doctor": ("doctor", "doctor --config-file one_gpu.yaml")}


def doctor(
    context: typer.Context,
    as_json: JsonFlag = False,
    config_file: Annotated[Path | None, typer.Option(help="The Accelerate config that you launch with.")] = None,
) -> None:
    """Show versions, the device and what a run would use. Exit code 1 if a run would be refused."""
    from dit_lora.commands.doctor import build_report, print_report
    from dit_lora.environment.versions import probe_environment

    account = build_report(probe_environment(), config_file)
    write_command_result(context, as_json, account, lambda: print_report(account), passed=account["ok"])
