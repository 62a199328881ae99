"""The verb `dit-lora evaluate`: a chat model's accuracy at multiple-choice questions."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dit_lora.cli.arguments import BaseModel, ChatModel
from dit_lora.cli.json_output import JsonFlag, answer
from dit_lora.terminal import echo

EXAMPLES = {"evaluate": ("evaluate runs/my-chat --data MVBench --against base",)}


def evaluate(
    context: typer.Context,
    target: ChatModel,
    data: Annotated[
        Path, typer.Option(help="MVBench's folder, or a .json or .jsonl file of questions.")
    ],
    media: Annotated[
        Path | None, typer.Option(help="The videos' folder, where it is not beside the questions.")
    ] = None,
    model: BaseModel = None,
    against: Annotated[
        Literal["base"] | None, typer.Option(help="Ask the base too, without the fine-tune.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of each task.")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Of each video.")] = None,
    protocol: Annotated[
        Literal["notebook", "trained"] | None,
        typer.Option(
            help="Prompt and pictures of the original's notebook (default for MVBench), or as trained (default for a file)."
        ),
    ] = None,
    skip: Annotated[
        bool, typer.Option("--skip", help="Leave out questions that cannot be asked.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="By default below the run's folder.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure accuracy at multiple-choice questions, by MVBench's protocol; a second call goes on."""
    from dit_lora.commands.evaluate import EvaluationRequest, evaluate_target, told
    from dit_lora.report.evaluation_page import write_evaluation_page

    request = EvaluationRequest(
        target=target,
        data=data,
        media=media,
        model=model,
        against_base=against == "base",
        limit=limit,
        frames=frames,
        protocol=protocol,
        skip=skip,
        out=out,
    )
    done = evaluate_target(request)
    page = write_evaluation_page(
        done.out / "evaluation.html",
        done.results,
        done.questions,
        done.predictions,
        title=str(target),
    )
    lines = [*told(done.results), str(page)]
    answer(context, as_json, done.results, lambda: echo("\n".join(lines)))
