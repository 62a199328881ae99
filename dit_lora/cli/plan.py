"""The verb `dit-lora plan`: what a run will take, before anything is downloaded."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dit_lora.cli.arguments import Overrides, RecipeFile
from dit_lora.cli.json_output import JsonFlag, answer
from dit_lora.errors import DitLoraError

if TYPE_CHECKING:
    from dit_lora.environment.ceilings import Ceilings

EXAMPLES = {
    "plan": ("plan cogvideox_5b_t2v.yaml --gpu 24GiB", "plan cogvideox_5b_t2v.yaml lora.rank=16")
}
_UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20, "mb": 10**6, "": 2**30}


def plan(
    context: typer.Context,
    recipe: RecipeFile,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Memory of each GPU, such as 24GiB; by default this machine's, if it has one."
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, a GPU each.")] = 1,
    sharding: Annotated[
        Literal["ddp", "zero2", "fsdp2"],
        typer.Option(help="What the launch shares out among them."),
    ] = "ddp",
    ceilings: Annotated[
        Path | None,
        typer.Option(
            help="Rates of another machine's GPU: the file that `doctor --measure` wrote there."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what memory, disk and time a run takes, before any weight is downloaded; exit 1 if it does not fit.

    Seconds a step are predicted from what `doctor --measure` found of this machine's GPU, else from an estimate.
    """
    from dit_lora.commands.plan import render
    from dit_lora.planning.budget import Launch
    from dit_lora.planning.search import plan as run
    from dit_lora.training.session.session import quiet_libraries

    quiet_libraries()
    size = _memory_here() if gpu is None else parse_size(gpu)
    rates = _ceilings(ceilings)
    planned = run(recipe, overrides or [], Launch(ranks, sharding), size, rates)
    fits = planned.budget.fits
    answer(context, as_json, planned.record(), lambda: render(planned), passed=fits)


def parse_size(text: str) -> int:
    """Return the bytes of `24GiB`, `24 GB`, `24` (GiB); raises `DitLoraError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise DitLoraError(f"--gpu takes a size such as 24GiB, 80GB or 24; got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _ceilings(file: Path | None) -> "Ceilings":
    """Return the rates of a file, else those measured of this machine's GPU, else an H200's."""
    import torch

    from dit_lora.environment.ceilings import H200, load_ceilings, read_ceilings

    if file is not None:
        read = read_ceilings(file)
        if read is None:
            raise DitLoraError(f"--ceilings: {file} is of another version; measure again")
        return read
    if not torch.cuda.is_available():
        return H200
    return load_ceilings(torch.cuda.get_device_name()) or H200


def _memory_here() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)
