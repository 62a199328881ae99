"""Finds text in a sample that a model's tokenizer would read as the beginning or end of a turn."""

import re
from functools import lru_cache
from typing import Any

from dit_lora.data.chat.conversation import Conversation, join_texts
from dit_lora.errors import DitLoraError


@lru_cache(maxsize=8)
def build_control_pattern(tokenizer: Any, turn_markers: tuple[str, ...] = ()) -> re.Pattern[str]:
    """Build a regular expression that matches the control tokens which texts of conversations must not contain.

    It matches the tokenizer's special tokens, and `turn_markers`: turn markers of a prompt format that are ordinary
    text.
    """
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    texts = {*special, *map(str, tokenizer.all_special_tokens), *turn_markers} - {""}
    # The longest come first, because an alternation takes the first match, not the longest.
    return re.compile("|".join(map(re.escape, sorted(texts, key=lambda token: (-len(token), token)))))


def check_no_control_tokens(conversation: Conversation, pattern: re.Pattern[str]) -> None:
    """Raise `DitLoraError` that lists every control token in the texts of a sample.

    The model would learn them as ends of answers or as turns of the other side, although they are part of a text.
    """
    if not pattern.pattern:
        return
    control_tokens = list(dict.fromkeys(pattern.findall(join_texts(conversation.system, conversation.turns))))
    if control_tokens:
        raise DitLoraError(
            f"its text contains {', '.join(control_tokens)}, which this model uses for turns and ends; change "
            "it, or set data.rejects=skip to leave such samples out"
        )
