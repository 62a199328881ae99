"""Tokenises text that consists of spans as a whole, so that a span boundary never changes a token."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from dit_lora.data.chat.rendered import Part, TokenPiece
from dit_lora.errors import DitLoraError


class TextSpan(NamedTuple):
    """Consecutive characters of a prompt that are of one kind, such as an answer."""

    text: str
    part: Part


def tokenize_spans(
    tokenizer: PreTrainedTokenizerBase, spans: Sequence[TextSpan], *, add_special_tokens: bool = False
) -> list[TokenPiece]:
    """Tokenize the joined text of the spans; returns tokens by span.

    A token belongs to the span of its last character. The tokens are those of the whole text, as at inference: a model
    never sees a text that was split where an answer happens to begin.

    Raises:
        DitLoraError: A token contains the end of a prompt and the beginning of its answer, so that no prompt could
            end before it; or the tokenizer cannot report the characters of its tokens.
    """
    if not tokenizer.is_fast:
        raise DitLoraError(
            f"{type(tokenizer).__name__} cannot tell which characters its tokens are; chat training needs a "
            "checkpoint with a tokenizer.json"
        )
    spans = [span for span in spans if span.text]
    # End of each span in the joined text, in characters.
    ends = list(accumulate(len(span.text) for span in spans))
    text = "".join(span.text for span in spans)
    encoded = tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        # Silence the warning about the tokenizer's own limit; chat.max_tokens is the limit here.
        verbose=False,
    )
    piece_keys: list[tuple[Part, int]] = []
    for start, stop in encoded["offset_mapping"]:
        owner = _find_token_span(spans, ends, start, stop)
        part = spans[owner].part
        # Each question and answer is a separate piece; -1 joins neighbouring spans of fixed text or media to one.
        piece_keys.append((part, owner if part in ("question", "answer") else -1))
    tokens = zip(piece_keys, encoded["input_ids"], strict=True)
    return [
        TokenPiece(tuple(token for _, token in group), part)
        for (part, _), group in groupby(tokens, key=lambda pair: pair[0])
    ]


def _find_token_span(spans: Sequence[TextSpan], ends: Sequence[int], start: int, stop: int) -> int:
    """Index of the span that a token with these characters belongs to."""
    # Byte-level tokenizers may omit white space: a token without characters belongs to those before it.
    # The span of the token's last character, and below that of its first.
    end_span = bisect_right(ends, max(stop - 1, 0))
    start_span = min(bisect_right(ends, start), end_span)
    parts = [span.part for span in spans[start_span : end_span + 1]]
    if parts[-1] == "answer" and parts[0] != "answer":
        raise DitLoraError(
            f"one token holds the end of a prompt and the beginning of the answer {spans[end_span].text[:40]!r}, "
            "so no prompt could lead to it; let the answer begin with a letter or digit"
        )
    return start_span if parts[0] == "answer" else end_span
