"""The verbs `dit-lora extract` and `resize`: LoRAs by singular values, with the energy that their rank keeps."""

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
