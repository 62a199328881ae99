"""The verb `dit-lora verify`: whether a saved result is complete, finite, effective and as trained."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import BaseModel
from dit_lora.cli.json_output import JsonFlag, write_command_result
from dit_lora.terminal import echo

EXAMPLES = {"verify": ("verify runs/kitten",)}


def verify(
    context: typer.Context,
    target: Annotated[Path, typer.Argument(help="Folder of a run, an adapter or a pipeline, or a LoRA file.")],
    model: BaseModel = None,
    allow_extreme_update: Annotated[
        bool, typer.Option("--allow-extreme-update", help="Accept an update of more than ten times its weight.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Load a result into the original model and check it. Exit code 1 if a check fails.

    Checks keys, values, effect, scale and output.
    """
    from dit_lora.commands.verify import verify_adapter
    from dit_lora.config.experts import EXPERT_NAMES
    from dit_lora.verify.expert_pair import find_expert_results

    verifications = [
        verify_adapter(item, model, allow_extreme_update=allow_extreme_update) for item in find_expert_results(target)
    ]
    passed = all(item.passed for item in verifications)
    # A single adapter has its own report.
    lines, record = verifications[0].format_lines(), verifications[0].to_dict()
    if len(verifications) > 1:  # an adapter of each expert
        named = dict(zip(EXPERT_NAMES.values(), verifications, strict=True))
        lines = [line for name, item in named.items() for line in (f"{name}:", *item.format_lines())]
        record = {"passed": passed, **{name: item.to_dict() for name, item in named.items()}}
    write_command_result(context, as_json, record, partial(echo, "\n".join(lines)), passed=passed)
