"""Renders conversations with a checkpoint's own chat template, and finds the answers in the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from dit_lora.data.chat.conversation import Conversation, trim_answer
from dit_lora.data.chat.rendered import RenderedConversation
from dit_lora.data.chat.spans import TextSpan, tokenize_spans
from dit_lora.errors import DitLoraError

Message = dict[str, Any]


class HasChatTemplate(Protocol):
    """Interface of a processor or tokenizer with a chat template."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any: ...


@dataclass(frozen=True, slots=True)
class MediaPlaceholderText:
    """Text that a chat template writes for media, and the text by which the processor would replace it.

    An example is `<|vision_start|><|video_pad|><|vision_end|>`, and the same with the pad token repeated and
    timestamps in between.
    """

    placeholder: str
    expansion: str


def render_template(
    template: HasChatTemplate,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    media: MediaPlaceholderText | None,
    *,
    include_answer: bool = True,
) -> RenderedConversation:
    """Render a conversation with the template; without `include_answer`, only the prompt for the last answer.

    The media come first in the first question; `media` is None for kind `text`. An answer is the text that the
    template adds to the prompt of its turn. It is trained on up to and including the first special token after
    it, the end of turn. Text after the last answer is dropped. If a template does not end answers, the
    tokenizer's end-of-text token is added after the last one, because the model would not learn to stop
    otherwise. White space around questions and answers is removed. A beginning-of-text token is added if the
    tokenizer would add one and the template does not write it.

    Raises:
        DitLoraError: The template refuses the conversation, leaves out the system text or an answer, changes
            earlier turns, or does not write the placeholder exactly once; or the text contains the placeholder
            or its tokens elsewhere.
    """
    eos = tokenizer.eos_token
    if not isinstance(eos, str):
        raise DitLoraError("the tokenizer has no eos_token, so a model cannot learn to end an answer")
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    spans = _build_spans(template, conversation, (eos, sorted({eos, *special})), include_answer)
    spans = _expand_placeholder(spans, media)
    text = "".join(span.text for span in spans)
    bos = tokenizer.bos_token
    # Do not add a second beginning-of-text token if the template writes one.
    has_bos = isinstance(bos, str) and text.startswith(bos)
    rendered = RenderedConversation(tuple(tokenize_spans(tokenizer, spans, add_special_tokens=not has_bos)))
    # The model counts media tokens per media file. Only tokens that were added to the vocabulary are checked: a
    # timestamp's digits are ordinary text.
    added = set(tokenizer.added_tokens_decoder)
    media_ids = {token for p in rendered.pieces if p.part == "media" for token in p.ids} & added
    stray = {token for p in rendered.pieces if p.part != "media" for token in p.ids} & media_ids
    if stray:
        names = ", ".join(str(tokenizer.added_tokens_decoder[token]) for token in sorted(stray))
        raise DitLoraError(f"the text holds the media's own tokens: {names}; remove them from it")
    return rendered


def _build_spans(
    template: HasChatTemplate, conversation: Conversation, end_tokens: tuple[str, list[str]], include_answer: bool
) -> list[TextSpan]:
    """Render a conversation turn by turn with a chat template; returns spans of text.

    `end_tokens` are the end-of-text token, and all special tokens.
    """
    system = conversation.system
    messages = [_make_message("system", system)] if system else []
    spans, text_so_far = list[TextSpan](), ""
    for index, turn in enumerate(conversation.turns):
        question, answer = turn.question.strip(), trim_answer(turn.answer)
        is_last = index == len(conversation.turns) - 1
        messages.append(_make_message("user", question, conversation.kind if index == 0 else "text"))
        # At inference the model sees this text before an answer, so the answer is the text after it.
        prompt = _apply_template(template, messages, add_generation_prompt=True)
        # Only the text that this turn adds; earlier text is in `spans` already.
        added = _remove_prefix(text_so_far, prompt, "an earlier turn")
        # Take the last occurrence of the question in the prompt: earlier turns may contain the same text.
        position = added.rfind(question) if question else -1
        if position < 0:
            spans.append(TextSpan(added, "fixed"))
        else:
            after = position + len(question)
            spans += [
                TextSpan(added[:position], "fixed"),
                TextSpan(question, "question"),
                TextSpan(added[after:], "fixed"),
            ]
        if not index and system.strip() not in prompt:
            raise DitLoraError(
                "the chat template does not use the system text; remove chat.system and the samples' `system`, "
                f"or put it into the questions; got {system[:80]!r}"
            )
        if is_last and not include_answer:
            break
        messages.append(_make_message("assistant", answer))
        text_so_far = _apply_template(template, messages, add_generation_prompt=False)
        reply = _remove_prefix(prompt, text_so_far, "the prompt of an answer")
        spans += _split_answer(reply, answer, end_tokens, is_last=is_last)
    return spans


def _apply_template(template: HasChatTemplate, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    from jinja2 import TemplateError

    try:
        return str(
            template.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt)
        )
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DitLoraError(f"the chat template refuses messages of {roles}: {error}") from error


def _remove_prefix(prefix: str, text: str, changed_part: str) -> str:
    if not text.startswith(prefix):
        start = next((i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), len(text))
        raise DitLoraError(
            f"the chat template changes {changed_part} when the conversation goes on, so training and "
            f"inference would differ: {prefix[start : start + 60]!r} became {text[start : start + 60]!r}; use "
            "a template that only appends, or samples of one turn"
        )
    return text[len(prefix) :]


def _split_answer(reply: str, answer: str, end_tokens: tuple[str, list[str]], *, is_last: bool) -> list[TextSpan]:
    """Split the text after a prompt into an answer with its end of turn, and the fixed text after it."""
    if answer not in reply:
        # Templates may trim answers, and inference sees the trimmed text.
        answer = answer.strip()
    if answer not in reply:
        raise DitLoraError(
            f"the chat template writes {reply[:80]!r} for the answer {answer[:80]!r}; a template must not "
            "change answers"
        )
    stop = reply.index(answer) + len(answer)
    end_of_text, special = end_tokens
    # Position after the first occurrence of each special token behind the answer.
    after_ends = []
    for end in special:
        position = reply.find(end, stop)
        if position >= 0:
            after_ends.append(position + len(end))
    if after_ends:
        stop = min(after_ends)
    # The template does not end its answers, so add the end of text.
    elif is_last:
        reply = reply[:stop] + end_of_text
        stop = len(reply)
    return [TextSpan(reply[:stop], "answer"), TextSpan("" if is_last else reply[stop:], "fixed")]


def _make_message(role: str, text: str, kind: str = "text") -> Message:
    """Build a message as chat templates expect it; media come before the text."""
    content: list[dict[str, str]] = [] if kind == "text" else [{"type": kind}]
    if text or not content:
        content.append({"type": "text", "text": text})
    return {"role": role, "content": content}


def _expand_placeholder(spans: Sequence[TextSpan], media: MediaPlaceholderText | None) -> list[TextSpan]:
    if media is None:
        return list(spans)
    num_placeholders = sum(span.text.count(media.placeholder) for span in spans)
    if num_placeholders != 1:
        raise DitLoraError(
            f"the chat template and the text hold the media's placeholder {media.placeholder!r} "
            f"{num_placeholders} times; it must appear once, and never in a question or an answer"
        )
    expanded = []
    for span in spans:
        # The placeholder may be inside a span, which is then split in three.
        before, placeholder, after = span.text.partition(media.placeholder)
        expanded.append(TextSpan(before, span.part))
        if placeholder:
            expanded += [TextSpan(media.expansion, "media"), TextSpan(after, span.part)]
    return expanded
