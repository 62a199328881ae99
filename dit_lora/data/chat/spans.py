"""Text in spans, tokenised as a whole, so that a boundary never changes a token."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from dit_lora.data.chat.rendered import Part, Piece
from dit_lora.errors import DitLoraError


class Span(NamedTuple):
    """Characters in a row that are treated alike."""

    text: str
    part: Part


def tokenized(
    tokenizer: PreTrainedTokenizerBase, spans: Sequence[Span], *, add_special_tokens: bool = False
) -> list[Piece]:
    """Return the tokens of the joined text, each with the span of its last character, an answer's end included.

    They are those of the whole text at once, as inference has them: a model never meets a text that was cut
    where an answer happened to begin. Raises `DitLoraError` if one token holds the end of a prompt and the
    beginning of its answer, which no prompt could end with, and if the tokenizer cannot tell where its
    tokens are.
    """
    if not tokenizer.is_fast:
        raise DitLoraError(
            f"{type(tokenizer).__name__} cannot tell which characters its tokens are; chat training needs a "
            "checkpoint with a tokenizer.json"
        )
    spans = [span for span in spans if span.text]
    ends = list(accumulate(len(span.text) for span in spans))
    text = "".join(span.text for span in spans)
    encoded = tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        # The tokenizer's warning would be about its own limit; chat.max_tokens decides.
        verbose=False,
    )
    owners = [_owner(spans, ends, start, stop) for start, stop in encoded["offset_mapping"]]
    tokens = zip(owners, encoded["input_ids"], strict=True)
    # Questions and answers are pieces of their own; what stands between them is joined to one piece.
    return [
        Piece(tuple(token for _, token in group), part)
        for (part, _), group in groupby(tokens, key=lambda pair: _piece_key(spans, pair[0]))
    ]


def _piece_key(spans: Sequence[Span], owner: int) -> tuple[Part, int]:
    part = spans[owner].part
    return (part, owner) if part in ("question", "answer") else (part, -1)


def _owner(spans: Sequence[Span], ends: Sequence[int], start: int, stop: int) -> int:
    """Return the index of the span that a token with these characters belongs to.

    Byte-level tokenizers may trim white space from what they report: a token without characters belongs to
    those before it.
    """
    last = bisect_right(ends, max(stop - 1, 0))
    first = min(bisect_right(ends, start), last)
    parts = [span.part for span in spans[first : last + 1]]
    if parts[-1] == "answer" and parts[0] != "answer":
        raise DitLoraError(
            f"one token holds the end of a prompt and the beginning of the answer {spans[last].text[:40]!r}, so no "
            "prompt could lead to it; let the answer begin with a letter or digit"
        )
    return first if parts[0] == "answer" else last
