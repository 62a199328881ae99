"""The verb `dit-lora chat`: questions to a chat model."""

from pathlib import Path
from typing import Annotated

import typer

from dit_lora.cli.arguments import BaseModel, ChatModel
from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo

EXAMPLES = {"chat": ("chat runs/my-chat --video clip.mp4 --prompt 'What moves?'",)}


def chat(
    target: ChatModel,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Question. Repeat it for the turns of one conversation.")
    ] = None,
    video: Annotated[Path | None, typer.Option(help="Video that the question is about.")] = None,
    image: Annotated[Path | None, typer.Option(help="Image that the question is about.")] = None,
    model: BaseModel = None,
    frames: Annotated[
        int | None, typer.Option(min=1, help="Frames of the video that the model sees. Default: as in training.")
    ] = None,
    instruction: Annotated[
        str, typer.Option(help="VideoChat2 only: text that the Q-Former reads together with the frames.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
) -> None:
    """Ask a chat model questions, about a video, an image or neither.

    Without --prompt, questions are read line by line until Ctrl-D.
    """
    from dit_lora.data.media.media import MediaFile
    from dit_lora.training.tasks.chat.answerer import answer_prompts, load_answerer, read_prompts

    if video and image:
        raise DitLoraError("got both --video and --image; give one of them")
    # At most one of them is given.
    file = video or image
    if file and not file.is_file():
        raise DitLoraError(f"{file} does not exist, or is not a file")
    answerer = load_answerer(target, model, frames=frames)
    media = MediaFile(file) if file else None
    # Without --prompt, lines from standard input.
    questions = prompt or read_prompts()
    for answer in answer_prompts(answerer, media, questions, instruction=instruction, max_tokens=max_tokens):
        echo(answer)
