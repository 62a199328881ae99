"""The verb `dit-lora sample`: videos and images of a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import BaseModel
from dit_lora.terminal import echo

EXAMPLES = {"sample": ("sample runs/kitten --prompt 'a kitten in the snow' --seed 1",)}


def sample(
    target: Annotated[
        Path, typer.Argument(help="A run's folder, an adapter, or its OWNER/NAME on the Hub.")
    ],
    prompt: Annotated[list[str], typer.Option(help="Or a class's name. Repeat for several.")],
    model: BaseModel = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    frames: Annotated[int | None, typer.Option(help="By default as trained.")] = None,
    height: Annotated[int | None, typer.Option(help="By default as trained.")] = None,
    width: Annotated[int | None, typer.Option(help="By default as trained.")] = None,
    fps: Annotated[
        float | None, typer.Option(min=1, max=240, help="By default as trained.")
    ] = None,
    inference_steps: Annotated[int, typer.Option(min=1)] = 50,
    guidance_scale: Annotated[float, typer.Option(min=0)] = 6.0,
    image: Annotated[Path | None, typer.Option(help="First frame, for image-to-video.")] = None,
    last_image: Annotated[
        Path | None, typer.Option(help="Last frame, where the model is given that too.")
    ] = None,
    reference: Annotated[
        list[Path] | None,
        typer.Option(
            help="Picture or clip to make it from, for models that edit. Repeat in order."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="By default beside the adapter.")] = None,
) -> None:
    """Sample one mp4 (or image) a prompt with an adapter, or a trained model, in the stock pipeline."""
    from dit_lora.commands.sample import SampleRequest
    from dit_lora.commands.sample import sample as run_sample

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
        out=out,
    )
    for path in run_sample(request):
        echo(path)
