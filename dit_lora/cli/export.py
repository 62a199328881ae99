"""The verbs `export`, `extract` and `resize`: adapters in other forms, of two checkpoints, in lower ranks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dit_lora.cli.arguments import BaseModel
from dit_lora.cli.json_output import JsonFlag, answer
from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dit_lora.results.export.extract import Reduced
    from dit_lora.results.export.low_rank import Cut

EXAMPLES = {
    "export": (
        "export runs/kitten --to comfyui --out kitten-comfyui",
        "export runs/kitten runs/snow --weight 1 --weight 0.5 --to diffusers --out both",
    ),
    "extract": (
        "extract tuned base --rank 32 --out tuned-lora",
        "extract tuned base --rank auto --energy 0.95 --out tuned-lora",
    ),
    "resize": ("resize runs/kitten --rank 8 --out kitten-8",),
}


Rank = Annotated[str, typer.Option(help="A number, or auto: each layer's own, by --energy.")]
Energy = Annotated[
    float | None,
    typer.Option(help="Of --rank auto: share of each layer's energy to keep; by default 0.99."),
]
Out = Annotated[Path, typer.Option(help="Folder to write; must not exist.")]
To = Annotated[
    Literal["diffusers", "peft", "comfyui", "kohya", "folded"],
    typer.Option(help="As export writes it."),
]


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


def extract(
    context: typer.Context,
    tuned: Annotated[
        str, typer.Argument(help="A pipeline's folder or Hub name, a transformer's, or one file.")
    ],
    base: Annotated[str, typer.Argument(help="What it was trained or merged from.")],
    rank: Rank,
    out: Out,
    energy: Energy = None,
    to: To = "diffusers",
    model: Annotated[
        str | None, typer.Option(help="A pipeline with the configs, where neither of the two is.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the difference of two checkpoints as a LoRA, and say what of it the rank keeps."""
    from dit_lora.results.export.extract import ExtractRequest
    from dit_lora.results.export.extract import extract as run

    request = ExtractRequest(tuned, base, out, _cut(rank, energy), to, model)
    _tell(context, as_json, run(request, echo), out)


def resize(
    context: typer.Context,
    target: Annotated[
        Path, typer.Argument(metavar="LORA", help="A run's folder, an adapter's, or its file.")
    ],
    rank: Rank,
    out: Out,
    energy: Energy = None,
    to: To = "diffusers",
    model: BaseModel = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a LoRA in a lower rank, and say what of it the rank keeps."""
    from dit_lora.results.export.resize import ResizeRequest
    from dit_lora.results.export.resize import resize as run

    request = ResizeRequest(target, out, _cut(rank, energy), to, model)
    _tell(context, as_json, run(request, echo), out)


def _cut(rank: str, energy: float | None) -> "Cut":
    """Return the choice of a rank as it was typed; raises `DitLoraError` for what is none."""
    from dit_lora.results.export.low_rank import Cut

    if rank == "auto":
        share = 0.99 if energy is None else energy
        if not 0 < share <= 1:
            raise DitLoraError(f"--energy is a share above 0 and up to 1; got {share:g}")
        return Cut(energy=share)
    if not rank.isdecimal() or int(rank) == 0:
        raise DitLoraError(f"--rank takes a number above 0, or auto; got {rank}")
    if energy is not None:
        raise DitLoraError(f"--energy is for --rank auto; got --rank {rank}")
    return Cut(int(rank))


def _tell(context: typer.Context, as_json: bool, found: "Sequence[Reduced]", out: Path) -> None:
    def tell() -> None:
        for one in found:
            for line in one.lines():
                echo(line)
        echo(out)

    answer(context, as_json, [one.record() for one in found], tell)
