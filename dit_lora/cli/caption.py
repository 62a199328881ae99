"""The verb `dit-lora caption`: captions of clips and pictures by a chat model, and a page to edit them on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dit_lora.cli.arguments import BaseModel, Port, complete_recipe_files, require_studio
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.terminal import echo

if TYPE_CHECKING:
    from dit_lora.commands.caption import CaptionRequest

EXAMPLES = {
    "caption": (
        "caption clips --model Qwen/Qwen2.5-VL-7B-Instruct --trigger sks",
        "caption clips --serve",
        "caption clips --list --only finding=caption_missing",
        "caption clips --replace 'a dog' 'a cat'",
        "caption clips --undo",
    )
}


def caption(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with clips and pictures.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="Chat model that writes the captions: a checkpoint, a Hub id, or the folder of a run or an adapter. "
            "Without it, only the page is written."
        ),
    ] = None,
    base: BaseModel = None,
    prompt: Annotated[
        str | None, typer.Option(help="Question to the model. Default: it asks for a description in one paragraph.")
    ] = None,
    trigger: Annotated[
        str | None, typer.Option(help="Trigger word, put in front of each caption that does not contain it.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Recipe (.yaml) whose text encoder limits the length of the captions.",
            autocompletion=complete_recipe_files,
        ),
    ] = None,
    frames: Annotated[
        int | None, typer.Option(min=1, help="Frames of each clip that the model sees. Default: the model's own.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    html: Annotated[Path | None, typer.Option(help="Page to write. Default: DIR/captions.html.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Files that --list, --replace and --add-trigger are about: finding=CODE or finding=any, "
            "shape=portrait, length='2 to 5 s', text=WORD. Several must all hold. Shape and length need an audit: "
            "dit-lora audit DIR --json DIR/.captions/audit.json."
        ),
    ] = None,
    list_files: Annotated[
        bool, typer.Option("--list", help="Print each file with its tokens or words, findings and caption.")
    ] = False,
    replace: Annotated[
        tuple[str, str] | None, typer.Option(metavar="OLD NEW", help="Replace a text in the captions.")
    ] = None,
    add_trigger: Annotated[
        bool, typer.Option("--add-trigger", help="Put --trigger in front of the captions that do not contain it.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Take back the last write to the captions, byte for byte.")
    ] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Edit the captions in the browser of this machine.")] = False,
    port: Port = None,
) -> None:
    """Write captions for clips and pictures that have none, and a page with all captions.

    The captions are written to DIR/metadata.jsonl.
    """
    if port is not None and not serve:
        raise DitLoraError(f"--port {port} needs --serve")
    if model is None and (base, prompt, frames) != (None, None, None):
        raise DitLoraError("--base, --prompt and --frames need --model: without it, only the page is written")
    if add_trigger and trigger is None:
        raise DitLoraError("--add-trigger needs --trigger")
    if undo or list_files or replace or add_trigger:
        change = (*(replace or ("", "")), trigger or "" if add_trigger else "")
        _edit_captions(folder, recipe, trigger, only or [], change=change, lists=list_files, undoes=undo)
        return
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


def _edit_captions(
    folder: Path,
    recipe: str | None,
    trigger: str | None,
    only: list[str],
    *,
    change: tuple[str, str, str],
    lists: bool,
    undoes: bool,
) -> None:
    """Undo the last write, or change the captions of some files, then list them, as far as each is asked for.

    `change` is the text to replace, its replacement, and the trigger word to add.
    """
    from dit_lora.data.audit.stored_audit import SampleFilter
    from dit_lora.data.sources.caption_changes import CaptionChange
    from dit_lora.report.captions.edits import CaptionEdits
    from dit_lora.report.captions.rules import load_text_rules

    edits, sample_filter = CaptionEdits(folder, load_text_rules(recipe, trigger)), SampleFilter.from_texts(only)
    if undoes:
        echo(f"took back a write of {edits.undo().num_captions:,} captions to {folder}")
    if any(change):
        preview = edits.apply(CaptionChange(*change), sample_filter)
        echo(f"changed {len(preview.captions):,} captions; dit-lora caption {folder} --undo takes that back")
    if lists:
        for line in edits.list_caption_lines(sample_filter):
            echo(line)


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
    from dit_lora.data.sources.caption_table import CaptionTable
    from dit_lora.report.captions.page import write_captions_page
    from dit_lora.report.captions.rules import load_text_rules

    # The page then marks captions that the text encoder would cut off.
    rules = load_text_rules(recipe, trigger)
    if port is not None:
        require_studio()
        from dit_lora.studio.app import serve_captions

        serve_captions(folder, rules, port, echo)
    else:
        echo(write_captions_page(html or folder / "captions.html", CaptionTable.read(folder), rules))
