"""Rules for captions that come from a model: the tokens that its text encoder reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_lora.errors import DitLoraError

if TYPE_CHECKING:
    from dit_lora.families.base import TextLimit


@dataclass(frozen=True)
class CaptionRules:
    """Additional rules for captions: a text encoder's token limit, and a trigger word that each must contain."""

    tokenizer: Any = None
    max_tokens: int | None = None
    trigger: str | None = None


def load_text_rules(recipe: str | Path | None, trigger: str | None) -> CaptionRules:
    """The rules of a recipe's text encoder, and of a trigger word. Raises as `load_text_limit` does."""
    limit = load_text_limit(recipe)
    return CaptionRules(trigger=trigger) if limit is None else CaptionRules(limit.tokenizer, limit.max_tokens, trigger)


def load_text_limit(recipe: str | Path | None) -> "TextLimit | None":
    """The token limit of the recipe's text encoder; None without a recipe.

    Raises:
        DitLoraError: The recipe trains without captions.
    """
    if recipe is None:
        return None
    # These load torch, which pages without a limit do not need.
    from dit_lora.config.load import load_recipe
    from dit_lora.families import CHAT_FAMILIES, get_family

    # Only its model and text encoder matter here.
    loaded = load_recipe(recipe)
    if loaded.model.family in CHAT_FAMILIES:
        raise DitLoraError(
            f"{recipe} trains a chat model, which does not use captions; give the recipe of another model"
        )
    limit: TextLimit | None = get_family(loaded.model.family).open(loaded.model).encoders.load_text_limit()
    if limit is None:
        raise DitLoraError(f"{recipe} trains on classes, not on captions; give another recipe")
    return limit
