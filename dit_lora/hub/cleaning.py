"""What of a run may be read by everybody: values as they were, places as placeholders, no name of a machine or user."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

# /a/b and ~/b and C:\b, where they do not go on a word, an address or a relative path.
_ABSOLUTE = re.compile(r"(?<![\w.:/~\\-])(?:~?(?:/[^\s/'\",;:()<>|]+){2,}/?|~/\S+|[A-Za-z]:\\\S+)")
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{8,}")
_TOLD = frozenset({"prompts", "system", "caption", "classes"})
"""Values that are words for the model and no places."""


def clean_config(config: Mapping[str, Any], base: str, datasets: Sequence[str]) -> str:
    """The recipe as YAML that `load_recipe` reads, to train the same on data of one's own.

    `base` is what the model is called, a Hub id or a folder's name; `datasets` are the sources that are names on the
    Hub. Every other place becomes a placeholder; the cache's and what continues or publishes a run are left out.
    """
    values = copy.deepcopy(dict(config))
    values.pop("hub", None)
    _section(values, "model")["path"] = base
    data = _section(values, "data")
    for number, source in enumerate([data, *(data.get("sources") or ())]):
        if source.get("path") not in (None, *datasets):
            source["path"] = f"path/to/data_{number}" if number else "path/to/data"
        if source.get("media") is not None:
            source["media"] = f"path/to/media_{number}" if number else "path/to/media"
    data["cache"] = None
    shown = _section(values, "validation")
    for name in ("images", "media"):
        if shown.get(name):
            shown[name] = [
                f"path/to/{name}_{index:02d}{Path(str(one)).suffix}"
                for index, one in enumerate(shown[name])
            ]
    if shown.get("conversations"):
        shown["conversations"] = "path/to/conversations.json"
    _section(values, "guard")["quarantine"] = None
    _section(values, "train")["resume"] = "none"
    _section(values, "run")["dir"] = "runs/mine"
    return yaml.safe_dump(_without_places(values), sort_keys=False, allow_unicode=True)


def clean_json(record: Any) -> str:
    """A JSON record without absolute paths: of each, its last name stays."""
    return json.dumps(_without_places(record), indent=2, ensure_ascii=False) + "\n"


def clean_text(text: str) -> str:
    """Absolute paths as their last names, and nothing that looks like a token."""
    return without_tokens(_ABSOLUTE.sub(lambda found: Path(found[0].rstrip("/")).name, text))


def without_tokens(text: str) -> str:
    return _TOKEN.sub("[token]", text)


def _without_places(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _without_places(one, str(name)) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(one, key) for one in value]
    if isinstance(value, str):
        return without_tokens(value) if key in _TOLD else clean_text(value)
    return value


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(values.get(name), dict):
        values[name] = {}
    return values[name]
