"""The verbs of `dit-lora` for chat models: show, chat, evaluate."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dit_lora.cli.completion import Overrides, RecipeFile
from dit_lora.cli.json_output import JsonFlag, print_json
from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo

Target = Annotated[Path, typer.Argument(help="A run's folder, an adapter's, or a checkpoint's.")]
Base = Annotated[str | None, typer.Option(help="Base checkpoint; by default the run's.")]


def show(
    recipe: RecipeFile,
    overrides: Overrides = None,
    sample: Annotated[str, typer.Option(help="A sample's id, or its number from 0.")] = "0",
    draw: Annotated[
        int | None,
        typer.Option(min=0, help="As training draws it: random frames, crop, order of turns."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page, with its frames.")] = None,
) -> None:
    """Show one training sample as the model gets it: its tokens, and which of them are learned."""
    from rich.console import Console

    from dit_lora.commands.show import show_sample
    from dit_lora.report.chat_sample_page import write_chat_sample_page

    shown = show_sample(recipe, overrides or [], sample, draw)
    Console().print(shown.in_terminal())
    if html:
        conversation = shown.entry.conversation
        write_chat_sample_page(
            html,
            shown.entry.id,
            shown.rendered,
            shown.checkpoint.tokenizer,
            kind=conversation.kind,
            frames=shown.pixels,
            seconds=shown.seconds,
            instruction=conversation.turns[0].instruction,
        )


def chat(
    target: Target,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A question; several are turns of one conversation.")
    ] = None,
    video: Annotated[Path | None, typer.Option(help="What it is about.")] = None,
    image: Annotated[Path | None, typer.Option(help="What it is about.")] = None,
    model: Base = None,
    frames: Annotated[int | None, typer.Option(min=1, help="By default as trained.")] = None,
    instruction: Annotated[
        str, typer.Option(help="What VideoChat2's Q-Former reads beside the frames.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
) -> None:
    """Ask a chat model about a video, an image or nothing; without --prompt, line by line until Ctrl-D."""
    from dit_lora.data.media.media import MediaFile
    from dit_lora.training.tasks.chat.answerer import converse, load_answerer, typed

    if video and image:
        raise DitLoraError("give --video or --image, one of them")
    file = video or image
    if file and not file.is_file():
        raise DitLoraError(f"no file {file}")
    answerer = load_answerer(target, model, frames=frames)
    media = MediaFile(file) if file else None
    asked = prompt or typed()
    for answer in converse(answerer, media, asked, instruction=instruction, max_tokens=max_tokens):
        echo(answer)


def evaluate(
    context: typer.Context,
    target: Target,
    data: Annotated[
        Path, typer.Option(help="MVBench's folder, or a .json or .jsonl file of questions.")
    ],
    media: Annotated[
        Path | None, typer.Option(help="The videos' folder, where it is not beside the questions.")
    ] = None,
    model: Base = None,
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
    if as_json:
        print_json(context, done.results)
        return
    for line in told(done.results):
        echo(line)
    echo(page)


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    for verb in (show, chat, evaluate):
        app.command()(verb)
