"""Writes captions of clips and images with a chat model, for files that have none in the folder's metadata.jsonl."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn
from tqdm import tqdm

from dit_lora.config.load import load_recipe
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import ClipError
from dit_lora.data.sources.caption_table import TABLE, CaptionTable
from dit_lora.data.sources.caption_text import caption_fault, has_word
from dit_lora.data.sources.made_captions import MadeCaptions
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.base import TextLimit
from dit_lora.training.tasks.chat.answerer import Answerer, load_answerer

PICTURE = (
    "Describe this picture in one paragraph, as a caption: what is shown and what it looks like, its style, light and "
    "framing. Say only what can be seen."
)
CLIP = (
    "Describe this video in one paragraph, as a caption: what is shown, what moves and how, what the camera does, the "
    "style and the light. Say only what can be seen."
)
_WORDS_A_TOKEN = 0.6
"""English words per token, a safe estimate: sets the length of caption that the prompt asks for."""
_SENTENCE = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s+")


@dataclass(frozen=True)
class CaptionRequest:
    """The files to describe, the chat model, and how to ask it."""

    folder: Path
    model: Path
    base: str | None = None
    """The base checkpoint of an adapter; by default the one recorded in it."""
    prompt: str | None = None
    """Replaces `PICTURE` and `CLIP`."""
    trigger: str | None = None
    """A word that each caption must contain. It is put in front if the model did not use it."""
    recipe: str | None = None
    """A recipe whose text encoder must be able to read the whole caption."""
    max_tokens: int = 256
    frames: int | None = None


@dataclass
class Captioned:
    """The result for a folder's files."""

    written: int = 0
    earlier: int = 0
    """Captions that an interrupted earlier run had made and not yet written to the table."""
    failed: dict[str, str] = field(default_factory=dict)
    """File to the reason why it still has no caption."""
    cut: list[str] = field(default_factory=list)
    """Files whose captions were shortened to the limit of the recipe's text encoder."""
    is_told_here: bool = True
    """True on the main process, which reports the result."""

    def lines(self, table: CaptionTable) -> list[str]:
        """Text for a terminal: failures, shortened captions, and counts."""
        # Failures first, because they need an action.
        lines = [
            f"could not be described: {name}: {reason}" for name, reason in self.failed.items()
        ]
        if self.cut:
            lines.append(
                f"{len(self.cut)} captions were cut at the end of a sentence to what the recipe's text encoder reads: "
                f"{', '.join(self.cut[:5])}{' and others' if len(self.cut) > 5 else ''}"
            )
        num_missing = len(table.missing)
        message = f"{self.written:,} captions written to {table.root / TABLE}"
        message += f", and {self.earlier:,} of an earlier start" if self.earlier else ""
        return [*lines, f"{message}; {num_missing:,} of {len(table.media):,} files have none"]


def limit_of(recipe: str | None) -> TextLimit | None:
    """The token limit of the recipe's text encoder; None without a recipe.

    Raises:
        DitLoraError: The recipe trains without captions.
    """
    if recipe is None:
        return None
    # Only its model and text encoder matter here.
    loaded = load_recipe(recipe)
    if loaded.model.family in CHAT_FAMILIES:
        raise DitLoraError(f"{recipe} trains a chat model, which reads conversations, not captions")
    limit: TextLimit | None = get_family(loaded.model.family).open(loaded.model).text_limit()
    if limit is None:
        raise DitLoraError(f"{recipe} trains on classes, not on captions")
    return limit


def caption_folder(request: CaptionRequest) -> Captioned:
    """Describe every file of the folder that has no caption.

    On several processes (`accelerate launch`) each describes its share. After an interruption, finished captions are
    kept and the same command continues.

    Raises:
        DitLoraError: The folder or the model cannot be used.
    """
    # Before the model is loaded: a wrong recipe is reported at once.
    limit = limit_of(request.recipe)
    # One process without `accelerate launch`; otherwise it joins the process group.
    state = PartialState(cpu=not torch.cuda.is_available())
    store, main = MadeCaptions(request.folder, state.process_index), state.is_main_process
    with ExitStack() as stack:
        if main:
            # Raises for a bad folder before anything is written there.
            CaptionTable.read(request.folder)
            # A second command in the same folder would describe the same files again.
            stack.enter_context(store.held())
            # Captions of processes that were killed.
            earlier = store.merge(of_all=True)
        # The others read the table after earlier captions are merged into it.
        state.wait_for_everyone()
        names = CaptionTable.read(request.folder).missing
        local_result = Captioned(earlier=earlier if main else 0, is_told_here=main)
        if not names:
            return local_result
        if main:
            # If this process ends early, others may still be writing: their captions are merged at the next start.
            stack.callback(store.merge, of_all=False)
        # Every process takes each n-th file.
        _describe(
            request, names[state.process_index :: state.num_processes], store, limit, local_result
        )
        # Waits for all processes. The first result is the main process's own.
        results: list[Captioned] = gather_object([local_result])
        if main:
            store.merge(of_all=True)
        state.wait_for_everyone()
    # Only the main process reports, so it adds up the counts.
    for result in results[1:] if main else ():
        local_result.written += result.written
        local_result.failed |= result.failed
        local_result.cut += result.cut
    return local_result


def _describe(
    request: CaptionRequest,
    names: list[str],
    made: MadeCaptions,
    limit: TextLimit | None,
    done: Captioned,
) -> None:
    """Describe these files and store the captions in `made`, and counts and failures in `done`."""
    answerer = load_answerer(request.model, request.base, frames=request.frames)
    with finite_answers(answerer.model):
        for name in tqdm(names, desc="captions", unit="file", disable=not done.is_told_here):
            try:
                # A file that cannot be described does not stop the others.
                caption = describe(answerer, request.folder / name, request, limit)
            except (ClipError, CheckFailedError) as error:
                done.failed[name] = str(error).removeprefix(f"{name}: ")
                continue
            text, is_cut = fitted(caption, limit)
            made.add(name, text)
            done.written += 1
            done.cut += [name] if is_cut else []


def describe(
    answerer: Answerer, file: Path, request: CaptionRequest, limit: TextLimit | None
) -> str:
    """Ask the model for a caption of a file, and add the trigger.

    Raises:
        ClipError: The file cannot be decoded.
        CheckFailedError: The answer cannot be used as a caption.
    """
    media = MediaFile(file)
    # The user's prompt is used unchanged, without a length.
    question = request.prompt or (PICTURE if is_image(media) else CLIP)
    if limit is not None and request.prompt is None:
        question += f" Use at most {int(limit.max_tokens * _WORDS_A_TOKEN)} words."
    # One line: a caption is a cell of a table.
    answer = " ".join(answerer.ask(media, question, max_tokens=request.max_tokens).split())
    fault = caption_fault(answer)
    if fault is not None:
        raise CheckFailedError(f"the model's answer is no caption: {fault[1]}")
    return with_trigger(answer, request.trigger)


def with_trigger(caption: str, trigger: str | None) -> str:
    """Put the trigger in front of a caption that does not contain it as a word."""
    if not trigger or has_word(caption, trigger):
        return caption
    return f"{trigger}, {caption}"


def fitted(caption: str, limit: TextLimit | None) -> tuple[str, bool]:
    """Shorten a caption to the text encoder's limit. Also returns whether it was shortened.

    Whole sentences are kept, or whole words if the first sentence is too long.
    """
    if limit is None or _length(caption, limit) <= limit.max_tokens:
        return caption, False
    # Cut after a sentence if possible, otherwise after a word.
    for parts in (_SENTENCE.split(caption), caption.split(" ")):
        shortened = _most(parts, limit)
        if shortened:
            return shortened, True
    return "", True


def _most(parts: list[str], limit: TextLimit) -> str:
    """The longest prefix of `parts`, joined by spaces, that the encoder can read; may be empty."""
    # Binary search: the number of tokens grows with the number of parts.
    low, high = 0, len(parts)
    while low < high:
        middle = (low + high + 1) // 2
        fits = _length(" ".join(parts[:middle]), limit) <= limit.max_tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return " ".join(parts[:low])


def _length(text: str, limit: TextLimit) -> int:
    """Number of tokens, including the tokenizer's special tokens."""
    # `verbose=False`: no warning about texts longer than the model's limit, which are expected here.
    ids = limit.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return len(ids) + int(limit.tokenizer.num_special_tokens_to_add())


@contextmanager
def finite_answers(model: Any) -> Iterator[None]:
    """Context that raises `CheckFailedError` if the output head computes NaN or Inf: no token can be chosen."""

    def check(_module: nn.Module, _given: Any, logits: torch.Tensor) -> None:
        if not torch.isfinite(logits).all():
            raise CheckFailedError(
                "the model's output is not finite; another --model, or another dtype"
            )

    handle = model.get_output_embeddings().register_forward_hook(check)
    try:
        yield
    finally:
        handle.remove()
