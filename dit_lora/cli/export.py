"""The verbs `export` and `extract`: adapters in other forms and lower ranks, and LoRAs of two checkpoints."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from dit_lora.cli.arguments import BaseModel
from dit_lora.cli.json_output import JsonFlag, write_command_result
from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dit_lora.export.low_rank import RankChoice
    from dit_lora.export.low_rank_result import LowRankResult

EXAMPLES = {
    "export": (
        "export runs/kitten --to comfyui --out kitten-comfyui",
        "export runs/kitten runs/snow --weight 1 --weight 0.5 --to diffusers --out both",
        "export runs/kitten --rank 8 --out kitten-8",
        "export runs/kitten --best --out kitten-best",
    ),
    "extract": (
        "extract tuned base --rank 32 --out tuned-lora",
        "extract tuned base --rank auto --energy 0.95 --out tuned-lora",
    ),
}


AdapterFormat = Literal["diffusers", "peft", "comfyui", "kohya", "folded"]
AnyFormat = Literal["diffusers", "peft", "comfyui", "kohya", "folded", "merged"]
Energy = Annotated[
    float | None, typer.Option(help="Share of each layer's energy that --rank auto keeps. Default: 0.99.")
]
OutputFolder = Annotated[Path, typer.Option(help="Folder to create. It must not exist yet.")]
ExportFormat = Annotated[
    AdapterFormat,
    typer.Option(metavar="FORMAT", help="Format: diffusers, peft, comfyui, kohya or folded."),
]


def export(
    context: typer.Context,
    targets: Annotated[
        list[Path], typer.Argument(metavar="TARGET", help="Folder of a run or an adapter. Several are added up.")
    ],
    out: OutputFolder,
    to: Annotated[
        AnyFormat | None,
        typer.Option(
            metavar="FORMAT",
            help="Format: diffusers, peft, comfyui, kohya, folded (for loaders that ignore alpha) or merged (the "
            "whole checkpoint with the adapter). Without it, a terminal is asked; scripts get diffusers.",
        ),
    ] = None,
    weight: Annotated[list[float] | None, typer.Option(help="Weight of each adapter, in order. Default: 1.")] = None,
    rank: Annotated[
        str | None,
        typer.Option(help="Lower the rank to this number, or with auto to what each layer needs for --energy."),
    ] = None,
    energy: Energy = None,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Of each run, the save that is marked as best, or without a mark that of the lowest loss."
        ),
    ] = False,
    model: BaseModel = None,
    as_json: JsonFlag = False,
) -> None:
    """Write an adapter in another format. Several adapters are added up.

    The result is read back and compared. With --rank it has a lower rank,
    and how much of each layer it keeps is printed.
    """
    from dit_lora.export.export import ExportRequest, export_and_report

    # Only a change of rank has a report.
    if rank is None and (energy is not None or as_json):
        option = "--json" if energy is None else "--energy"
        raise DitLoraError(f"{option} needs --rank")
    if best:
        from dit_lora.adapters.marked_save import find_best_save

        targets = [find_best_save(target) for target in targets]
    choice = None if rank is None else _parse_rank_choice(rank, energy)
    # With --rank the result is an adapter, whose default needs no question.
    form = to or _choose_format(targets[0], model, may_ask=rank is None)
    request = ExportRequest(tuple(targets), form, out, tuple(weight or ()), model, choice)
    _print_report(context, as_json, export_and_report(request, echo), out)


def _choose_format(target: Path, model: str | None, *, may_ask: bool) -> AnyFormat:
    """Ask for the format on a terminal; elsewhere, and for Enter, take the default of the adapter."""
    from dit_lora.export.export import choose_default_format

    default = choose_default_format(target, model)
    # A chat model's adapter has one export only. Nobody would answer in a script.
    if default == "merged" or not may_ask or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return default
    from rich.console import Console
    from rich.prompt import Prompt

    # On standard error, because the output's path is read from standard output.
    console = Console(stderr=True)
    answer = Prompt.ask("Format", choices=list(get_args(AnyFormat)), default=str(default), console=console)
    return cast("AnyFormat", answer)


def extract(
    context: typer.Context,
    tuned: Annotated[
        str, typer.Argument(help="Trained model: a folder or Hub id of a pipeline or a transformer, or one file.")
    ],
    base: Annotated[str, typer.Argument(help="Model that it was trained from.")],
    rank: Annotated[str, typer.Option(help="Rank of the LoRA, or auto for what each layer needs for --energy.")],
    out: OutputFolder,
    energy: Energy = None,
    to: ExportFormat = "diffusers",
    model: Annotated[
        str | None, typer.Option(help="Pipeline with the config files, if neither of the two has them.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the difference of two checkpoints as a LoRA, and print how much of it the rank keeps."""
    from dit_lora.export.extract import ExtractRequest
    from dit_lora.export.extract import extract as run

    request = ExtractRequest(tuned, base, out, _parse_rank_choice(rank, energy), to, model)
    _print_report(context, as_json, run(request, echo), out)


def _parse_rank_choice(rank: str, energy: float | None) -> "RankChoice":
    """Parse the options --rank and --energy. Raises `DitLoraError` for values that they do not accept."""
    from dit_lora.export.low_rank import RankChoice

    if rank == "auto":
        share = 0.99 if energy is None else energy
        if not 0 < share <= 1:
            raise DitLoraError(f"--energy must be above 0 and at most 1; got {share:g}")
        return RankChoice(energy=share)
    # `isdecimal` is false for signs, points and an empty text.
    if not rank.isdecimal() or int(rank) == 0:
        raise DitLoraError(f"--rank must be a positive whole number or auto; got {rank}")
    if energy is not None:
        raise DitLoraError(f"--energy needs --rank auto; got --rank {rank}")
    return RankChoice(int(rank))


def _print_report(
    context: typer.Context, as_json: bool, results: "Sequence[LowRankResult]", output_folder: Path
) -> None:
    """Print how much each layer's new rank keeps, and the output folder.

    With `--json`, only the report is printed, as JSON.
    """

    def print_lines() -> None:
        for result in results:
            for line in result.format_lines():
                echo(line)
        echo(output_folder)

    write_command_result(context, as_json, [result.to_dict() for result in results], print_lines)
