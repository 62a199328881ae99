"""The `dit-lora` command: the table of verbs. Each verb is a file of that name, with its help and examples."""

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from dit_lora.cli.plain_help import PlainCommand, PlainGroup
from dit_lora.terminal import echo
from dit_lora.version import __version__

PANELS = {
    "Start": ("doctor", "init.recipes", "init", "tiny", "convert"),
    "Data": ("caption", "audit", "show", "cache"),
    "Train": ("plan", "plan.check", "train", "guard", "replay", "quarantine"),
    "Use what was trained": ("studio", "report", "sample", "verify", "export", "export.extract", "push", "chat"),
}
"""Verbs in the order in which a newcomer needs them; FILE.VERB where a verb shares the file of another."""

EXAMPLES: dict[str, Sequence[str]] = {}
"""Commands to type, after `dit-lora`, by verb."""

# Everything after the script's name is passed to the script, even if it looks like an option of ours.
_PASS_THROUGH_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}

_EPILOG = """Start with:
  dit-lora doctor
  dit-lora recipes
  dit-lora init smoke/cogvideox my-run
Train in the folder that init writes:
  dit-lora train RECIPE.yaml \\[key.path=value ...]"""

app = typer.Typer(
    name="dit-lora",
    cls=PlainGroup,
    help="Train LoRAs for diffusion transformers and chat models, and survive NaN.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _handle_global_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        echo(__version__)
        raise typer.Exit


def _add_command(verb_path: str, panel: str) -> None:
    """Add a command, or a group of commands, to its help panel, with its examples below its help."""
    # A verb without a dot is in the file with the same name.
    file, _, name = verb_path.rpartition(".")
    module = import_module(f"dit_lora.cli.{file or name}")
    # Before the help texts below, which show the examples.
    EXAMPLES.update(module.EXAMPLES)
    verb = getattr(module, name)
    # A group, whose verbs have examples of their own.
    if isinstance(verb, typer.Typer):
        for command in verb.registered_commands:
            command.epilog = _format_epilog(f"{name} {command.name}")
            command.cls = PlainCommand
        app.add_typer(
            verb, name=name, cls=PlainGroup, no_args_is_help=True, rich_help_panel=panel, epilog=_format_epilog(name)
        )
    else:
        # Only this verb passes arguments on to a script.
        settings = _PASS_THROUGH_SETTINGS if name == "guard" else None
        app.command(
            name, cls=PlainCommand, rich_help_panel=panel, epilog=_format_epilog(name), context_settings=settings
        )(verb)


def _format_epilog(verb: str) -> str:
    examples = EXAMPLES[verb]
    heading = "Example:" if len(examples) == 1 else "Examples:"
    return "\n".join([heading, *(f"  dit-lora {example}" for example in examples)])


for _panel, _verbs in PANELS.items():
    for _verb in _verbs:
        _add_command(_verb, _panel)
