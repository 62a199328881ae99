"""Captions are judged as the text encoder's tokenizer reads them."""

from pathlib import Path
from typing import Any

import pytest

from dit_lora.data.audit.captions import check_captions, count_caption_tokens
from dit_lora.data.audit.finding import Finding
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.clips import Clip
from dit_lora.families.tiny.text import build_clip_tokenizer, build_gemma_tokenizer, build_t5_tokenizer

TOKENIZERS = {
    "t5": build_t5_tokenizer,
    "gemma": build_gemma_tokenizer,
    "clip": build_clip_tokenizer,
}


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """The tiny tokenizers have one token a character, and T5's and CLIP's none for the space between words."""
    return TOKENIZERS[request.param]()


def clip(caption: str, name: str = "a.mp4") -> Clip:
    return Clip(name, MediaFile(Path(name)), caption)


def judge(caption: str, tokenizer: Any = None, max_tokens: int | None = None) -> list[Finding]:
    return check_captions([clip(caption)], tokenizer, max_tokens).get("a.mp4", [])


def codes(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.code, finding.verdict) for finding in findings]


GOOD = (
    "A cat sits (quietly) on 2 mats, at 50% light!\nThen it leaves; <i>slowly</i> [sic].",
    "\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48",  # Thai: two letters and four marks
    "\u6e2f\u306e\u732b",  # Japanese, without spaces
    "a family \U0001f468\u200d\U0001f469\u200d\U0001f466 at the beach",
    "7",
)


@pytest.mark.parametrize("caption", GOOD)
def test_plain_captions_of_any_language_have_no_finding(caption: str, tokenizer: Any) -> None:
    assert judge(caption) == []
    assert judge(caption, tokenizer, 200) == []


@pytest.mark.parametrize("caption", ["", " \n\t", "\u200b\ufeff", "\u00a0\x00"])
def test_what_shows_nothing_is_empty(caption: str, tokenizer: Any) -> None:
    findings = judge(caption, tokenizer, 226)
    assert codes(findings) == [("caption_empty", "reject")]


def test_a_caption_is_long_from_the_first_token_that_is_not_read(tokenizer: Any) -> None:
    """Judged against what the tokenizer itself keeps when it cuts."""
    caption = "a small boat drifts past"
    clips = [clip(caption)]
    count = count_caption_tokens(clips, tokenizer)[caption]
    assert count == len(tokenizer(caption)["input_ids"])
    assert check_captions(clips, tokenizer, count) == {}

    limit = count - 8
    (finding,) = check_captions(clips, tokenizer, limit)["a.mp4"]
    assert (finding.code, finding.verdict) == ("caption_long", "warn")
    assert f"{count} tokens" in finding.message
    assert f"reads {limit} tokens" in finding.message
    token_ids = tokenizer(caption, truncation=True, max_length=limit)["input_ids"]
    kept_text = tokenizer.decode(token_ids, skip_special_tokens=True).strip()
    cut_text = finding.message.rpartition("cut off: ")[2].strip("'")
    assert (kept_text + cut_text).replace(" ", "") == caption.replace(" ", "")


def test_lengths_that_the_caller_has_are_not_counted_again() -> None:
    (finding,) = check_captions([clip("a cat")], build_t5_tokenizer(), 226, lengths={"a cat": 227})["a.mp4"]
    assert "227 tokens" in finding.message


def test_without_a_tokenizer_only_what_is_surely_too_long_is_named() -> None:
    """A word is one token or more."""
    assert judge("word " * 512) == []
    (finding,) = judge("word " * 512 + "end")
    assert codes([finding]) == [("caption_long", "warn")]
    assert finding.message.endswith("cut off: 'end'")
    assert codes(judge("word " * 80, None, 77)) == [("caption_long", "warn")]


@pytest.mark.parametrize(
    "token",
    ["</s>", "<s>", "<pad>", "<bos>", "<extra_id_0>", "<|im_end|>", "[CLS]", "<end_of_turn>"],
)
def test_well_known_special_tokens_are_found_without_a_tokenizer(token: str) -> None:
    (finding,) = judge(f"a cat {token} sits")
    assert codes([finding]) == [("caption_reserved_token", "warn")]
    assert token in finding.message


def test_every_special_token_of_the_tokenizer_is_found(tokenizer: Any) -> None:
    for token in tokenizer.all_special_tokens:
        (finding,) = judge(f"a cat{token}sits", tokenizer, 226)
        assert codes([finding]) == [("caption_reserved_token", "warn")]
        assert token in finding.message


def test_added_tokens_are_reserved_too_unless_they_are_punctuation() -> None:
    """A CLIP tokenizer that pads with an exclamation mark must not accuse every exclamation."""
    tokenizer = build_clip_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "!"})
    tokenizer.add_tokens(["<kitten-42>", "\n\n"])
    assert judge("what a cat!\n\nit sits", tokenizer, 77) == []
    assert codes(judge("what <kitten-42> is", tokenizer, 77)) == [("caption_reserved_token", "warn")]


def test_the_same_caption_on_several_clips_is_one_warning_for_each() -> None:
    clips = [clip("a cat", "1.mp4"), clip("a  cat", "2.mp4"), clip("a cat", "3.mp4")]
    findings = check_captions([*clips, clip("a dog", "4.mp4")], None, None)
    assert set(findings) == {"1.mp4", "2.mp4", "3.mp4"}
    for (finding,) in findings.values():
        assert codes([finding]) == [("caption_duplicate", "warn")]
        assert "2 other clips" in finding.message


def test_windows_of_one_clip_share_its_caption() -> None:
    media = MediaFile(Path("a.mp4"))
    windows = [Clip("a.mp4", media, "a cat"), Clip("a.mp4@2s", media, "a cat")]
    assert check_captions(windows, None, None) == {}


def test_class_names_and_captions_of_a_whole_source_may_repeat() -> None:
    """Only as the name of the clip's own folder: elsewhere the same words are a copy."""
    classes = [clip("Playing Guitar", f"data/PlayingGuitar/{number}.avi") for number in range(2)]
    assert check_captions(classes, None, None) == {}
    dogs = [clip("a photo of a sks dog", f"{number}.png") for number in range(2)]
    assert check_captions(dogs, None, None, shared_captions={"a photo of a sks dog"}) == {}
    assert set(check_captions(dogs, None, None)) == {"0.png", "1.png"}


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("a cat\x07 sits", "U+0007"),
        ("caf\ufffd at night", "U+FFFD"),
        ("=== --- ### *** a", "neither letters nor digits"),
        ("\U0001f431\U0001f431\U0001f431", "neither letters nor digits"),
    ],
)
def test_what_is_no_text_is_a_warning(caption: str, words: str) -> None:
    (finding,) = judge(caption)
    assert codes([finding]) == [("caption_not_text", "warn")]
    assert words in finding.message


def test_half_a_utf_16_pair_is_rejected_where_the_tokenizer_would_fail(tokenizer: Any) -> None:
    """JSON can hold one: "\\ud83d"."""
    caption = "a cat \ud83d sits"
    with pytest.raises(TypeError):
        tokenizer([caption])
    findings = judge(caption, tokenizer, 226)
    assert codes(findings) == [("caption_not_text", "reject")]
    findings[0].message.encode()  # a terminal can show it
    assert count_caption_tokens([clip(caption)], tokenizer)[caption] > 3
