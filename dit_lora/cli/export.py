"""The verbs `export` and `extract`: adapters in other forms and lower ranks, and LoRAs of two checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dit_lora.cli.arguments import BaseModel
from dit_lora.cli.json_output import JsonFlag, write_answer
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
    ),
    "extract": (
        "extract tuned base --rank 32 --out tuned-lora",
        "extract tuned base --rank auto --energy 0.95 --out tuned-lora",
    ),
}


Energy = Annotated[
    float | None, typer.Option(help="Of --rank auto: share of each layer's energy to keep; by default 0.99.")
]
OutputFolder = Annotated[Path, typer.Option(help="Folder to write; must not exist.")]
ExportFormat = Annotated[
    Literal["diffusers", "peft", "comfyui", "kohya", "folded"], typer.Option(help="As export writes it.")
]


def export(
    context: typer.Context,
    targets: Annotated[
        list[Path], typer.Argument(metavar="TARGET", help="Runs' folders, or adapters'; several are added up.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    to: Annotated[
        Literal["diffusers", "peft", "comfyui", "kohya", "folded", "merged"] | None,
        typer.Option(
            help="folded: for loaders that ignore alpha; merged: the whole checkpoint, adapter included. By default "
            "merged, with --rank diffusers."
        ),
    ] = None,
    weight: Annotated[list[float] | None, typer.Option(help="One for each adapter, in order; by default 1.")] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            help="Lower the rank to this number, and say what it keeps; auto: each layer's own, by --energy."
        ),
    ] = None,
    energy: Energy = None,
    model: BaseModel = None,
    as_json: JsonFlag = False,
) -> None:
    """Write an adapter, or several added up, in another form; what was written is read back and compared.

    With --rank it is written at a lower rank, and what the rank keeps is printed (with --json as JSON).
    """
    from dit_lora.export.export import ExportRequest, export_and_report

    # Only a change of rank has a report.
    if rank is None and (energy is not None or as_json):
        option = "--json" if energy is None else "--energy"
        raise DitLoraError(f"{option} goes with --rank")
    choice = None if rank is None else _parse_rank_choice(rank, energy)
    # A whole checkpoint has no rank to lower.
    form = to or ("merged" if rank is None else "diffusers")
    request = ExportRequest(tuple(targets), form, out, tuple(weight or ()), model, choice)
    _print_report(context, as_json, export_and_report(request, echo), out)


def extract(
    context: typer.Context,
    tuned: Annotated[str, typer.Argument(help="A pipeline's folder or Hub name, a transformer's, or one file.")],
    base: Annotated[str, typer.Argument(help="What it was trained or merged from.")],
    rank: Annotated[str, typer.Option(help="A number, or auto: each layer's own, by --energy.")],
    out: OutputFolder,
    energy: Energy = None,
    to: ExportFormat = "diffusers",
    model: Annotated[
        str | None, typer.Option(help="A pipeline with the configs, where neither of the two is.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the difference of two checkpoints as a LoRA, and say what of it the rank keeps."""
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
            raise DitLoraError(f"--energy is a share above 0 and up to 1; got {share:g}")
        return RankChoice(energy=share)
    # `isdecimal` is false for signs, points and an empty text.
    if not rank.isdecimal() or int(rank) == 0:
        raise DitLoraError(f"--rank takes a number above 0, or auto; got {rank}")
    if energy is not None:
        raise DitLoraError(f"--energy is for --rank auto; got --rank {rank}")
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

    write_answer(context, as_json, [result.to_dict() for result in results], print_lines)
