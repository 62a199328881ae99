"""The verb `dit-lora sample`: videos and images of a trained model."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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


References = Annotated[
    list[Path] | None, typer.Option(help="Picture or clip to make it from, for models that edit. Repeat in order.")
]
Count = Annotated[int, typer.Option(min=1, help="Samples of each prompt, from --seed and the seeds after it.")]
Strengths = Annotated[str | None, typer.Option(help="Of the adapter, such as 0,0.5,1,1.5: each from the same seeds.")]
Adapters = Annotated[
    list[str] | None, typer.Option(metavar="PATH[=WEIGHT]", help="A further adapter. Repeat for several.")
]


def sample(
    target: Annotated[Path, typer.Argument(help="A run's folder, an adapter, or its OWNER/NAME on the Hub.")],
    prompt: Annotated[list[str], typer.Option(help="Or a class's name. Repeat for several.")],
    model: BaseModel = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    frames: Annotated[int | None, typer.Option(help="By default as trained.")] = None,
    height: Annotated[int | None, typer.Option(help="By default as trained.")] = None,
    width: Annotated[int | None, typer.Option(help="By default as trained.")] = None,
    fps: Annotated[float | None, typer.Option(min=1, max=240, help="By default as trained.")] = None,
    inference_steps: Annotated[int, typer.Option(min=1)] = 50,
    guidance_scale: Annotated[float, typer.Option(min=0)] = 6.0,
    image: Annotated[Path | None, typer.Option(help="First frame, for image-to-video.")] = None,
    last_image: Annotated[Path | None, typer.Option(help="Last frame, where the model is given that too.")] = None,
    reference: References = None,
    count: Count = 1,
    strengths: Strengths = None,
    adapter: Adapters = None,
    weight: Annotated[float, typer.Option(help="Of the target beside further adapters.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="By default beside the adapter.")] = None,
) -> None:
    """Sample an mp4 (or image) a prompt with an adapter, or a trained model, in the stock pipeline."""
    from dit_lora.commands.sample import SampleRequest

    if weight != 1 and not adapter:
        raise DitLoraError(f"--weight {weight:g} is beside --adapter; alone: --strengths {weight:g}")
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
        strengths=_parse_strengths(strengths),
        other_adapters=tuple(map(_parse_weighted_adapter, adapter or ())),
        weight=weight,
    )
    _write_samples(request)


def _write_samples(request: "SampleRequest") -> None:
    from dit_lora.commands.sample import write_sample_cells
    from dit_lora.report.sample_grid import write_sample_grid

    # Written before the page, which refers to the files.
    cells = write_sample_cells(request)
    for cell in cells:
        echo(cell.path)
    if len(cells) > 1:
        rows = [(cell.prompt, cell.seed, cell.strength, cell.path) for cell in cells]
        page = cells[0].path.parent / "samples.html"
        echo(write_sample_grid(page, request.target.name, rows))


def _parse_strengths(text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        numbers = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise DitLoraError(f"--strengths takes numbers, as 0,0.5,1; got {text!r}") from error
    # Equal strengths would write the same file twice.
    if not all(map(math.isfinite, numbers)) or len(set(numbers)) < len(numbers):
        raise DitLoraError(f"--strengths takes finite numbers, each once; got {text!r}")
    return numbers


def _parse_weighted_adapter(text: str) -> tuple[Path, float]:
    """Parse `PATH=WEIGHT` of an adapter to its path and weight. The weight is 1 if it is missing."""
    # The last equals sign: a path may contain some. Without one, the path is empty.
    path, _, weight = text.rpartition("=")
    try:
        number = float(weight) if path else 1.0
    except ValueError:  # a path with an equals sign of its own
        return Path(text), 1.0
    if not math.isfinite(number):
        raise DitLoraError(f"--adapter {text}: its weight is not finite")
    return (Path(path), number) if path else (Path(text), 1.0)
