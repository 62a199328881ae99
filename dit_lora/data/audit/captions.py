"""Checks of captions: empty, too long for the text encoder, repeated, or not text."""

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dit_lora.data.audit.finding import Finding
from dit_lora.data.sources.caption_text import find_caption_fault, quote_text_start
from dit_lora.data.sources.clips import Clip
from dit_lora.data.sources.scan import format_class_name

# Special tokens of T5, BERT, CLIP, Llama and Gemma, which captioning models leave behind.
SPECIAL_TOKEN_PATTERN = re.compile(
    r"</?s>|<(?:pad|unk|bos|eos|mask|image|video)>|<extra_id_\d+>|<\|\w{2,40}\|>"
    r"|<(?:start|end)_of_turn>|\[(?:PAD|CLS|SEP|UNK|MASK|INST)\]|\[/INST\]"
)
# Control characters other than tab, new line and return, and U+FFFD, which replaces bytes that are not valid text.
_CONTROL_CHARS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")
MAX_ENCODER_TOKENS = 512
"""Longest input of any supported text encoder, in tokens (FLUX.1's T5)."""
# Captions per tokenizer call: enough to keep its threads busy, few enough that its output stays small.
_BATCH_SIZE = 1000
_REMEDIES = {
    "caption_empty": "write a caption, or remove the clip",
    "caption_not_text": "save the caption as UTF-8",
    "caption_long": "shorten it, or remove the clip",
}
"""Remedies for rejected captions, by the finding's code."""


def check_captions(
    clips: Sequence[Clip],
    tokenizer: Any | None,
    max_tokens: int | None,
    *,
    lengths: Mapping[str, int] | None = None,
    shared_captions: Collection[str] = (),
) -> dict[str, list[Finding]]:
    """Check all captions. Samples without a finding are absent from the result.

    Args:
        clips: The samples with their captions.
        tokenizer: Tokenizer of the text encoder; None counts words instead, and a word is at least one token.
        max_tokens: Tokens that the text encoder reads, including special tokens; None if the model has no limit.
        lengths: Result of `count_caption_tokens`, if the caller has it already.
        shared_captions: Captions that may repeat. A class name may also repeat on the clips of its folder.

    Returns:
        Findings by sample id.
    """
    reserved = _build_reserved_pattern(tokenizer)
    if lengths is None:
        lengths = count_caption_tokens(clips, tokenizer)
    # Both look-ups run over the whole set: the first one tokenises in batches, the second one counts repeats.
    long = _find_truncated_captions(clips, lengths, tokenizer, max_tokens)
    repeated = _find_repeated_captions(clips, shared_captions)
    by_id: dict[str, list[Finding]] = {}
    for clip in clips:
        # A caption that cannot be trained on gets only this finding; the others would be noise.
        fault = find_caption_fault(clip.caption)
        if fault is not None:
            findings = [Finding(*fault, "reject", _REMEDIES[fault[0]])]
        else:
            findings = [*_check_characters(clip.caption), *_check_special_tokens(clip.caption, reserved)]
            findings += long.get(clip.caption, ())
            findings += repeated.get(clip.id, ())
        if findings:
            by_id[clip.id] = findings
    return by_id


def count_caption_tokens(clips: Sequence[Clip], tokenizer: Any | None) -> dict[str, int]:
    """Number of tokens of each caption, including the tokenizer's special tokens; {} without a tokenizer."""
    if tokenizer is None:
        return {}
    # The ids are requested without special tokens, so their number is added to each length.
    added = tokenizer.num_special_tokens_to_add()
    # Captions that repeat are tokenised once.
    captions = list(dict.fromkeys(clip.caption for clip in clips))
    return {caption: len(ids) + added for caption, ids in zip(captions, _token_ids(captions, tokenizer), strict=True)}


def _token_ids(captions: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the token ids of each caption, without special tokens and without truncation."""
    for start in range(0, len(captions), _BATCH_SIZE):
        # Tokenizers raise on a lone surrogate, so it is replaced first.
        texts = [text.encode("utf-8", "replace").decode() for text in captions[start : start + _BATCH_SIZE]]
        yield from tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _find_truncated_captions(
    clips: Sequence[Clip], lengths: Mapping[str, int], tokenizer: Any | None, max_tokens: int | None
) -> dict[str, list[Finding]]:
    """Findings, by caption, about captions longer than the text encoder's limit; they quote the text to be cut off."""
    captions = dict.fromkeys(clip.caption for clip in clips)
    findings: dict[str, list[Finding]] = {}
    if tokenizer is None:
        # Without a tokenizer, count words: each word is at least one token, so a caption above the limit is certainly
        # too long.
        limit = max_tokens or MAX_ENCODER_TOKENS
        for caption in captions:
            caption_words = caption.split()
            if len(caption_words) > limit:
                cut_text = " ".join(caption_words[limit:])
                findings[caption] = [_report_truncation(f"{len(caption_words):,} words", limit, cut_text)]
        return findings
    if max_tokens is None:
        return {}
    # Only the captions above the limit are tokenised a second time, to quote the text after the limit.
    long = [caption for caption in captions if lengths[caption] > max_tokens]
    # `ids` have no special tokens, so their share of the limit is subtracted.
    num_text_tokens = max(0, max_tokens - tokenizer.num_special_tokens_to_add())
    for caption, ids in zip(long, _token_ids(long, tokenizer), strict=True):
        cut_text = tokenizer.decode(ids[num_text_tokens:])
        findings[caption] = [_report_truncation(f"{lengths[caption]:,} tokens", max_tokens, cut_text)]
    return findings


def _report_truncation(length: str, limit: int, cut_text: str) -> Finding:
    quote = quote_text_start(cut_text)
    message = f"its caption has {length}, and the text encoder reads {limit} tokens at most; cut off: {quote}"
    return Finding("caption_long", message, "warn", "shorten it, or put the important part first")


def _find_repeated_captions(clips: Sequence[Clip], shared_captions: Collection[str]) -> dict[str, list[Finding]]:
    """Findings, by sample id, about captions that other clips have too, with the number of these clips."""
    groups: dict[str, list[Clip]] = {}
    for clip in clips:
        # Captions that differ only in white space count as equal.
        groups.setdefault(" ".join(clip.caption.split()), []).append(clip)
    shared_texts = {" ".join(caption.split()) for caption in shared_captions}
    by_id: dict[str, list[Finding]] = {}
    for caption, group in groups.items():
        if len(group) == 1:
            continue
        repeats = []
        for clip in group:
            # A caption may be the name of a folder that contains the clip. The last part of the id is the file's name.
            class_names = map(format_class_name, clip.id.split("/")[:-1])
            # One instruction for an edit may apply to many pictures, so samples with references are not counted.
            if not clip.references and caption not in class_names:
                repeats.append(clip)
        # Two samples of one file, for example from two sources, count as one clip.
        count = len({clip.media for clip in repeats})
        # Class names and the captions of the recipe may repeat.
        if count < 2 or caption in shared_texts:
            continue
        for clip in repeats:
            message = f"its caption is that of {count - 1} other clip{'s' if count > 2 else ''} too"
            remedy = "describe what is special about this clip"
            by_id[clip.id] = [Finding("caption_duplicate", f"{message}: {quote_text_start(caption)}", "warn", remedy)]
    return by_id


def _build_reserved_pattern(tokenizer: Any | None) -> re.Pattern[str] | None:
    """Pattern that matches text which the tokenizer would read as one of its special tokens; None without any."""
    if tokenizer is None:
        return None
    # Only tokens that look special, such as `<pad>` or `[CLS]`. Gemma's table also has runs of new lines, and a CLIP
    # tokenizer pads with `!`; these are ordinary text.
    tokens = {*tokenizer.all_special_tokens, *(token.content for token in tokenizer.added_tokens_decoder.values())}
    # The longest come first: an alternation takes the first match, which could be a prefix of a longer token.
    marked = [
        token
        for token in sorted(tokens, key=len, reverse=True)
        if any(char.isalnum() for char in token) and not (token[0].isalnum() or token[-1].isalnum())
    ]
    return re.compile("|".join(map(re.escape, marked))) if marked else None


def _check_special_tokens(caption: str, reserved_pattern: re.Pattern[str] | None) -> Iterator[Finding]:
    """Yield a finding if a caption contains special tokens of the tokenizer, or of other text models."""
    matches = list(dict.fromkeys(reserved_pattern.findall(caption))) if reserved_pattern else []
    remedy = "remove it from the caption"
    if matches:
        message = f"its caption holds {', '.join(matches)}: which the tokenizer reads as a special token"
        yield Finding("caption_reserved_token", message, "warn", remedy)
        return
    # Special tokens of other models show that a captioning model's output was not cleaned.
    foreign = list(dict.fromkeys(SPECIAL_TOKEN_PATTERN.findall(caption)))
    if foreign:
        message = f"its caption contains {', '.join(foreign)}, a special token of text models"
        yield Finding("caption_reserved_token", message, "warn", remedy)


def _check_characters(caption: str) -> Iterator[Finding]:
    code = "caption_not_text"
    control_chars = list(dict.fromkeys(_CONTROL_CHARS.findall(caption)))
    if control_chars:
        names = ", ".join(f"U+{ord(char):04X}" for char in control_chars[:5])
        message = f"its caption contains control or replacement characters ({names})"
        yield Finding(code, message, "warn", "read the captions again in their own encoding")
    visible = len("".join(caption.split()))
    # `str.isalnum` is fast but ignores combining marks, which many scripts need. So suspicious captions are checked
    # by their Unicode categories: letters, marks and numbers.
    if 2 * sum(map(str.isalnum, caption)) < visible:
        num_text_chars = sum(unicodedata.category(char)[0] in "LMN" for char in caption)
        if 2 * num_text_chars < visible:
            message = f"most of its caption is neither letters nor digits: {quote_text_start(caption)}"
            yield Finding(code, message, "warn", "describe the clip in words")
