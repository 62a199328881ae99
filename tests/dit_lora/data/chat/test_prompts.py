"""Prompts are VideoChat2's, token for token, and training tokens are those that inference sees."""

import random
from collections.abc import Callable
from itertools import accumulate

import pytest
from chat_tokenizers import byte_tokenizer, llama_tokenizer
from transformers import PreTrainedTokenizerFast

from dit_lora.data.chat.conversation import Conversation, ConversationKind, Turn
from dit_lora.data.chat.prompts import (
    PROMPT_FORMATS,
    FormatName,
    build_instruction,
    render_prompt,
)
from dit_lora.data.chat.rendered import IGNORE_INDEX, RenderedConversation
from dit_lora.data.chat.spans import TextSpan, tokenize_spans
from dit_lora.errors import DitLoraError

MEDIA = 100_000
LLAMA, BYTES = llama_tokenizer(), byte_tokenizer()
WORDS = [
    "the",
    "cat",
    "Größe",
    "猫が走る",
    "🎸🎻",
    "(A)",
    "5",
    "12.75",
    "don't\nnew",
    "it's;",
    "naïve",
    "end.",
    "</Video>",
    "Ж",
    "{",
    "##",
    "x_y",
    "..",
]
FORMATS: list[FormatName] = list(PROMPT_FORMATS)


def words(rng: random.Random, least: int = 1) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, 9)))


def spaced(rng: random.Random, least: int = 1) -> str:
    """With white space around it, as annotation files have it."""
    return rng.choice(["", "", " ", "\n"]) + words(rng, least) + rng.choice(["", "", " ", "\n"])


def conversation(
    seed: int, kinds: str = "image video", words: Callable[[random.Random], str] = words
) -> tuple[Conversation, list[float]]:
    rng = random.Random(seed)
    turns = tuple(
        Turn(
            words(rng) if rng.random() < 0.8 else "",
            words(rng),
            words(rng) if rng.random() < 0.5 else "",
        )
        for _ in range(rng.randint(1, 4))
    )
    kind: ConversationKind = rng.choice(kinds.split())
    system = words(rng).rstrip() if rng.random() < 0.5 else ""
    seconds = [round(rng.uniform(0, 99), 3) for _ in range(rng.choice([1, 4, 8]))]
    return Conversation(str(seed), kind, None, turns, system=system), seconds


def upstream_text(name: str, one: Conversation, said: str) -> tuple[str, str]:
    """The text on both sides of the media, as it_dataset*.py joins it; split where MEDIA stands."""
    marker = "Image" if one.kind == "image" else "Video"
    media = f"<{marker}>\0</{marker}>"
    first_instruction = one.turns[0].instruction
    system = one.system + " " if one.system else ""
    if name == "mistral":
        text = system + (first_instruction + " " if first_instruction else "") + "[INST] " + media + said + " [/INST]"
        for turn in one.turns:
            text += f" [INST] {turn.question} [/INST]" if turn.question else ""
            text += f" {turn.answer} </s>"
    elif name == "vicuna":
        text = system + (first_instruction + " " if first_instruction else "") + "###Human: " + media + said + " "
        for turn in one.turns:
            text += f"###Human: {turn.question} " if turn.question else ""
            text += f"###Assistant: {turn.answer} "
        text += "###"
    else:
        text = f"<|system|>\n{system}{first_instruction}<|end|>\n" if system + first_instruction else ""
        for index, turn in enumerate(one.turns):
            lead = media + said + "\n" if index == 0 else ""
            text += f"<|user|>\n{lead}{turn.question.strip()}<|end|>\n<|assistant|>\n"
            text += turn.answer.strip() + "<|end|>\n"
    before, after = (text if name == "vicuna" else text.strip()).split("\0")
    return before, after


def upstream_labels(name: str, after: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """As videochat2_it_{mistral,phi}.py masks: the lengths of the parts, summed, have to give the whole."""

    def length(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    ask, reply = ("[INST] ", " [/INST] ") if name == "mistral" else ("<|user|>\n", "<|end|>\n<|assistant|>\n")
    trim = str.rstrip if name == "mistral" else str
    parts = after.split(reply)
    parts = [part + reply for part in parts[:-1]] + parts[-1:]
    labels = list(tokenizer(after, add_special_tokens=False).input_ids)
    num_characters = length(trim(parts[0]))
    labels[:num_characters] = [IGNORE_INDEX] * num_characters
    for part in parts[1:-1]:
        full_length, answer = length(trim(part)), length(trim(part.split(ask)[0]))
        labels[num_characters + answer : num_characters + full_length] = [IGNORE_INDEX] * (full_length - answer)
        num_characters += full_length
    assert num_characters + length(trim(parts[-1])) == len(labels)
    return labels


def said_of(one: Conversation, seconds: list[float], timestamps: bool) -> str:
    if one.kind != "video" or not timestamps:
        return ""
    stamps = ", ".join(str(round(second, 1)) for second in seconds)
    return f" The video contains {len(seconds)} frames sampled at {stamps} seconds."


def decoded(rendered: RenderedConversation, part: str, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(piece.ids).strip() for piece in rendered.pieces if piece.part == part]


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_original(name: FormatName) -> None:
    for seed in range(120):
        sample, seconds = conversation(seed, words=spaced)
        timestamps = seed % 3 > 0
        before, after = upstream_text(name, sample, said_of(sample, seconds, timestamps))
        head = LLAMA(before, add_special_tokens=False).input_ids
        tail = LLAMA(after, add_special_tokens=False).input_ids
        rendered = render_prompt(name, sample, LLAMA, MEDIA, 5, seconds, timestamps=timestamps)
        assert rendered.ids == [LLAMA.bos_token_id, *head, *[MEDIA] * 5, *tail]


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_labels_are_those_of_the_original(name: FormatName) -> None:
    for seed in range(120):
        sample, seconds = conversation(seed)
        _, after = upstream_text(name, sample, said_of(sample, seconds, True))
        rendered = render_prompt(name, sample, LLAMA, MEDIA, 3, seconds)
        expected = upstream_labels(name, after, LLAMA)
        assert rendered.labels[-len(expected) :] == expected
        assert set(rendered.labels[: -len(expected)]) == {IGNORE_INDEX}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokenizer", [LLAMA, BYTES, byte_tokenizer(trim_offsets=False)])
def test_answers_and_their_ends_alone_are_learned(name: FormatName, tokenizer: PreTrainedTokenizerFast) -> None:
    end = PROMPT_FORMATS[name].answer[1].strip()
    for seed in range(40):
        sample, seconds = conversation(seed, "image video text")
        rendered = render_prompt(name, sample, tokenizer, MEDIA, 2, seconds)
        answers = [
            tokenizer.decode(tokenizer(turn.answer).input_ids, skip_special_tokens=True) for turn in sample.turns
        ]
        answer_texts = decoded(rendered, "answer", tokenizer)
        assert [text.removesuffix(end).strip() for text in answer_texts] == [a.strip() for a in answers]
        assert all(text.endswith(end) for text in answer_texts)
        questions = [turn.question for turn in sample.turns if turn.question]
        assert decoded(rendered, "question", tokenizer) == questions


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokenizer", [LLAMA, BYTES])
def test_what_inference_sees_is_a_beginning_of_what_is_trained(
    name: FormatName, tokenizer: PreTrainedTokenizerFast
) -> None:
    for seed in range(60):
        sample, seconds = conversation(seed, "image video text")
        full = render_prompt(name, sample, tokenizer, MEDIA, 4, seconds)
        prompt = render_prompt(name, sample, tokenizer, MEDIA, 4, seconds, include_answer=False)
        assert full.pieces[: len(prompt.pieces)] == prompt.pieces
        (answer,) = full.pieces[len(prompt.pieces) :]
        assert answer.part == "answer"


def test_a_caption_follows_the_media_without_a_question() -> None:
    sample = Conversation("a", "image", None, (Turn("", "the cat"),))
    rendered = render_prompt("mistral", sample, LLAMA, MEDIA, 1)
    text = LLAMA.decode([token for token in rendered.ids if token != MEDIA])
    assert text == "<s> [INST] <Image> </Image> [/INST] the cat </s>"
    assert not decoded(rendered, "question", LLAMA)


@pytest.mark.parametrize("instruction", ["", "look well"])
def test_text_has_no_media_turn(instruction: str) -> None:
    """As videochat2_it_hd_mistral.py: the stripped text alone, after BOS."""
    sample = Conversation("a", "text", None, (Turn("the cat", "a dog", instruction), Turn("b", "c")))
    text = f"{instruction}  [INST] the cat [/INST] a dog </s> [INST] b [/INST] c </s>".strip()
    rendered = render_prompt("mistral", sample, LLAMA, MEDIA, 9, [0.5])
    assert rendered.ids == [LLAMA.bos_token_id, *LLAMA(text, add_special_tokens=False).input_ids]


def test_phi3_strips_questions_and_answers() -> None:
    captioned = Conversation("a", "video", None, (Turn("the cat", "a dog"), Turn("b", "c")))
    spaced = Conversation("a", "video", None, (Turn(" the cat\n", "\n a dog "), Turn(" b", "c ")))
    assert render_prompt("phi3", spaced, LLAMA, MEDIA, 2) == render_prompt("phi3", captioned, LLAMA, MEDIA, 2)


def test_a_video_marker_inside_a_question_is_text() -> None:
    sample = Conversation("a", "video", None, (Turn("is </Video> a <Video> tag?", "the cat"),))
    rendered = render_prompt("mistral", sample, LLAMA, MEDIA, 3, [0.25, 1])
    assert rendered.ids.count(MEDIA) == 3
    assert decoded(rendered, "question", LLAMA) == ["is </Video> a <Video> tag?"]


def test_instructions_are_what_the_q_former_reads() -> None:
    turns = (Turn("which?", "that", "look well"), Turn("q", "a", "other"))
    sample = Conversation("a", "video", None, turns)
    assert build_instruction("mistral", sample) == "look well"
    assert build_instruction("vicuna", sample) == "look well which?"
    assert build_instruction("mistral", Conversation("a", "video", None, (Turn("q", "a"),))) == ""


def test_a_token_across_the_beginning_of_an_answer_is_refused() -> None:
    spans = [TextSpan("the vid", "question"), TextSpan("eo cat", "answer")]
    assert "video" in "".join(span.text for span in spans)
    with pytest.raises(DitLoraError, match="eo cat"):
        tokenize_spans(LLAMA, spans)


def test_tokens_of_spans_are_those_of_the_text() -> None:
    rng = random.Random(7)
    for tokenizer in (LLAMA, BYTES):
        for _ in range(50):
            text = words(rng, 4)
            cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
            spans = [
                TextSpan(text[a:b], rng.choice(["fixed", "media", "question"]))
                for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)
            ]
            pieces = tokenize_spans(tokenizer, spans)
            ids = [token for piece in pieces for token in piece.ids]
            assert ids == tokenizer(text, add_special_tokens=False).input_ids
            assert list(accumulate(len(piece.ids) for piece in pieces))[-1] == len(ids)
