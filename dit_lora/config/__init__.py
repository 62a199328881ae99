"""The recipe: its sections, how it is read, and the recipes of the wheel."""

from dit_lora.config.recipe import LadderConfig

__all__ = ["LadderConfig"]
