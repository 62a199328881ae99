"""The verb `dit-lora schema`: what a recipe may say, as JSON Schema."""

import json

from dit_lora.terminal import echo

EXAMPLES = {"schema": ("schema > schema.json",)}


def schema() -> None:
    """Print the JSON Schema of recipes, with which editors complete and check them."""
    from dit_lora.config.load import recipe_schema

    echo(json.dumps(recipe_schema(), indent=2))
