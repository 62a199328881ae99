"""Show how a run's recipe differs from the shipped recipe that it started from."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from dit_lora.config.catalog import load_packaged_recipes
from dit_lora.config.recipe import Recipe
from dit_lora.config.validation import rename_old_keys
from dit_lora.errors import DitLoraError
from dit_lora.report.run.history import ensure_dict

_RUN_SPECIFIC_KEYS = ("data.path", "data.cache", "model.path", "run.dir")
"""Keys that every run must set, which are not shown as changes."""


@dataclass(frozen=True)
class RecipeDiff:
    """Difference of a run's recipe from a shipped one.

    It has the shipped recipe's name, and changed values as (key, shipped value, this run's value).
    """

    name: str
    changed: list[tuple[str, str, str]]


def compare_with_shipped(config: Mapping[str, Any], file: str | None) -> RecipeDiff | None:
    """Compare a run's recipe with the shipped recipe of the file's name, else with the closest one for the same model.

    `config` is a complete recipe as in config.yaml, `file` the name of the YAML that it was read from. None if no
    shipped recipe fits.
    """
    model = ensure_dict(config.get("model"))
    # The last component: `Wan-AI/Wan2.1` and a local copy in `/models/Wan2.1` are the same model.
    path = PurePosixPath(str(model.get("path", ""))).name.lower()
    candidates: list[tuple[bool, int, RecipeDiff]] = []
    for name, shipped in _load_family_recipes(str(model.get("family"))).items():
        shipped_model = ensure_dict(shipped.get("model"))
        # A recipe may be copied to another folder, with or without its family in the file name.
        stems = (name.rpartition("/")[2], name.replace("/", "_"))
        same_file = file is not None and PurePosixPath(file).stem in stems
        same_model = PurePosixPath(str(shipped_model.get("path", ""))).name.lower() == path
        if same_file or same_model:
            changed = _list_changes(shipped, config)
            if changed is not None:
                candidates.append((not same_file, len(changed), RecipeDiff(name, changed)))
    # Prefer the same file name, then the fewest changes.
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def flatten_section(section: Any, parent: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys of nested mappings, with their values as text."""
    if isinstance(section, dict) and section:
        for key, value in section.items():
            yield from flatten_section(value, f"{parent}.{key}" if parent else str(key))
    else:
        as_yaml = section is None or isinstance(section, bool)
        yield parent, json.dumps(section) if as_yaml else format_value(section) or "none"


def format_value(value: Any) -> str:
    """Nested plain values as text, such as `cause: data; offenders: sample: a; rank: 0`."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {format_value(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        # One text per line if any contains spaces, else all on one line.
        texts = [format_value(inner) for inner in value]
        return ("\n" if any(" " in text for text in texts) else ", ").join(texts)
    return str(value)


@cache
def _load_family_recipes(family: str) -> dict[str, dict[str, Any]]:
    """The shipped recipes of a family by name; empty if the installation lacks them."""
    try:
        recipes = load_packaged_recipes()
    except DitLoraError:
        return {}
    # Search the text first: parsing all recipes takes half a second.
    line = re.compile(rf"^  family: *{re.escape(family)}\b", re.MULTILINE)
    values_by_name = {}
    for recipe in recipes:
        if line.search(recipe.text):
            # Another package may have incomplete ones.
            with suppress(DitLoraError):
                recipe.require_complete_recipe()
                values_by_name[recipe.name] = recipe.values
    return values_by_name


def _list_changes(shipped: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, str, str]] | None:
    """Recipe keys whose values differ, including defaults; None if this version cannot read the shipped recipe."""
    try:
        shipped_recipe = Recipe.model_validate(shipped).model_dump(mode="json")
    except ValidationError:
        return None
    shipped_values = dict(flatten_section(shipped_recipe))
    # The run may be of an earlier version.
    validation = config.get("validation")
    renamed = {"validation": rename_old_keys(validation)} if isinstance(validation, dict) else {}
    run_values = dict(flatten_section({**config, **renamed}))
    # In the order of this run's recipe, then what only the shipped one has.
    keys = [*run_values, *(key for key in shipped_values if key not in run_values)]
    return [
        (key, shipped_values.get(key, "not given"), run_values.get(key, "not given"))
        for key in keys
        # A missing key and an explicit null are the same.
        if key not in _RUN_SPECIFIC_KEYS and shipped_values.get(key, "null") != run_values.get(key, "null")
    ]
