"""Parses one record of an annotation file into turns about at most one media file, and lists all its faults.

Formats: VideoChat2's (`QA`); `messages` of TRL, axolotl and LLaMA-Factory, whose content is text or parts;
LLaVA's (`conversations`). A record of any format may be text without media.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dit_lora.data.chat.conversation import ConversationKind, Turn, join_texts, trim_answer
from dit_lora.data.media.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from dit_lora.data.sources.caption_text import MAX_CAPTION_CHARS, has_lone_surrogate, is_blank

_MEDIA_PLACEHOLDER = re.compile("<(?:image|video)>")
_RESERVED_MARKERS = re.compile(r"</?Video>|</?Image>|\[/?INST\]|</s>|<image>|<video>")
"""Markers that occur in the prompts of many models; module `control` finds those of the trained model."""
_MAX_CONVERSATION_CHARS = 10 * MAX_CAPTION_CHARS
"""Maximum characters of all turns together, so that a tokenizer need not count more; then `chat.max_tokens` holds."""
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_MEDIA_KEYS: dict[str, ConversationKind] = {"image": "image", "images": "image", "video": "video", "videos": "video"}
_FILE_KEYS = ("path", "url")
_MEDIA_SUFFIX_PATTERN = re.compile("|".join(map(re.escape, (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES))) + "$")


@dataclass
class ChatRecord:
    """A conversation as read from one annotation record; if it has faults, as much as could be read."""

    kind: ConversationKind = "text"
    file: str | None = None
    """The media file as named in the record."""
    turns: tuple[Turn, ...] = ()
    is_independent: bool = False
    system: str = ""
    start: float | None = None
    end: float | None = None
    faults: list[tuple[str, str]] = field(default_factory=list)
    """Codes and messages."""

    def add_fault(self, code: str, message: str) -> None:
        """Add a fault of a conversation, unless it was added before."""
        if (code, message) not in self.faults:
            self.faults.append((code, message))


def parse_record(record: object) -> ChatRecord:
    """Read a conversation from an annotation record, in the format that its keys indicate."""
    sample = ChatRecord()
    if not isinstance(record, Mapping):
        sample.add_fault("record_type", f"it is of type {_type_name(record)}, not an object")
        return sample
    media: list[tuple[ConversationKind, str]] = []
    for key, kind in _MEDIA_KEYS.items():
        value = record.get(key)
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and name.strip():
                media.append((kind, name))
            elif name is not None:
                sample.add_fault("record_type", f"its {key} must be a file's name; got {_shorten_repr(name)}")
    if "QA" in record:
        _read_question_answers(record["QA"], sample)
        sample.is_independent = True
    elif "messages" in record or "conversations" in record:
        key = "messages" if "messages" in record else "conversations"
        _MessageReader(sample, record[key], key, media).read(record.get("system"))
    else:
        keys = ", ".join(map(str, record)) or "none"
        sample.add_fault("record_keys", f"it has none of the keys QA, messages, conversations; it has {keys}")
    _set_record_media(record, sample, media)
    _read_time_range(record, sample)
    _check_texts(sample)
    return sample


def _set_record_media(
    record: Mapping[Any, Any], sample: ChatRecord, media: list[tuple[ConversationKind, str]]
) -> None:
    # The same file may be named by a key and again by a part of a message.
    media = list(dict.fromkeys(media))
    if len(media) > 1:
        names = ", ".join(name for _, name in media)
        sample.add_fault("several_media", f"it names {len(media)} media, {names}; a sample has at most one")
    elif media:
        sample.kind, sample.file = media[0]
    else:
        # With a misspelt key, a sample about a file would silently become a text sample.
        keys_read = {*_MEDIA_KEYS, "QA", "messages", "conversations", "system", "id"}
        for key, value in record.items():
            if key not in keys_read and isinstance(value, str) and _MEDIA_SUFFIX_PATTERN.search(value.lower()):
                sample.add_fault(
                    "record_keys", f"its {key} names a file, {value}, but files belong under image or video"
                )


def _read_question_answers(qa: object, sample: ChatRecord) -> None:
    """Read a conversation in VideoChat2's format: a list of questions `q`, answers `a` and instructions `i`."""
    if not isinstance(qa, list):
        sample.add_fault("record_type", f"its QA is of type {_type_name(qa)}, not a list")
        return
    if not qa:
        sample.add_fault("no_answer", "its QA is empty")
    turns = []
    for number, turn in enumerate(qa, start=1):
        location = f"QA {number}"
        if not isinstance(turn, Mapping):
            sample.add_fault("record_type", f"{location} is of type {_type_name(turn)}, not an object")
            continue
        missing_keys = [key for key in ("q", "a") if turn.get(key) is None]
        if missing_keys:
            sample.add_fault("record_keys", f"{location} lacks {' and '.join(missing_keys)}")
        texts = {key: turn[key] for key in ("q", "a", "i") if turn.get(key) is not None}
        for key, text in texts.items():
            if not isinstance(text, str):
                sample.add_fault("record_type", f"{key} of {location} is of type {_type_name(text)}, not text")
        if not missing_keys and all(isinstance(text, str) for text in texts.values()):
            # Keep white space: VideoChat2 tokenises these texts unchanged.
            # The same instructions occur in many records, so intern them.
            turns.append(Turn(turn["q"], turn["a"], sys.intern(texts.get("i", ""))))
            if is_blank(turns[-1].answer):
                sample.add_fault("answer_empty", f"the answer of {location} is empty")
    sample.turns = tuple(turns)


@dataclass
class _MessageReader:
    """Reads a conversation from a list of messages with roles."""

    _sample: ChatRecord
    _messages: object
    _key: str
    _media: list[tuple[ConversationKind, str]]
    _placeholder_turns: list[int] = field(default_factory=list)
    """For each placeholder or part for media, the number of the turns before it."""
    _num_inline_media: int = 0
    """Number of media that are named in a part."""
    _turns: list[Turn] = field(default_factory=list)
    _question: str | None = None

    def read(self, system: object) -> None:
        """Read the turns and the system text from messages; a system message replaces the record's system text."""
        sample = self._sample
        if isinstance(system, str):
            sample.system = system.strip()
        elif system is not None:
            sample.add_fault("record_type", f"its system is of type {_type_name(system)}, not text")
        if not isinstance(self._messages, list):
            sample.add_fault("record_type", f"its {self._key} are of type {_type_name(self._messages)}, not a list")
            return
        answered = False
        for number, message in enumerate(self._messages, start=1):
            # Read every message, even after a fault, so that all faults are listed.
            answered |= self._read_message(number, message) == "assistant"
        if not answered:
            sample.add_fault("no_answer", "it has no message of the assistant")
        elif self._question is not None:
            sample.add_fault("roles_order", "its last question has no answer")
        sample.turns = tuple(self._turns)
        self._check_placeholders()

    def _read_message(self, number: int, message: object) -> str | None:
        """Read one message of a conversation and return its role; None if the role is missing or unknown."""
        location, sample = f"message {number}", self._sample
        if not isinstance(message, Mapping):
            sample.add_fault("record_type", f"{location} is of type {_type_name(message)}, not an object")
            return None
        # LLaVA names the keys from and value, other formats role and content.
        keys = ("from", "value") if "from" in message else ("role", "content")
        missing_keys = [key for key in keys if message.get(key) is None]
        if missing_keys:
            sample.add_fault("record_keys", f"{location} lacks {' and '.join(missing_keys)}")
        role_name = message.get(keys[0])
        role = _ROLES.get(role_name) if isinstance(role_name, str) else None
        if role is None and role_name is not None:
            reason = f"{location} is of the role {_shorten_repr(role_name)}; those read are {', '.join(_ROLES)}"
            sample.add_fault("role_unknown", reason)
        text = "" if missing_keys else self._extract_text(message[keys[1]], location, role)
        if role == "system":
            # Prompt formats have room for a system text only at the beginning.
            if number > 1:
                sample.add_fault("roles_order", f"{location} is a system message; only the first message may be")
            sample.system = text
        elif role == "user":
            if self._question is not None:
                sample.add_fault("roles_order", f"{location} is a question after a question")
            self._question = text
        elif role == "assistant":
            # An answer ends the turn.
            if self._question is None:
                sample.add_fault("roles_order", f"{location} is an answer without a question before it")
            if is_blank(text) and not missing_keys:
                sample.add_fault("answer_empty", f"the answer of {location} is empty")
            self._turns.append(Turn(self._question or "", text))
            self._question = None
        return role

    def _extract_text(self, content: object, location: str, role: str | None) -> str:
        """Text of a message; in questions, placeholders for media are removed."""
        if isinstance(content, str):
            return self._trim_message(self._strip_placeholders(content, role), role)
        if not isinstance(content, list):
            message = f"the content of {location} is of type {_type_name(content)}, neither text nor parts"
            self._sample.add_fault("record_type", message)
            return ""
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text" and isinstance(part.get("text"), str):
                texts.append(self._strip_placeholders(part["text"], role))
            elif kind in ("image", "video"):
                self._add_media_part(part, kind, location, role)
            else:
                message = f"{location} has a part that is not text, an image or a video: {_shorten_repr(part)}"
                self._sample.add_fault("record_type", message)
        return self._trim_message("".join(texts), role)

    @staticmethod
    def _trim_message(text: str, role: str | None) -> str:
        """Remove surrounding white space from a message's text; an answer keeps its indentation."""
        return trim_answer(text) if role == "assistant" else text.strip()

    def _strip_placeholders(self, text: str, role: str | None) -> str:
        """Remove the placeholders for media from a question, and note their positions."""
        if role != "user":
            return text
        self._placeholder_turns += [len(self._turns)] * len(_MEDIA_PLACEHOLDER.findall(text))
        return _MEDIA_PLACEHOLDER.sub("", text)

    def _add_media_part(self, part: Mapping[Any, Any], kind: str, location: str, role: str | None) -> None:
        if role != "user":
            self._sample.add_fault("placeholder", f"{location} has an image or video; only questions may have one")
        self._placeholder_turns.append(len(self._turns))
        file_name = next((part[key] for key in (kind, *_FILE_KEYS) if part.get(key)), None)
        if isinstance(file_name, str):
            self._media.append((_MEDIA_KEYS[kind], file_name))
            self._num_inline_media += 1
        elif file_name is not None:
            message = f"the {kind} of {location} must be a file's name; got {_shorten_repr(file_name)}"
            self._sample.add_fault("record_type", message)

    def _check_placeholders(self) -> None:
        # Compare only the media that no part names: they are under the record's own keys.
        num_unnamed = len(self._placeholder_turns) - self._num_inline_media
        num_named = len(self._media) - self._num_inline_media
        if num_unnamed > num_named and len(self._media) <= 1:
            description = f"{num_unnamed} places for media such as <image> or <video>"
            self._sample.add_fault("placeholder", f"its text has {description}, and its keys name {num_named}")
        # 0 is the first turn; every other number is a later one.
        if any(self._placeholder_turns):
            self._sample.add_fault(
                "placeholder", "its image or video belongs to a later question; only the first may have one"
            )


def _read_time_range(record: Mapping[Any, Any], sample: ChatRecord) -> None:
    bounds = {key: record[key] for key in ("start", "end") if record.get(key) is not None}
    if not bounds:
        return
    if sample.kind != "video" and not sample.faults:
        sample.add_fault("time_range", f"it has a {' and '.join(bounds)}, and no video")
    for key, value in bounds.items():
        # bool is a subclass of int, but `true` is not a time.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            sample.add_fault("record_type", f"its {key} must be seconds from 0 on; got {_shorten_repr(value)}")
            return
    sample.start, sample.end = bounds.get("start"), bounds.get("end")
    if sample.end is not None and (sample.start or 0) >= sample.end:
        sample.add_fault("time_range", f"it starts at {sample.start or 0:g} s and ends at {sample.end:g} s")


def _check_texts(sample: ChatRecord) -> None:
    text = join_texts(sample.system, sample.turns)
    if len(text) > _MAX_CONVERSATION_CHARS:
        message = f"its text has {len(text):,} characters, more than the limit of {_MAX_CONVERSATION_CHARS:,}"
        sample.add_fault("too_long", message)
    if has_lone_surrogate(text):
        message = "its text holds half of a character, a surrogate without the other, as \\ud83d"
        sample.add_fault("caption_not_text", message)
    reserved = _RESERVED_MARKERS.findall(text)
    if reserved:
        markers = ", ".join(dict.fromkeys(reserved))
        message = f"its text contains {markers}, which prompts use for turns and media; change it"
        sample.add_fault("caption_reserved_token", message)
    # Without media, an empty question leaves nothing that the answer could refer to.
    first_turn = sample.turns[0] if sample.turns else None
    first_text = first_turn.question + first_turn.instruction if first_turn else ""
    has_question = sample.kind != "text" or first_turn is None or not is_blank(first_text)
    if not has_question and not sample.faults:
        sample.add_fault("question_empty", "it has no image or video, and its first question is empty")


def _type_name(value: object) -> str:
    return type(value).__name__


def _shorten_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
