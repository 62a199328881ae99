"""The verb `dit-lora caption`: captions of clips and pictures by a chat model, and a page to edit them on."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import BaseModel, recipe_files
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.terminal import echo

EXAMPLES = {
    "caption": (
        "caption clips --model Qwen/Qwen2.5-VL-7B-Instruct --trigger sks",
        "caption clips --serve",
    )
}


def caption(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Clips and pictures.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="A chat model: a checkpoint, its Hub id, a run's folder or an adapter's."
        ),
    ] = None,
    base: BaseModel = None,
    prompt: Annotated[
        str | None, typer.Option(help="What to ask; by default for a description in a paragraph.")
    ] = None,
    trigger: Annotated[
        str | None, typer.Option(help="A word that each caption begins with, if it is not in it.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A recipe (.yaml): no caption longer than its text encoder reads.",
            autocompletion=recipe_files,
        ),
    ] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="By default the model's own.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 256,
    html: Annotated[
        Path | None, typer.Option(help="The page; by default DIR/captions.html.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Then edit them in this machine's browser.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Of --serve; by default a free one.", show_default=False
        ),
    ] = None,
) -> None:
    """Describe every clip and picture without a caption, into DIR/metadata.jsonl; a killed run goes on."""
    if port is not None and not serve:
        raise DitLoraError(f"--port {port} is for --serve")
    if model is None and not serve:
        raise DitLoraError(
            "give --model, such as Qwen/Qwen2.5-VL-7B-Instruct; or --serve to edit what is there"
        )
    from dit_lora.commands.caption import CaptionRequest, caption_folder, limit_of, thumbnail
    from dit_lora.data.sources.caption_table import CaptionTable
    from dit_lora.report.captions.page import TextRules, write_captions_page
    from dit_lora.report.captions.serve import serve as serve_captions

    failed = False
    if model is not None:
        request = CaptionRequest(folder, model, base, prompt, trigger, recipe, max_tokens, frames)
        done = caption_folder(request)
        if not done.is_told_here:
            return
        for line in done.lines(CaptionTable.read(folder)):
            echo(line)
        failed = bool(done.failed)
    limit = limit_of(recipe)
    rules = TextRules(trigger=trigger)
    if limit is not None:
        rules = TextRules(limit.tokenizer, limit.max_tokens, trigger)
    if serve:
        serve_captions(folder, rules, port or 0, echo)
    else:
        page = html or folder / "captions.html"
        echo(write_captions_page(page, CaptionTable.read(folder), rules, thumbnail))
    if failed:
        raise typer.Exit(CheckFailedError.exit_code)
