"""Captions judged: empty, longer than the text encoder reads, repeated, or holding what is no text."""

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dit_lora.data.audit.finding import Finding
from dit_lora.data.caption_text import caption_fault, short
from dit_lora.data.clips import Clip
from dit_lora.data.folders import class_name

# T5's, BERT's, CLIP's, Llama's and Gemma's: what captioning models leave behind.
WELL_KNOWN = re.compile(
    r"</?s>|<(?:pad|unk|bos|eos|mask|image|video)>|<extra_id_\d+>|<\|\w{2,40}\|>"
    r"|<(?:start|end)_of_turn>|\[(?:PAD|CLS|SEP|UNK|MASK|INST)\]|\[/INST\]"
)
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")
LONGEST = 300
"""Tokens that the supported text encoder with the most room reads (Sana's)."""
_BATCH = 1000  # a tokenizer's threads are busy with fewer, and its output stays small
_REMEDIES = {
    "caption_empty": "write a caption, or remove the clip",
    "caption_not_text": "write the caption anew as UTF-8",
    "caption_long": "shorten it, or remove the clip",
}
"""What is said of captions that are rejected, by code."""


def check_captions(
    clips: Sequence[Clip],
    tokenizer: Any | None,
    max_tokens: int | None,
    *,
    lengths: Mapping[str, int] | None = None,
    shared: Collection[str] = (),
) -> dict[str, list[Finding]]:
    """Everything wrong with the captions, by sample id; samples without a finding are absent.

    `max_tokens` is what the text encoder reads, its own special tokens counted. Without a tokenizer, words are
    counted, each of which is one token or more. `lengths` are `token_lengths` where the caller has them. A caption of `shared`, and a class's name on the clips of its folder, may repeat.
    """
    reserved = _reserved_tokens(tokenizer)
    if lengths is None:
        lengths = token_lengths(clips, tokenizer)
    long = _cut_off(clips, lengths, tokenizer, max_tokens)
    repeated = _repeated(clips, shared)
    found: dict[str, list[Finding]] = {}
    for clip in clips:
        fault = caption_fault(clip.caption)
        if fault is not None:
            findings = [Finding(*fault, "reject", _REMEDIES[fault[0]])]
        else:
            findings = [*_text(clip.caption), *_holding(clip.caption, reserved)]
            findings += long.get(clip.caption, ())
            findings += repeated.get(clip.id, ())
        if findings:
            found[clip.id] = findings
    return found


def token_lengths(clips: Sequence[Clip], tokenizer: Any | None) -> dict[str, int]:
    """Tokens of each caption by its text, the tokenizer's own special tokens counted; {} without one."""
    if tokenizer is None:
        return {}
    added = tokenizer.num_special_tokens_to_add()
    captions = list(dict.fromkeys(clip.caption for clip in clips))
    return {
        caption: len(ids) + added
        for caption, ids in zip(captions, _token_ids(captions, tokenizer), strict=True)
    }


def _token_ids(captions: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    """Of each caption alone, without special tokens and never cut."""
    for start in range(0, len(captions), _BATCH):
        batch = captions[start : start + _BATCH]
        # A lone surrogate is no text to a tokenizer.
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
    """By caption, which words the text encoder does not read."""
    captions = dict.fromkeys(clip.caption for clip in clips)
    if tokenizer is None:
        limit = max_tokens or LONGEST
        many = {caption: words for caption in captions if len(words := caption.split()) > limit}
        return {
            caption: [_too_long(f"{len(words):,} words", limit, " ".join(words[limit:]))]
            for caption, words in many.items()
        }
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
    words = (
        f"its caption has {length} and the text encoder reads {limit} tokens at most; "
        f"cut off is {short(lost)}"
    )
    remedy = "shorten it, or put what matters first"
    return Finding("caption_long", words, "warn", remedy)


def _repeated(clips: Sequence[Clip], shared: Collection[str]) -> dict[str, list[Finding]]:
    """By sample id, how many other clips have the same caption."""
    groups: dict[str, list[Clip]] = {}
    for clip in clips:
        groups.setdefault(" ".join(clip.caption.split()), []).append(clip)
    meant = {" ".join(caption.split()) for caption in shared}
    found: dict[str, list[Finding]] = {}
    for caption, group in groups.items():
        several = [clip for clip in group if not _is_class_of(clip, caption)]
        count = len({clip.media for clip in several})
        if count < 2 or caption in meant:
            continue
        for clip in several:
            words = f"its caption is that of {count - 1} other clip{'s' if count > 2 else ''} too"
            remedy = "say what sets this clip apart"
            found[clip.id] = [
                Finding("caption_duplicate", f"{words}: {short(caption)}", "warn", remedy)
            ]
    return found


def _is_class_of(clip: Clip, caption: str) -> bool:
    """Whether the caption is the name of a folder that the clip is in."""
    return any(class_name(folder) == caption for folder in clip.id.split("/")[:-1])


def _reserved_tokens(tokenizer: Any | None) -> re.Pattern[str] | None:
    """What the tokenizer takes for one special token wherever it stands.

    Only those that look like it, `<pad>` or `[CLS]`: Gemma's table also has runs of new lines, and a CLIP
    tokenizer pads with `!`.
    """
    if tokenizer is None:
        return None
    tokens = {
        *tokenizer.all_special_tokens,
        *(token.content for token in tokenizer.added_tokens_decoder.values()),
    }
    marked = [
        token
        for token in sorted(tokens, key=len, reverse=True)
        if any(char.isalnum() for char in token) and not (token[0].isalnum() or token[-1].isalnum())
    ]
    return re.compile("|".join(map(re.escape, marked))) if marked else None


def _holding(caption: str, reserved: re.Pattern[str] | None) -> Iterator[Finding]:
    own = list(dict.fromkeys(reserved.findall(caption))) if reserved else []
    remedy = "remove it from the caption"
    if own:
        words = f"its caption holds {', '.join(own)}: no text to the tokenizer, but a special token"
        yield Finding("caption_reserved_token", words, "warn", remedy)
        return
    foreign = list(dict.fromkeys(WELL_KNOWN.findall(caption)))
    if foreign:
        words = f"its caption holds {', '.join(foreign)}: a special token of text models"
        yield Finding("caption_reserved_token", words, "warn", remedy)


def _text(caption: str) -> Iterator[Finding]:
    """What is no text in it."""
    code = "caption_not_text"
    odd = list(dict.fromkeys(_CONTROL.findall(caption)))
    if odd:
        names = ", ".join(f"U+{ord(char):04X}" for char in odd[:5])
        words = f"its caption holds control or replacement characters ({names})"
        yield Finding(code, words, "warn", "read the captions' source in its own encoding again")
    visible = sum(not char.isspace() for char in caption)
    if 2 * sum(map(str.isalnum, caption)) < visible and not _is_mostly_text(caption, visible):
        words = f"most of its caption is neither letter nor digit: {short(caption)}"
        yield Finding(code, words, "warn", "describe the clip in words")


def _is_mostly_text(caption: str, visible: int) -> bool:
    """With the marks that many scripts write beside their letters."""
    text = sum(unicodedata.category(char)[0] in "LMN" for char in caption)
    return 2 * text >= visible
