"""The verb `dit-lora caption`: captions of clips and pictures by a chat model, and a page to edit them on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dit_lora.cli.arguments import BaseModel, Port, complete_recipe_files
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.terminal import echo

if TYPE_CHECKING:
    from dit_lora.commands.caption import CaptionRequest

EXAMPLES = {"caption": ("caption clips --model Qwen/Qwen2.5-VL-7B-Instruct --trigger sks", "caption clips --serve")}


def caption(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Clips and pictures.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="A chat model: a checkpoint, its Hub id, a run's folder or an adapter's; without, the page alone."
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
            autocompletion=complete_recipe_files,
        ),
    ] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="By default the model's own.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 256,
    html: Annotated[Path | None, typer.Option(help="The page; by default DIR/captions.html.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Then edit them in this machine's browser.")] = False,
    port: Port = None,
) -> None:
    """Describe every clip and picture without a caption, into DIR/metadata.jsonl, and show all on a page."""
    if port is not None and not serve:
        raise DitLoraError(f"--port {port} is for --serve")
    from dit_lora.commands.caption import CaptionRequest

    # None on processes that report nothing.
    failed: bool | None = False
    if model is not None:
        request = CaptionRequest(folder, model, base, prompt, trigger, recipe, max_tokens, frames)
        if (failed := _write_captions(request)) is None:
            return
    # Port 0 lets the system choose a free one.
    _write_or_serve_page(folder, recipe, trigger, html, port or 0 if serve else None)
    if failed:
        raise typer.Exit(CheckFailedError.exit_code)


def _write_captions(request: "CaptionRequest") -> bool | None:
    """Write the captions and print the result.

    Returns:
        True if a file could not be described; None on processes other than the main one, which print nothing.
    """
    from dit_lora.commands.caption import caption_folder
    from dit_lora.data.sources.caption_table import CaptionTable

    result = caption_folder(request)
    if not result.should_report:
        return None
    for line in result.lines(CaptionTable.read(request.folder)):
        echo(line)
    return bool(result.failures)


def _write_or_serve_page(
    folder: Path, recipe: str | None, trigger: str | None, html: Path | None, port: int | None
) -> None:
    from dit_lora.commands.caption import load_text_limit
    from dit_lora.data.sources.caption_table import CaptionTable
    from dit_lora.report.captions.page import TextRules, write_captions_page
    from dit_lora.report.captions.serve import serve_captions

    limit, table = load_text_limit(recipe), CaptionTable.read(folder)
    rules = TextRules(trigger=trigger)
    # The page then marks captions that the text encoder would cut off.
    if limit is not None:
        rules = TextRules(limit.tokenizer, limit.max_tokens, trigger)
    if port is not None:
        serve_captions(folder, rules, port, echo)
    else:
        echo(write_captions_page(html or folder / "captions.html", table, rules))
