"""Writes captions of clips and pictures by a chat model: into the folder's metadata.jsonl, where it has none yet."""

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
"""Words of English that a token stands for, on the safe side: how long a caption the model is asked for."""
_SENTENCE = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s+")


@dataclass(frozen=True)
class CaptionRequest:
    """The files to describe, the model that does it, and how."""

    folder: Path
    model: Path
    base: str | None = None
    """The base checkpoint of an adapter; by default the one that it names."""
    prompt: str | None = None
    """Asked in place of `PICTURE` and `CLIP`."""
    trigger: str | None = None
    """A word that each caption is to have: put before it, where the model did not say it."""
    recipe: str | None = None
    """A recipe whose text encoder must be able to read all of a caption."""
    max_tokens: int = 256
    frames: int | None = None


@dataclass
class Captioned:
    """The outcome for a folder's files."""

    written: int = 0
    earlier: int = 0
    """Captions that an earlier start had made, and could not write any more."""
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by file, of those without a caption still."""
    cut: list[str] = field(default_factory=list)
    """Files whose captions were cut to what the recipe's text encoder reads."""
    is_told_here: bool = True
    """True on the one process that tells of it."""

    def lines(self, table: CaptionTable) -> list[str]:
        """Return what was done, and everything that was not, for a terminal."""
        lines = [f"could not be described: {name}: {why}" for name, why in self.failed.items()]
        if self.cut:
            lines.append(
                f"{len(self.cut)} captions were cut at the end of a sentence to what the recipe's text encoder reads: "
                f"{', '.join(self.cut[:5])}{' and others' if len(self.cut) > 5 else ''}"
            )
        left = len(table.missing)
        done = f"{self.written:,} captions written to {table.root / TABLE}"
        done += f", and {self.earlier:,} of an earlier start" if self.earlier else ""
        return [*lines, f"{done}; {left:,} of {len(table.media):,} files have none"]


def limit_of(recipe: str | None) -> TextLimit | None:
    """Return what the recipe's text encoder reads; None without a recipe. Raises `DitLoraError` for one without captions."""
    if recipe is None:
        return None
    loaded = load_recipe(recipe)
    if loaded.model.family in CHAT_FAMILIES:
        raise DitLoraError(f"{recipe} trains a chat model, which reads conversations, not captions")
    limit: TextLimit | None = get_family(loaded.model.family).open(loaded.model).text_limit()
    if limit is None:
        raise DitLoraError(f"{recipe} trains on classes, not on captions")
    return limit


def caption_folder(request: CaptionRequest) -> Captioned:
    """Describe every file of the folder that has no caption; return what was done.

    On several processes (`accelerate launch`) each describes its share. Interrupted or killed, what was made is kept, and
    the same command goes on. Raises `DitLoraError` for a folder or a model that cannot be used.
    """
    limit = limit_of(request.recipe)
    state = PartialState(cpu=not torch.cuda.is_available())
    made, main = MadeCaptions(request.folder, state.process_index), state.is_main_process
    with ExitStack() as stack:
        if main:
            CaptionTable.read(request.folder)  # refuses a folder before anything is written there
            stack.enter_context(made.held())
            earlier = made.merge(of_all=True)  # of processes that were killed
        state.wait_for_everyone()
        names = CaptionTable.read(request.folder).missing
        done = Captioned(earlier=earlier if main else 0, is_told_here=main)
        if not names:
            return done
        if main:
            # Where this ends early, another process may be writing its own still: those are taken at the next start.
            stack.callback(made.merge, of_all=False)
        _describe(request, names[state.process_index :: state.num_processes], made, limit, done)
        every: list[Captioned] = gather_object([done])
        if main:
            made.merge(of_all=True)
        state.wait_for_everyone()
    for one in every[1:] if main else ():
        done.written += one.written
        done.failed |= one.failed
        done.cut += one.cut
    return done


def _describe(
    request: CaptionRequest,
    names: list[str],
    made: MadeCaptions,
    limit: TextLimit | None,
    done: Captioned,
) -> None:
    answerer = load_answerer(request.model, request.base, frames=request.frames)
    with finite_answers(answerer.model):
        for name in tqdm(names, desc="captions", unit="file", disable=not done.is_told_here):
            try:
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
    """Return the model's caption of a file, with the trigger. Raises `ClipError`, and `CheckFailedError` for no caption."""
    media = MediaFile(file)
    question = request.prompt or (PICTURE if is_image(media) else CLIP)
    if limit is not None and request.prompt is None:
        question += f" Use at most {int(limit.max_tokens * _WORDS_A_TOKEN)} words."
    said = " ".join(answerer.ask(media, question, max_tokens=request.max_tokens).split())
    fault = caption_fault(said)
    if fault is not None:
        raise CheckFailedError(f"the model's answer is no caption: {fault[1]}")
    return with_trigger(said, request.trigger)


def with_trigger(caption: str, trigger: str | None) -> str:
    """Return a caption that has the trigger, before it where it was not in it as a word."""
    if not trigger or has_word(caption, trigger):
        return caption
    return f"{trigger}, {caption}"


def fitted(caption: str, limit: TextLimit | None) -> tuple[str, bool]:
    """Return what of a caption a text encoder reads whole, and whether that is less than all.

    Whole sentences are kept, or whole words where the first sentence is too long already.
    """
    if limit is None or _length(caption, limit) <= limit.max_tokens:
        return caption, False
    for parts in (_SENTENCE.split(caption), caption.split(" ")):
        kept = _most(parts, limit)
        if kept:
            return kept, True
    return "", True


def _most(parts: list[str], limit: TextLimit) -> str:
    """Return as many parts from the first on as the encoder reads; nothing where that is none."""
    low, high = 0, len(parts)
    while low < high:
        middle = (low + high + 1) // 2
        fits = _length(" ".join(parts[:middle]), limit) <= limit.max_tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return " ".join(parts[:low])


def _length(text: str, limit: TextLimit) -> int:
    """Return the number of tokens, the tokenizer's own special ones counted."""
    ids = limit.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return len(ids) + int(limit.tokenizer.num_special_tokens_to_add())


@contextmanager
def finite_answers(model: Any) -> Iterator[None]:
    """Raise `CheckFailedError` within where the output head gives a value that is not finite: its largest is no word."""

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
