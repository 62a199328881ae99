"""Checks of captions: empty, longer than the text encoder reads, repeated, or holding what is no text."""

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dit_lora.data.audit.finding import Finding
from dit_lora.data.sources.caption_text import caption_fault, short
from dit_lora.data.sources.clips import Clip
from dit_lora.data.sources.folders import class_name

# Special tokens of T5, BERT, CLIP, Llama and Gemma, which captioning models leave behind.
WELL_KNOWN = re.compile(
    r"</?s>|<(?:pad|unk|bos|eos|mask|image|video)>|<extra_id_\d+>|<\|\w{2,40}\|>"
    r"|<(?:start|end)_of_turn>|\[(?:PAD|CLS|SEP|UNK|MASK|INST)\]|\[/INST\]"
)
# Control characters other than tab, new line and return, and U+FFFD, which stands for bytes that were no text.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")
LONGEST = 512
"""Number of tokens that the supported text encoder with the most room reads (FLUX.1's)."""
# Enough captions to keep a tokenizer's threads busy, and few enough that its output stays small.
_BATCH = 1000
_REMEDIES = {
    "caption_empty": "write a caption, or remove the clip",
    "caption_not_text": "write the caption anew as UTF-8",
    "caption_long": "shorten it, or remove the clip",
}
"""Remedies for captions that are rejected, by code."""


def check_captions(
    clips: Sequence[Clip],
    tokenizer: Any | None,
    max_tokens: int | None,
    *,
    lengths: Mapping[str, int] | None = None,
    shared: Collection[str] = (),
) -> dict[str, list[Finding]]:
    """Return every finding about the captions, by sample id; samples without a finding are absent.

    `max_tokens` is what the text encoder reads, its own special tokens counted. Without a tokenizer, words
    are counted, each of which is one token or more. `lengths` is the result of `token_lengths` where the
    caller has it. A caption of `shared`, and a class's name on the clips of its folder, may repeat.
    """
    reserved = _reserved_tokens(tokenizer)
    if lengths is None:
        lengths = token_lengths(clips, tokenizer)
    long = _cut_off(clips, lengths, tokenizer, max_tokens)
    repeated = _repeated(clips, shared)
    by_id: dict[str, list[Finding]] = {}
    for clip in clips:
        fault = caption_fault(clip.caption)
        if fault is not None:
            findings = [Finding(*fault, "reject", _REMEDIES[fault[0]])]
        else:
            findings = [*_text(clip.caption), *_holding(clip.caption, reserved)]
            findings += long.get(clip.caption, ())
            findings += repeated.get(clip.id, ())
        if findings:
            by_id[clip.id] = findings
    return by_id


def token_lengths(clips: Sequence[Clip], tokenizer: Any | None) -> dict[str, int]:
    """Return each caption's number of tokens, the tokenizer's own special ones counted; {} without a tokenizer."""
    if tokenizer is None:
        return {}
    added = tokenizer.num_special_tokens_to_add()
    # Captions that repeat are tokenised once.
    captions = list(dict.fromkeys(clip.caption for clip in clips))
    return {
        caption: len(ids) + added
        for caption, ids in zip(captions, _token_ids(captions, tokenizer), strict=True)
    }


def _token_ids(captions: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the token ids of each caption alone, without special tokens and never cut."""
    for start in range(0, len(captions), _BATCH):
        batch = captions[start : start + _BATCH]
        # A tokenizer takes no lone surrogate.
        texts = [text.encode("utf-8", "replace").decode() for text in batch]
        yield from tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]


def _cut_off(
    clips: Sequence[Clip],
    lengths: Mapping[str, int],
    tokenizer: Any | None,
    max_tokens: int | None,
) -> dict[str, list[Finding]]:
    """Return findings by caption that quote what the text encoder does not read."""
    captions = dict.fromkeys(clip.caption for clip in clips)
    if tokenizer is None:
        limit = max_tokens or LONGEST
        cut: dict[str, list[Finding]] = {}
        for caption in captions:
            words = caption.split()
            if len(words) > limit:
                lost = " ".join(words[limit:])
                cut[caption] = [_too_long(f"{len(words):,} words", limit, lost)]
        return cut
    if max_tokens is None:
        return {}
    long = [caption for caption in captions if lengths[caption] > max_tokens]
    room = max(0, max_tokens - tokenizer.num_special_tokens_to_add())
    return {
        caption: [
            _too_long(f"{lengths[caption]:,} tokens", max_tokens, tokenizer.decode(ids[room:]))
        ]
        for caption, ids in zip(long, _token_ids(long, tokenizer), strict=True)
    }


def _too_long(length: str, limit: int, lost: str) -> Finding:
    message = (
        f"its caption has {length} and the text encoder reads {limit} tokens at most; "
        f"cut off is {short(lost)}"
    )
    remedy = "shorten it, or put what matters first"
    return Finding("caption_long", message, "warn", remedy)


def _repeated(clips: Sequence[Clip], shared: Collection[str]) -> dict[str, list[Finding]]:
    """Return findings, by sample id, that say how many other clips have the same caption."""
    groups: dict[str, list[Clip]] = {}
    for clip in clips:
        groups.setdefault(" ".join(clip.caption.split()), []).append(clip)
    shared_texts = {" ".join(caption.split()) for caption in shared}
    by_id: dict[str, list[Finding]] = {}
    for caption, group in groups.items():
        # The words for an edit may be those of many pictures.
        several = [clip for clip in group if not (clip.references or _is_class_of(clip, caption))]
        # Two samples of one file, such as of two sources, are one clip.
        count = len({clip.media for clip in several})
        if count < 2 or caption in shared_texts:
            continue
        for clip in several:
            message = f"its caption is that of {count - 1} other clip{'s' if count > 2 else ''} too"
            remedy = "say what sets this clip apart"
            by_id[clip.id] = [
                Finding("caption_duplicate", f"{message}: {short(caption)}", "warn", remedy)
            ]
    return by_id


def _is_class_of(clip: Clip, caption: str) -> bool:
    """Return True if the caption is the name of a folder that the clip is in."""
    return any(class_name(folder) == caption for folder in clip.id.split("/")[:-1])


def _reserved_tokens(tokenizer: Any | None) -> re.Pattern[str] | None:
    """Return a pattern of what the tokenizer takes for one special token wherever it stands.

    It holds only tokens that look like one, `<pad>` or `[CLS]`: Gemma's table also has runs of new lines,
    and a CLIP tokenizer pads with `!`.
    """
    if tokenizer is None:
        return None
    tokens = {
        *tokenizer.all_special_tokens,
        *(token.content for token in tokenizer.added_tokens_decoder.values()),
    }
    # The longest come first, so that a token is not taken for its own beginning.
    marked = [
        token
        for token in sorted(tokens, key=len, reverse=True)
        if any(char.isalnum() for char in token) and not (token[0].isalnum() or token[-1].isalnum())
    ]
    return re.compile("|".join(map(re.escape, marked))) if marked else None


def _holding(caption: str, reserved: re.Pattern[str] | None) -> Iterator[Finding]:
    reserved_here = list(dict.fromkeys(reserved.findall(caption))) if reserved else []
    remedy = "remove it from the caption"
    if reserved_here:
        message = f"its caption holds {', '.join(reserved_here)}: no text to the tokenizer, but a special token"
        yield Finding("caption_reserved_token", message, "warn", remedy)
        return
    foreign = list(dict.fromkeys(WELL_KNOWN.findall(caption)))
    if foreign:
        message = f"its caption holds {', '.join(foreign)}: a special token of text models"
        yield Finding("caption_reserved_token", message, "warn", remedy)


def _text(caption: str) -> Iterator[Finding]:
    """Yield findings about parts of a caption that are no text."""
    code = "caption_not_text"
    odd = list(dict.fromkeys(_CONTROL.findall(caption)))
    if odd:
        names = ", ".join(f"U+{ord(char):04X}" for char in odd[:5])
        message = f"its caption holds control or replacement characters ({names})"
        yield Finding(code, message, "warn", "read the captions' source in its own encoding again")
    visible = sum(not char.isspace() for char in caption)
    if 2 * sum(map(str.isalnum, caption)) < visible and not _is_mostly_text(caption, visible):
        message = f"most of its caption is neither letter nor digit: {short(caption)}"
        yield Finding(code, message, "warn", "describe the clip in words")


def _is_mostly_text(caption: str, visible: int) -> bool:
    """Return True if letters, digits and the marks that many scripts write beside their letters make at least half."""
    text = sum(unicodedata.category(char)[0] in "LMN" for char in caption)
    return 2 * text >= visible
