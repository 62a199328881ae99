"""Shows what a run's recipe changes of the shipped one that it started from."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from pydantic import ValidationError

from dit_lora.config.catalog import StockRecipe, recipe_names
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError
from dit_lora.report.run.history import mapping

_OWN = ("data.path", "data.cache", "model.path", "run.dir")
"""Keys that every run sets for itself: shown in its recipe, and no change."""


@dataclass(frozen=True)
class RecipeDiff:
    """The shipped recipe, and values as (key, shipped, this run's)."""

    name: str
    changed: list[tuple[str, str, str]]


def against_stock(config: Mapping[str, Any], file: str | None) -> RecipeDiff | None:
    """Compare with the shipped recipe of the file's name, else with the nearest for the same model; None if none fits.

    `config` is a whole recipe as config.yaml has it, `file` the name of the YAML that it was read from.
    """
    model = mapping(config.get("model"))
    path = PurePosixPath(str(model.get("path", ""))).name.lower()
    candidates: list[tuple[bool, int, RecipeDiff]] = []
    for name, shipped in _of_family(str(model.get("family"))).items():
        theirs = mapping(shipped.get("model"))
        same_file = file is not None and PurePosixPath(file).stem in _stems(name)
        same_model = PurePosixPath(str(theirs.get("path", ""))).name.lower() == path
        if same_file or same_model:
            changed = _changed(shipped, config)
            if changed is not None:
                candidates.append((not same_file, len(changed), RecipeDiff(name, changed)))
    return min(candidates, key=lambda one: one[:2])[2] if candidates else None


def flat(section: Any, parent: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values of nested mappings, in words."""
    if isinstance(section, dict) and section:
        for key, value in section.items():
            yield from flat(value, f"{parent}.{key}" if parent else str(key))
    else:
        as_yaml = section is None or isinstance(section, bool)
        yield parent, json.dumps(section) if as_yaml else in_words(section) or "none"


def in_words(value: Any) -> str:
    """Return nested plain values in words: `cause: data; offenders: sample: a; rank: 0`."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {in_words(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        words = [in_words(inner) for inner in value]
        return ("\n" if any(" " in text for text in words) else ", ").join(words)
    return str(value)


@cache
def _of_family(family: str) -> dict[str, dict[str, Any]]:
    """Return the shipped recipes of a family by name; none where the installation has lost them."""
    try:
        recipes = [StockRecipe.named(name) for name in recipe_names()]
    except DitLoraError:
        return {}
    # By the text first: reading all of them takes half a second.
    line = re.compile(rf"^  family: *{re.escape(family)}\b", re.MULTILINE)
    return {one.name: one.values for one in recipes if line.search(one.text)}


def _stems(name: str) -> set[str]:
    """Return what a recipe's file may be called: beside its family's others, or in a folder of its own."""
    return {name.rpartition("/")[2], name.replace("/", "_")}


def _changed(
    shipped: Mapping[str, Any], config: Mapping[str, Any]
) -> list[tuple[str, str, str]] | None:
    """Return the keys that differ, defaults included; None where this version does not read the shipped recipe."""
    try:
        whole = Recipe.model_validate(shipped).model_dump(mode="json")
    except ValidationError:
        return None
    theirs, ours = dict(flat(whole)), dict(flat(dict(config)))
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return [
        (key, theirs.get(key, "not given"), ours.get(key, "not given"))
        for key in keys
        if key not in _OWN and theirs.get(key, "null") != ours.get(key, "null")
    ]
