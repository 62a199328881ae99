"""Writes captions of clips and images with a chat model, for files that have none in the folder's metadata.jsonl."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn

from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import ClipError
from dit_lora.data.sources.caption_changes import add_trigger
from dit_lora.data.sources.caption_table import TABLE_NAME, CaptionTable
from dit_lora.data.sources.caption_text import find_caption_fault
from dit_lora.data.sources.made_captions import GeneratedCaptions
from dit_lora.environment.progress_bar import ProgressBar
from dit_lora.errors import CheckFailedError
from dit_lora.families.base import TextLimit
from dit_lora.numerics.ranks import gather_object
from dit_lora.report.captions.rules import load_text_limit
from dit_lora.training.tasks.chat.answerer import ChatAnswerGenerator, find_origin, load_answerer

PICTURE_PROMPT = (
    "Describe this picture in one paragraph, as a caption: what is shown and what it looks like, its style, light and "
    "framing. Say only what can be seen."
)
CLIP_PROMPT = (
    "Describe this video in one paragraph, as a caption: what is shown, what moves and how, what the camera does, the "
    "style and the light. Say only what can be seen."
)
_WORDS_PER_TOKEN = 0.6
"""English words per token, a safe estimate: sets the length of caption that the prompt asks for."""
_SENTENCE_END = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s+")


@dataclass(frozen=True)
class CaptionRequest:
    """Request for captions: the files to describe, the chat model, and how to ask it."""

    folder: Path
    model: Path
    base: str | None = None
    """The base checkpoint of an adapter; by default the one recorded in it."""
    prompt: str | None = None
    """Replaces `PICTURE_PROMPT` and `CLIP_PROMPT`."""
    trigger: str | None = None
    """A word that each caption must contain. It is put in front if the model did not use it."""
    recipe: str | None = None
    """A recipe whose text encoder must be able to read the whole caption."""
    max_tokens: int = 256
    frames: int | None = None


@dataclass
class CaptionResult:
    """Result of captioning a folder's files: counts, failures and shortened captions."""

    num_written: int = 0
    num_recovered: int = 0
    """Captions that an interrupted earlier run had made and not yet written to the table."""
    failures: dict[str, str] = field(default_factory=dict)
    """File to the reason why it still has no caption."""
    shortened_files: list[str] = field(default_factory=list)
    """Files whose captions were shortened to the limit of the recipe's text encoder."""
    should_report: bool = True
    """True on the main process, which reports the result."""

    def lines(self, table: CaptionTable) -> list[str]:
        """Result of captioning as text for a terminal: failures, shortened captions, and counts."""
        # Failures first, because they need an action.
        lines = [f"no caption for {name}: {reason}" for name, reason in self.failures.items()]
        if self.shortened_files:
            lines.append(
                f"{len(self.shortened_files)} captions were cut after a sentence, because the recipe's text "
                "encoder reads no more: "
                f"{', '.join(self.shortened_files[:5])}{' and others' if len(self.shortened_files) > 5 else ''}"
            )
        num_missing = len(table.uncaptioned_files)
        message = f"wrote {self.num_written:,} captions to {table.root / TABLE_NAME}"
        message += f", {self.num_recovered:,} of them from an earlier start" if self.num_recovered else ""
        return [*lines, f"{message}; {num_missing:,} of {len(table.media):,} files still have no caption"]


def caption_folder(request: CaptionRequest) -> CaptionResult:
    """Describe every file of the folder that has no caption.

    On several processes (`accelerate launch`) each describes its share. After an interruption, finished captions are
    kept and the same command continues.

    Raises:
        DitLoraError: The folder or the model cannot be used.
    """
    # Before the model is loaded: a wrong recipe is reported at once.
    limit = load_text_limit(request.recipe)
    # One process without `accelerate launch`; otherwise it joins the process group.
    state = PartialState(cpu=not torch.cuda.is_available())
    store, main = GeneratedCaptions(request.folder, state.process_index), state.is_main_process
    with ExitStack() as stack:
        if main:
            # Raises for a bad folder before anything is written there.
            CaptionTable.read(request.folder)
            # A second command in the same folder would describe the same files again.
            stack.enter_context(store.lock_folder())
            # Captions of processes that were killed.
            earlier = store.merge_into_table(include_all=True)
        # The others read the table after earlier captions are merged into it.
        state.wait_for_everyone()
        names = CaptionTable.read(request.folder).uncaptioned_files
        local_result = CaptionResult(num_recovered=earlier if main else 0, should_report=main)
        if not names:
            # A wrong model is an error also where no file needs a caption.
            find_origin(request.model, request.base)
            return local_result
        if main:
            # If this process ends early, others may still be writing: their captions are merged at the next start.
            stack.callback(store.merge_into_table, include_all=False)
        # Every process takes each n-th file.
        _describe_files(request, names[state.process_index :: state.num_processes], store, limit, local_result)
        # Waits for all processes. The first result is the main process's own.
        results: list[CaptionResult] = gather_object([local_result])
        if main:
            store.merge_into_table(include_all=True)
        state.wait_for_everyone()
    # Only the main process reports, so it adds up the counts.
    for result in results[1:] if main else ():
        local_result.num_written += result.num_written
        local_result.failures |= result.failures
        local_result.shortened_files += result.shortened_files
    return local_result


def _describe_files(
    request: CaptionRequest, names: list[str], store: GeneratedCaptions, limit: TextLimit | None, result: CaptionResult
) -> None:
    """Describe these files and store the captions in `store`, and counts and failures in `result`."""
    answerer = load_answerer(request.model, request.base, frames=request.frames)
    with require_finite_logits(answerer.model):
        for name in ProgressBar(names, desc="captions", unit="file", disable=not result.should_report):
            try:
                # A file that cannot be described does not stop the others.
                caption = generate_file_caption(answerer, request.folder / name, request, limit)
            except (ClipError, CheckFailedError) as error:
                result.failures[name] = str(error).removeprefix(f"{name}: ")
                continue
            text, is_cut = shorten_caption(caption, limit)
            store.add(name, text)
            result.num_written += 1
            result.shortened_files += [name] if is_cut else []


def generate_file_caption(
    answerer: ChatAnswerGenerator, file: Path, request: CaptionRequest, limit: TextLimit | None
) -> str:
    """Ask the model for a caption of a file, and add the trigger.

    Raises:
        ClipError: The file cannot be decoded.
        CheckFailedError: The answer cannot be used as a caption.
    """
    media = MediaFile(file)
    # The user's prompt is used unchanged, without a length.
    question = request.prompt or (PICTURE_PROMPT if is_image(media) else CLIP_PROMPT)
    if limit is not None and request.prompt is None:
        question += f" Use at most {int(limit.max_tokens * _WORDS_PER_TOKEN)} words."
    # One line: a caption is a cell of a table.
    answer = " ".join(answerer.answer_question(media, question, max_tokens=request.max_tokens).split())
    fault = find_caption_fault(answer)
    if fault is not None:
        raise CheckFailedError(f"cannot use the model's answer as a caption: {fault[1]}")
    return add_trigger(answer, request.trigger)


def shorten_caption(caption: str, limit: TextLimit | None) -> tuple[str, bool]:
    """Shorten a caption to the text encoder's limit. Also returns whether it was shortened.

    Whole sentences are kept, or whole words if the first sentence is too long.
    """
    if limit is None or _count_tokens(caption, limit) <= limit.max_tokens:
        return caption, False
    # Cut after a sentence if possible, otherwise after a word.
    for parts in (_SENTENCE_END.split(caption), caption.split(" ")):
        shortened = _find_longest_prefix(parts, limit)
        if shortened:
            return shortened, True
    return "", True


def _find_longest_prefix(parts: list[str], limit: TextLimit) -> str:
    """The longest prefix of `parts`, joined by spaces, that the encoder can read; may be empty."""
    # Binary search: the number of tokens grows with the number of parts.
    low, high = 0, len(parts)
    while low < high:
        middle = (low + high + 1) // 2
        fits = _count_tokens(" ".join(parts[:middle]), limit) <= limit.max_tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return " ".join(parts[:low])


def _count_tokens(text: str, limit: TextLimit) -> int:
    """Number of tokens of a caption, including the tokenizer's special tokens."""
    # `verbose=False`: no warning about texts longer than the model's limit, which are expected here.
    ids = limit.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return len(ids) + int(limit.tokenizer.num_special_tokens_to_add())


@contextmanager
def require_finite_logits(model: Any) -> Iterator[None]:
    """Context that raises `CheckFailedError` if the output head computes NaN or Inf: no token can be chosen."""

    def check_logits_finite(_module: nn.Module, _inputs: Any, logits: torch.Tensor) -> None:
        if not torch.isfinite(logits).all():
            raise CheckFailedError("the model's output is not finite; try another --model")

    handle = model.get_output_embeddings().register_forward_hook(check_logits_finite)
    try:
        yield
    finally:
        handle.remove()
