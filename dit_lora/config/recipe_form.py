"""A form of a recipe's keys that matter most, and the overrides that a filled form stands for."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dit_lora.config.load import build_recipe_schema, load_recipe
from dit_lora.errors import DitLoraError

FORM_KEYS = (
    *("model.path", "data.path", "data.frames", "data.height", "data.width", "lora.rank", "lora.alpha"),
    *("optim.groups.adapter.lr", "train.steps", "train.batch_size", "train.save_every", "train.seed"),
    *("validation.every", "validation.prompts"),
)
"""Keys that have a field; any other can be given as `key.path=value`."""


@dataclass(frozen=True)
class FormField:
    """A recipe key in the form."""

    key: str
    text: str
    """Its value in the recipe; empty for null, and one line for each text of a list."""
    description: str
    is_list: bool
    is_number: bool


def list_form_fields(recipe: Path) -> list[FormField]:
    """The fields of the form, with the values of a recipe."""
    values = load_recipe(recipe).model_dump(mode="json")
    fields = []
    for key in FORM_KEYS:
        value: Any = values
        for name in key.split("."):
            # A section may be null, as `lora` is where every weight is trained.
            value = value.get(name) if isinstance(value, dict) else None
        entry = _find_schema_entry(key)
        types = {entry.get("type"), *(option.get("type") for option in entry.get("anyOf", []))}
        text = "\n".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
        is_number = bool(types & {"integer", "number"})
        fields.append(FormField(key, text, entry.get("description", ""), "array" in types, is_number))
    return fields


def list_overrides(fields: list[FormField], values: Mapping[str, Any]) -> list[str]:
    """The overrides `key.path=value` of a form: only fields that differ from the recipe, then the other lines."""
    overrides = []
    for field in fields:
        text = str(values.get(field.key, field.text)).replace("\r\n", "\n").strip()
        if text == field.text.strip():
            continue
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        # JSON is YAML that needs no further quotes.
        if field.is_list:
            value = json.dumps(lines, ensure_ascii=False)
        elif not text:
            value = "null"
        else:
            # YAML takes 1e-4 for a text, and 1.0e-4 for a number.
            is_number = field.is_number and re.fullmatch(r"[-+]?\d+e[-+]?\d+", text, re.IGNORECASE)
            number = text.lower().replace("e", ".0e", 1)
            value = number if is_number else text if field.is_number else json.dumps(text, ensure_ascii=False)
        overrides.append(f"{field.key}={value}")
    other_lines = [line.strip() for line in str(values.get("overrides", "")).splitlines() if line.strip()]
    # A line without a key could be read as an option of the command.
    refused = next((line for line in other_lines if re.match(r"[a-z_]+(\.\w+)+=", line) is None), None)
    if refused is not None:
        raise DitLoraError(f"an override must be key.path=value, such as train.steps=20; got {refused[:80]!r}")
    return [*overrides, *other_lines]


@cache
def _find_schema_entry(key: str) -> dict[str, Any]:
    """The entry of a key in the recipe's JSON schema."""
    schema = build_recipe_schema()
    entry: dict[str, Any] = schema
    for name in key.split("."):
        entry = entry["properties"][name]
        # A section is a reference, or a choice between a reference and null.
        references = [option["$ref"] for option in (entry, *entry.get("anyOf", [])) if "$ref" in option]
        if references:
            entry = schema["$defs"][references[0].rpartition("/")[2]]
    return entry
