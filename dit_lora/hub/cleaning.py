"""Make a run's recipe and records readable by everybody: placeholders for places, no name of a machine or user."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dit_lora.config.lora import INITS
from dit_lora.config.remedies import HUB, hub_name
from dit_lora.redact import redacted


def clean_config(config: Mapping[str, Any], base: str, datasets: Sequence[str]) -> str:
    """Return the recipe as YAML that `load_recipe` reads, to train the same on data of one's own.

    `base` is what the model is called, a Hub id or a folder's name; `datasets` are the sources that are names on the
    Hub. Every other place becomes a placeholder; the cache's and what continues or publishes a run are left out.
    """
    values = copy.deepcopy(dict(config))
    values.pop("hub", None)
    _section(values, "model")["path"] = base
    lora = values.get("lora") or {}
    if lora.get("init", INITS[0]) not in INITS and hub_name(lora["init"]) is None:
        lora["init"] = "path/to/lora"
    for number, one in enumerate(lora.get("under") or ()):
        if hub_name(str(one.get("path"))) is None:
            one["path"] = f"path/to/under_{number}"
    data = _section(values, "data")
    for number, source in enumerate([data, *(data.get("sources") or ())]):
        if source.get("path") not in (None, *datasets, *(f"{HUB}{name}" for name in datasets)):
            source["path"] = f"path/to/data_{number}" if number else "path/to/data"
        if source.get("media") is not None:
            source["media"] = f"path/to/media_{number}" if number else "path/to/media"
        if source.get("mask_folder") is not None:
            source["mask_folder"] = f"path/to/masks_{number}" if number else "path/to/masks"
        if source.get("reference_folders"):
            source["reference_folders"] = [
                f"path/to/references_{number}_{place}" if number else f"path/to/references_{place}"
                for place in range(len(source["reference_folders"]))
            ]
    data["cache"] = None
    shown = _section(values, "validation")
    for name in ("images", "last_images", "media"):
        if shown.get(name):
            shown[name] = [
                f"path/to/{name}_{index:02d}{Path(str(one)).suffix}"
                for index, one in enumerate(shown[name])
            ]
    if shown.get("references"):
        shown["references"] = [
            [
                f"path/to/reference_{index:02d}_{place}{Path(str(one)).suffix}"
                for place, one in enumerate([files] if isinstance(files, str) else files)
            ]
            for index, files in enumerate(shown["references"])
        ]
    if shown.get("model") is not None and hub_name(shown["model"]) is None:
        shown["model"] = "path/to/validation_model"
    if shown.get("other_expert"):
        shown["other_expert"] = "path/to/other_expert"
    if shown.get("conversations"):
        shown["conversations"] = "path/to/conversations.json"
    _section(values, "guard")["quarantine"] = None
    _section(values, "train")["resume"] = "none"
    _section(values, "run")["dir"] = "runs/mine"
    return yaml.safe_dump(redacted(values), sort_keys=False, allow_unicode=True)


def clean_json(record: Any) -> str:
    """Return a record as JSON that others may read."""
    return json.dumps(redacted(record), indent=2, ensure_ascii=False) + "\n"


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(values.get(name), dict):
        values[name] = {}
    return values[name]
