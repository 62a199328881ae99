"""Texts that a model's tokenizer would read as the beginning or end of a turn."""

import re
from functools import lru_cache
from typing import Any

from dit_lora.data.chat.conversation import Conversation, whole_text
from dit_lora.errors import DitLoraError


@lru_cache(maxsize=8)
def control_pattern(tokenizer: Any, marks: tuple[str, ...] = ()) -> re.Pattern[str]:
    """Return a pattern of all that a text must not hold.

    That is the tokenizer's special tokens, and the marks of a prompt format that has plain words for turns.
    """
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    every = {*special, *map(str, tokenizer.all_special_tokens), *marks} - {""}
    # The longest come first, so that each is named whole.
    return re.compile(
        "|".join(map(re.escape, sorted(every, key=lambda token: (-len(token), token))))
    )


def refuse_control(conversation: Conversation, pattern: re.Pattern[str]) -> None:
    """Raise `DitLoraError` with every control token that the texts of a sample hold.

    They would be learned as ends of answers or as turns of the other side, where they are words of a text.
    """
    if not pattern.pattern:
        return
    text = whole_text(conversation.system, conversation.turns)
    held = list(dict.fromkeys(pattern.findall(text)))
    if held:
        raise DitLoraError(
            f"its text holds {', '.join(held)}, which this model's prompts use for turns and ends; write it otherwise, "
            "or leave such samples out with data.rejects=skip"
        )
