"""What a person sees of a sample is what it is: every token's text, what is learned, what was left out."""

import io
import random

import pytest
from chat_tokenizers import byte_tokenizer, llama_tokenizer
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from dit_lora.data.chat.conversation import Conversation, Turn
from dit_lora.data.chat.fitting import shorten_conversation
from dit_lora.data.chat.prompts import render_prompt
from dit_lora.data.chat.rendered import RenderedConversation, TokenPiece
from dit_lora.data.chat.view import build_piece_views, build_terminal_view, count_tokens_by_kind

LLAMA, BYTES = llama_tokenizer(), byte_tokenizer()
QUESTION = "What does the cat do 猫 in the picture, and which 🎸 does the man play? (A) none (B) two"
TURNS = (Turn(QUESTION, "two 🎻🎻\nnaïve cats"), Turn("And then?", "It sleeps."))
SAMPLE = Conversation("clips/cat.mp4", "video", None, TURNS, system="Größe counts.")
MEDIA = 10**6


def rendered(tokenizer: PreTrainedTokenizerFast, less: int = 0) -> RenderedConversation:
    full = render_prompt("mistral", SAMPLE, tokenizer, MEDIA, 64, [0.5, 1.25])
    return shorten_conversation(full, len(full) - less)


def shown(sample: RenderedConversation, width: int = 200, **more: str) -> str:
    stream = io.StringIO()
    view = build_terminal_view("clips/cat.mp4", sample, LLAMA, kind="video", seconds=[0.5, 1.25], **more)
    Console(file=stream, width=width).print(view)
    return stream.getvalue()


@pytest.mark.parametrize("tokenizer", [LLAMA, BYTES])
def test_the_texts_of_tokens_joined_are_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = rendered(tokenizer)
    pieces = build_piece_views(sample, tokenizer)
    texts = ["".join(token.text for token in piece.tokens) for piece in pieces]
    media = [piece.part for piece in pieces].index("media")
    start = 1 if tokenizer.bos_token else 0
    assert "".join(texts[start:media]).strip() == "Größe counts. [INST] <Video>"
    after = "".join(texts[media:]).strip().replace("</s>  ", "</s> ")  # `▁` after special tokens
    assert after.startswith("</Video> The video contains 2 frames sampled at 0.5, 1.2 seconds. [/INST]")
    assert after.endswith(f"[INST] {QUESTION} [/INST] {TURNS[0].answer} </s> [INST] And then? [/INST] It sleeps. </s>")


@pytest.mark.parametrize("tokenizer", [LLAMA, BYTES])
def test_every_token_is_shown_at_its_place(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = rendered(tokenizer)
    tokens = [token for piece in build_piece_views(sample, tokenizer) for token in piece.tokens]
    ids = sample.ids
    assert [ids[token.position] for token in tokens] == [token.id for token in tokens]
    assert len(tokens) == len(sample) - 64


def test_a_characters_bytes_show_with_its_last_token() -> None:
    (guitar,) = [p for p in build_piece_views(rendered(LLAMA), LLAMA) if p.part == "answer"][:1]
    texts = [token.text for token in guitar.tokens]
    assert texts.count("🎻") == 2
    assert not any("\ufffd" in text for text in texts)


def test_random_bytes_lose_no_token() -> None:
    rng = random.Random(2)
    ids = tuple(rng.randrange(len(LLAMA)) for _ in range(200))
    (piece,) = build_piece_views(RenderedConversation((TokenPiece(ids, "answer"),)), LLAMA)
    assert [token.id for token in piece.tokens] == list(ids)


@pytest.mark.parametrize("less", [20, 21])
def test_what_was_left_out_stands_where_it_was(less: int) -> None:
    sample = rendered(LLAMA, less=less)
    piece = next(p for p in build_piece_views(sample, LLAMA) if p.part == "question")
    assert piece.num_dropped == less
    before, after = ("".join(token.text for token in tokens) for tokens in piece.tokens_around_gap)
    assert QUESTION.startswith(before.strip())
    assert QUESTION.endswith(after)
    assert len(before) > 10
    assert len(after) > 10


def test_the_terminal_shows_the_sample_and_folds_its_media() -> None:
    text = shown(rendered(LLAMA, less=20), instruction="Watch it.")
    sample = rendered(LLAMA, less=20)
    assert text.startswith("clips/cat.mp4\nvideo, 2 frames at 0.5 ... 1.25 s; ")
    assert f"{len(sample)} tokens: 64 media, " in text
    assert f"{sample.num_answer_tokens} learned; 20 of the questions are left out" in text
    assert "<64 media tokens>" in text
    assert "[... 20 tokens left out ...]" in text
    assert "Watch it." in text
    answer_lines = [line for line in text.splitlines() if line.startswith("learned")]
    assert "two 🎻🎻↵naïve cats </s>" in answer_lines[0]
    assert "It sleeps. </s>" in answer_lines[1]
    assert str(MEDIA) not in text


def test_counts_add_up() -> None:
    sample = rendered(BYTES, less=7)
    assert sum(count_tokens_by_kind(sample).values()) == len(sample)
    assert count_tokens_by_kind(sample)["media"] == 64


def test_colours_tell_learned_from_given() -> None:
    stream = io.StringIO()
    view = build_terminal_view("a", rendered(LLAMA), LLAMA, kind="video", seconds=[1.0])
    Console(file=stream, width=200, force_terminal=True, color_system="standard").print(view)
    assert "\x1b[1;32mlearned" in stream.getvalue()
    assert "\x1b[2mquestion" in stream.getvalue()


def test_escape_sequences_of_the_data_do_not_reach_the_terminal() -> None:
    conversation = Conversation("a\x1b]0;x", "text", None, (Turn("\x1b[31mred [bold]x[/bold]", "y\x9b2J"),))
    stream = io.StringIO()
    sample = render_prompt("mistral", conversation, LLAMA, MEDIA, 0)
    Console(file=stream, width=200).print(build_terminal_view(conversation.id, sample, LLAMA, kind="text"))
    assert "\x1b" not in stream.getvalue()
    assert "\x9b" not in stream.getvalue()
    assert "red [bold]x[/bold]" in stream.getvalue()
