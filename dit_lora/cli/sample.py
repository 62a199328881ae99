"""The verb `dit-lora sample`: videos and images of a trained model."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dit_lora.adapters.strengths import parse_comma_separated_numbers
from dit_lora.cli.arguments import BaseModel
from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo

if TYPE_CHECKING:
    from dit_lora.commands.sample import SampleRequest

EXAMPLES = {
    "sample": (
        "sample runs/kitten --prompt 'a kitten in the snow' --seed 1",
        "sample runs/kitten --prompt 'a kitten' --count 2 --strengths 0,0.5,1,1.5",
    )
}


References = Annotated[list[Path] | None, typer.Option(help="Picture or clip to edit. Repeat for several, in order.")]
Count = Annotated[int, typer.Option(min=1, help="Samples of each prompt, with --seed and the seeds after it.")]
Strengths = Annotated[str | None, typer.Option(help="Strengths of the adapter to compare, such as 0,0.5,1,1.5.")]
Adapters = Annotated[
    list[str] | None, typer.Option(metavar="PATH[=WEIGHT]", help="Another adapter to load. Repeat for several.")
]


def sample(
    target: Annotated[Path, typer.Argument(help="Folder of a run or an adapter, or OWNER/NAME on the Hub.")],
    prompt: Annotated[list[str], typer.Option(help="Prompt, or the name of a class. Repeat for several.")],
    model: BaseModel = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    frames: Annotated[int | None, typer.Option(min=1, help="Number of frames. Default: as in training.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Height in pixels. Default: as in training.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width in pixels. Default: as in training.")] = None,
    fps: Annotated[
        float | None, typer.Option(min=1, max=240, help="Frames per second. Default: as in training.")
    ] = None,
    # Schedulers have 1000 training timesteps, and some refuse more.
    inference_steps: Annotated[int, typer.Option(min=1, max=1000, help="Denoising steps.")] = 50,
    guidance_scale: Annotated[float, typer.Option(min=0, help="Guidance scale.")] = 6.0,
    image: Annotated[Path | None, typer.Option(help="First frame, for image-to-video.")] = None,
    last_image: Annotated[Path | None, typer.Option(help="Last frame, for models that take one.")] = None,
    reference: References = None,
    count: Count = 1,
    strengths: Strengths = None,
    adapter: Adapters = None,
    weight: Annotated[float, typer.Option(help="Weight of the target, with --adapter.")] = 1.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files. Default: samples/ next to the adapter.")
    ] = None,
) -> None:
    """Sample a video or an image for each prompt, with an adapter or a trained model."""
    from dit_lora.commands.sample import SampleRequest

    # Generators take 64 bits.
    if seed >= 2**63:
        raise DitLoraError(f"--seed must be below 2^63; got {seed}")
    if not math.isfinite(guidance_scale):
        raise DitLoraError(f"--guidance-scale must be finite; got {guidance_scale}")
    if weight != 1 and not adapter:
        raise DitLoraError(f"--weight {weight:g} needs --adapter; for one adapter use --strengths {weight:g}")
    request = SampleRequest(
        target=target,
        prompts=tuple(prompt),
        model=model,
        seed=seed,
        frames=frames,
        height=height,
        width=width,
        fps=fps,
        inference_steps=inference_steps,
        guidance_scale=guidance_scale,
        image=image,
        last_image=last_image,
        references=tuple(reference or ()),
        output_folder=out,
        count=count,
        strengths=() if strengths is None else parse_comma_separated_numbers(strengths, "--strengths"),
        other_adapters=tuple(map(_parse_weighted_adapter, adapter or ())),
        weight=weight,
    )
    _write_sample_page(request)


def _write_sample_page(request: "SampleRequest") -> None:
    from dit_lora.commands.sample import write_sample_cells
    from dit_lora.report.sample_grid import write_sample_grid

    # Written before the page, which refers to the files.
    written = write_sample_cells(request)
    cells = written.cells
    for cell in cells:
        echo(cell.path)
    if len(cells) > 1:
        rows = [(cell.prompt, cell.seed, cell.strength, cell.path) for cell in cells]
        page = cells[0].path.parent / "samples.html"
        echo(write_sample_grid(page, request.target.name, rows, written.settings))


def _parse_weighted_adapter(text: str) -> tuple[Path, float]:
    """Parse `PATH=WEIGHT` of an adapter to its path and weight. The weight is 1 if it is missing."""
    # The last equals sign: a path may contain some. Without one, the path is empty.
    path, _, weight = text.rpartition("=")
    try:
        number = float(weight) if path else 1.0
    except ValueError:  # a path with an equals sign of its own
        return Path(text), 1.0
    if not math.isfinite(number):
        raise DitLoraError(f"--adapter {text}: the weight must be finite")
    return (Path(path), number) if path else (Path(text), 1.0)
