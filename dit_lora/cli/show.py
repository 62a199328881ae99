"""The verb `dit-lora show`: a training sample of a chat model, as the model gets it."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import Overrides, RecipeFile

EXAMPLES = {"show": ("show chat_qwen.yaml",)}


def show(
    recipe: RecipeFile,
    overrides: Overrides = None,
    sample: Annotated[str, typer.Option(help="Id of the sample, or its number from 0.")] = "0",
    draw: Annotated[
        int | None,
        typer.Option(min=0, help="Number of the random draw of frames, crop and order of turns, as in training."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the frames to this file.")] = None,
) -> None:
    """Show a training sample of a chat model: its tokens, and which of them are learned."""
    from rich.console import Console

    from dit_lora.commands.show import show_sample
    from dit_lora.report.chat_sample_page import write_chat_sample_page

    shown_sample = show_sample(recipe, overrides or [], sample, draw)
    Console().print(shown_sample.render_for_terminal())
    if html:
        conversation = shown_sample.entry.conversation
        write_chat_sample_page(
            html,
            shown_sample.entry.id,
            shown_sample.rendered,
            shown_sample.checkpoint.tokenizer,
            kind=conversation.kind,
            frames=shown_sample.pixels,
            seconds=shown_sample.seconds,
            instruction=conversation.turns[0].instruction,
        )
