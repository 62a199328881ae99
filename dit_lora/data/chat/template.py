"""Conversations in a checkpoint's own chat template, with the answers found in what it writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from dit_lora.data.chat.conversation import Conversation, trim_answer
from dit_lora.data.chat.rendered import Rendered
from dit_lora.data.chat.spans import Span, tokenized
from dit_lora.errors import DitLoraError

Message = dict[str, Any]


class Templated(Protocol):
    """A processor or a tokenizer with a chat template."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class MediaText:
    """Text that the template writes for the media, and what the processor would put there for these frames.

    An example is `<|vision_start|><|video_pad|><|vision_end|>`, and the same with the pad repeated and
    timestamps between.
    """

    placeholder: str
    expansion: str


def render_template(
    template: Templated,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    media: MediaText | None,
    *,
    answered: bool = True,
) -> Rendered:
    """Render a conversation as the template writes it; unless `answered`, the prompt for the last answer.

    The media come first in the first question; `media` is None for kind `text`. An answer is what the
    template adds to the prompt of its turn, learned up to and including the first special token after it,
    its end of turn. What follows the last answer is left out. A template that ends no answer gets the
    tokenizer's end of text after the last one, because a model would not learn to stop there. White space
    around questions and answers is removed. A beginning-of-text token is added where the template writes
    none and the tokenizer would.

    Raises `DitLoraError` if the template refuses the conversation, leaves out the system text or an answer,
    changes what it wrote of earlier turns, does not write the placeholder exactly once, or if the text
    holds the placeholder or its tokens elsewhere.
    """
    spans = _spans(template, conversation, _ends(tokenizer), answered)
    spans = _expanded(spans, media)
    text = "".join(span.text for span in spans)
    bos = tokenizer.bos_token
    # A template that writes the beginning-of-text token must not get a second one.
    written = isinstance(bos, str) and text.startswith(bos)
    pieces = tokenized(tokenizer, spans, add_special_tokens=not written)
    rendered = Rendered(tuple(pieces))
    _refuse_stray_media(rendered, tokenizer)
    return rendered


def _spans(
    template: Templated, conversation: Conversation, ends: tuple[str, list[str]], answered: bool
) -> list[Span]:
    """Write a conversation turn by turn, each text a beginning of the next."""
    system = conversation.system
    messages = [_message("system", system)] if system else []
    spans, written = list[Span](), ""
    for index, turn in enumerate(conversation.turns):
        question, answer = turn.question.strip(), trim_answer(turn.answer)
        last = index == len(conversation.turns) - 1
        kind = conversation.kind if index == 0 else "text"
        messages.append(_message("user", question, kind))
        # Inference sees this text before an answer, so the answer is what is written beyond it.
        prompt = _written(template, messages, generation=True)
        spans += _asked(_beyond(written, prompt, "an earlier turn"), question)
        if not index and system.strip() not in prompt:
            raise DitLoraError(
                "the chat template leaves out the system text; set chat.system and `system` of the samples to "
                f"nothing, or put it into the questions; got {system[:80]!r}"
            )
        if last and not answered:
            break
        messages.append(_message("assistant", answer))
        written = _written(template, messages, generation=False)
        reply = _beyond(prompt, written, "the prompt of an answer")
        spans += _answered(reply, answer, ends, last=last)
    return spans


def _written(template: Templated, messages: Sequence[Message], *, generation: bool) -> str:
    from jinja2 import TemplateError

    try:
        return str(
            template.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation
            )
        )
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DitLoraError(f"the chat template refuses messages of {roles}: {error}") from error


def _beyond(before: str, text: str, what: str) -> str:
    if not text.startswith(before):
        same = next(
            (i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(text)
        )
        raise DitLoraError(
            f"the chat template changes {what} once more is said, so training would not see what inference "
            f"does: {before[same : same + 60]!r} became {text[same : same + 60]!r}; use a template that only "
            "appends, or samples of one turn"
        )
    return text[len(before) :]


def _answered(reply: str, answer: str, ends: tuple[str, list[str]], *, last: bool) -> list[Span]:
    if answer not in reply:
        answer = answer.strip()  # templates may trim what they are given, and inference sees that
    if answer not in reply:
        raise DitLoraError(
            f"the chat template writes {reply[:80]!r} for the answer {answer[:80]!r}; it must not rewrite answers"
        )
    stop = reply.index(answer) + len(answer)
    end_of_text, special = ends
    after_ends = []
    for end in special:
        at = reply.find(end, stop)
        if at >= 0:
            after_ends.append(at + len(end))
    if after_ends:
        stop = min(after_ends)
    elif last:
        reply = reply[:stop] + end_of_text
        stop = len(reply)
    rest = "" if last else reply[stop:]
    return [Span(reply[:stop], "answer"), Span(rest, "fixed")]


def _message(role: str, text: str, kind: str = "text") -> Message:
    content: list[dict[str, str]] = [] if kind == "text" else [{"type": kind}]
    if text or not content:
        content.append({"type": "text", "text": text})
    return {"role": role, "content": content}


def _asked(prompt: str, question: str) -> list[Span]:
    # The question is the last of its text in the prompt: earlier turns may repeat it.
    at = prompt.rfind(question) if question else -1
    if at < 0:
        return [Span(prompt, "fixed")]
    after = at + len(question)
    return [Span(prompt[:at], "fixed"), Span(question, "question"), Span(prompt[after:], "fixed")]


def _expanded(spans: Sequence[Span], media: MediaText | None) -> list[Span]:
    """Return the spans with the placeholder's expansion as a span of its own."""
    if media is None:
        return list(spans)
    written = sum(span.text.count(media.placeholder) for span in spans)
    if written != 1:
        raise DitLoraError(
            f"the chat template and the text hold the media's placeholder {media.placeholder!r} {written} times; it "
            "must stand there once, and never in a question or an answer"
        )
    expanded = []
    for span in spans:
        before, placeholder, after = span.text.partition(media.placeholder)
        expanded.append(Span(before, span.part))
        if placeholder:
            expanded += [Span(media.expansion, "media"), Span(after, span.part)]
    return expanded


def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[str]]:
    """Return the end of text, and all special tokens."""
    eos = tokenizer.eos_token
    if not isinstance(eos, str):
        raise DitLoraError(
            "the tokenizer has no eos_token, so a model cannot learn to end an answer"
        )
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return eos, sorted({eos, *special})


def _refuse_stray_media(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `DitLoraError` if the media's tokens stand elsewhere: the model counts them, one set for each medium."""
    added = set(tokenizer.added_tokens_decoder)
    media = {token for p in rendered.pieces if p.part == "media" for token in p.ids} & added
    stray = {token for p in rendered.pieces if p.part != "media" for token in p.ids} & media
    if stray:
        names = ", ".join(str(tokenizer.added_tokens_decoder[token]) for token in sorted(stray))
        raise DitLoraError(f"the text holds the media's own tokens: {names}; remove them from it")
