"""VideoChat2's prompt formats, token for token as its own code builds and splits them.

Source: video_chat2/dataset/it_dataset{,_mistral,_phi}.py (the text) and video_chat2/models/videochat_*/
videochat2_it_*.py (the tokens) of OpenGVLab/Ask-Anything. The text is split at the media, each side is
tokenised without special tokens, and one BOS token comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from dit_lora.data.chat.conversation import Conversation, Turn
from dit_lora.data.chat.rendered import RenderedConversation, TokenPiece
from dit_lora.data.chat.spans import TextSpan, tokenize_spans

FormatName = Literal["mistral", "vicuna", "phi3"]
_MARKERS = {"image": ("<Image>", "</Image>"), "video": ("<Video>", "</Video>")}


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Prompt format of a chat model: texts around the parts of a conversation, as pairs (before, after)."""

    system: tuple[str, str]
    """Texts around the system text and the instruction."""
    instruction_gap: str
    """Text that always follows an instruction."""
    media: tuple[str, str]
    question: tuple[str, str]
    answer_header: str
    """Text after a question, with which a prompt ends."""
    answer: tuple[str, str]
    """Texts around an answer, which are trained on too: from the second, the model learns to stop."""
    turn_separator: str = ""
    """Text between an answer and the next turn, not trained on."""
    shared_marker: str = ""
    """Text that ends an answer and also begins the next turn; it is written only once."""
    has_media_in_question: bool = False
    """True if the first question, even if empty, is in the media's turn; questions and answers are then stripped."""
    has_question_in_instruction: bool = False
    """True if the Q-Former reads the first question after the instruction."""
    has_timestamps: bool = False
    """True if VideoChat2's training states the frames' times: its data sets' `add_second_msg`, not its configs'."""
    should_strip: bool = True
    """True if white space before the media and before the first turn is removed."""
    forbidden_texts: tuple[str, ...] = ()
    """Strings that no text of a sample may contain, because they would end or begin a turn."""


PROMPT_FORMATS: dict[FormatName, PromptFormat] = {
    "mistral": PromptFormat(
        system=("", ""),
        instruction_gap=" ",
        media=("[INST] ", " [/INST]"),
        question=(" [INST] ", " [/INST]"),
        answer_header="",
        answer=(" ", " </s>"),
        forbidden_texts=("[INST]", "[/INST]", "</s>"),
    ),
    # VideoChat2 also trains on its role headers; upstream says that both ways work (Ask-Anything, issue 152).
    "vicuna": PromptFormat(
        system=("", ""),
        instruction_gap=" ",
        media=("###Human: ", " "),
        question=("###Human: ", " "),
        answer_header="###Assistant:",
        answer=(" ", " ###"),
        shared_marker="###",
        has_question_in_instruction=True,
        has_timestamps=True,
        should_strip=False,
        forbidden_texts=("###",),
    ),
    "phi3": PromptFormat(
        system=("<|system|>\n", "<|end|>\n"),
        instruction_gap="",
        media=("<|user|>\n", "\n"),
        question=("<|user|>\n", "<|end|>\n"),
        answer_header="<|assistant|>\n",
        answer=("", "<|end|>"),
        turn_separator="\n",
        has_media_in_question=True,
        forbidden_texts=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
}


def render_prompt(
    name: FormatName,
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    media_token_id: int,
    num_media_tokens: int,
    seconds: Sequence[float] = (),
    *,
    timestamps: bool = True,
    include_answer: bool = True,
) -> RenderedConversation:
    """Render a conversation in this prompt format; without `include_answer`, only up to the start of the last answer.

    A caption without a question directly follows the media, as upstream. Conversations of kind `text` have no media
    turn (as in upstream's HD). If there are `seconds`, and `has_timestamps` is true, the prompt states them as the
    times of the video's frames. Raises `DitLoraError` if a boundary is inside a token (see `spans.tokenize_spans`).
    """
    style = PROMPT_FORMATS[name]
    system, instruction = conversation.system, conversation.turns[0].instruction
    # Upstream asserts that a system text ends with white space.
    if system and not system[-1].isspace():
        system += " "
    preface = system + (instruction + style.instruction_gap if instruction else "")
    if preface:
        preface = style.system[0] + preface + style.system[1]
    if conversation.kind == "text" and not (conversation.turns[0].question or style.has_media_in_question):
        # The answer begins with a space too; upstream's two spaces are a single token.
        preface = preface.rstrip()
    before, after = [TextSpan(preface, "fixed")], list[TextSpan]()
    if conversation.kind == "text":
        # Without media nothing splits the text, so it is tokenised as a whole.
        after, before = before, after
    else:
        start, end = _MARKERS[conversation.kind]
        timing = ""
        if timestamps and conversation.kind == "video" and seconds:
            # As in video_utils.py. Python prints 1.0 and not 1, which changes the tokens.
            listed = ", ".join(str(round(second, 1)) for second in seconds)
            timing = f" The video contains {len(seconds)} frames sampled at {listed} seconds."
        before.append(TextSpan(style.media[0] + start, "fixed"))
        after.append(TextSpan(end + timing + style.media[1], "fixed"))
    for index, turn in enumerate(conversation.turns):
        is_last = index == len(conversation.turns) - 1
        # The turn that holds the media is already open, so its question does not begin a new one.
        opened = style.has_media_in_question and index == 0 and conversation.kind != "text"
        # A prompt lacks only the last turn's answer; earlier answers are part of it.
        after += _build_turn_spans(style, turn, index, is_open=opened, include_answer=include_answer or not is_last)
    if style.should_strip:
        before, after = _strip_spans(before), _strip_spans(after)
    pieces = tokenize_spans(tokenizer, before)
    if conversation.kind != "text":
        pieces.append(TokenPiece((media_token_id,) * num_media_tokens, "media"))
    pieces += tokenize_spans(tokenizer, after)
    if tokenizer.bos_token_id is not None:
        # One BOS token for the whole prompt, as upstream adds it.
        pieces.insert(0, TokenPiece((tokenizer.bos_token_id,), "fixed"))
    return RenderedConversation(tuple(pieces))


def build_instruction(name: FormatName, conversation: Conversation) -> str:
    """Text that the Q-Former reads about a conversation; may be empty.

    It is the first turn's instruction, with the question if the format is `vicuna`.
    """
    style = PROMPT_FORMATS[name]
    turn = conversation.turns[0]
    if not turn.instruction:
        return ""
    question = style.instruction_gap + turn.question if style.has_question_in_instruction else ""
    return (turn.instruction + question).strip()


def _build_turn_spans(
    style: PromptFormat, turn: Turn, index: int, *, is_open: bool, include_answer: bool
) -> list[TextSpan]:
    question, answer = turn.question, turn.answer
    if style.has_media_in_question:
        # In this format, upstream strips both.
        question, answer = question.strip(), answer.strip()
    spans = [TextSpan(style.answer_header, "fixed")]
    if question or style.has_media_in_question:
        before = "" if is_open else style.question[0]
        spans = [
            TextSpan(before, "fixed"),
            TextSpan(question, "question"),
            TextSpan(style.question[1], "fixed"),
            *spans,
        ]
    # The end of the previous answer may also begin this turn, and is written once (Vicuna's ###).
    if index:
        spans[0] = TextSpan(style.turn_separator + spans[0].text.removeprefix(style.shared_marker), "fixed")
    if include_answer:
        spans.append(TextSpan(style.answer[0] + answer + style.answer[1], "answer"))
    return spans


def _strip_spans(spans: list[TextSpan]) -> list[TextSpan]:
    """Drop empty spans at the start of a prompt, and the white space before the first remaining one."""
    spans = [span for span in spans if span.text]
    if spans:
        spans[0] = TextSpan(spans[0].text.lstrip(), spans[0].part)
    return spans
