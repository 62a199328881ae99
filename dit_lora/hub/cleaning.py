"""Removes paths and the names of machines and users from a run's recipe and records before they are published."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dit_lora.config.lora import INITS
from dit_lora.config.remedies import HUB_PREFIX, get_hub_name
from dit_lora.redact import redact_value


def redact_recipe(config: Mapping[str, Any], base: str, datasets: Sequence[str]) -> str:
    """The recipe as YAML that `load_recipe` reads, for the same training on the reader's data.

    Other paths become placeholders. The cache path and the settings that resume or publish a run are dropped.

    Args:
        config: The recipe.
        base: Name for the base model: a Hub id or a folder's name.
        datasets: Sources that are names on the Hub, which stay.
    """
    values = copy.deepcopy(dict(config))
    values.pop("hub", None)
    _get_section(values, "model")["path"] = base
    # `lora.init` is a method's name, a Hub id or a file; only the file is private.
    lora = values.get("lora") or {}
    if lora.get("init", INITS[0]) not in INITS and get_hub_name(lora["init"]) is None:
        lora["init"] = "path/to/lora"
    for number, item in enumerate(lora.get("under") or ()):
        if get_hub_name(str(item.get("path"))) is None:
            item["path"] = f"path/to/under_{number}"
    data = _get_section(values, "data")
    # The first source is `data` itself, further ones are in `data.sources`.
    for number, source in enumerate([data, *(data.get("sources") or ())]):
        suffix = f"_{number}" if number else ""
        if source.get("path") not in (None, *datasets, *(f"{HUB_PREFIX}{name}" for name in datasets)):
            source["path"] = f"path/to/data{suffix}"
        if source.get("media") is not None:
            source["media"] = f"path/to/media{suffix}"
        if source.get("mask_folder") is not None:
            source["mask_folder"] = f"path/to/masks{suffix}"
        if source.get("reference_folders"):
            num_folders = len(source["reference_folders"])
            source["reference_folders"] = [f"path/to/references{suffix}_{index}" for index in range(num_folders)]
    # A path of the machine that trained, which readers do not need.
    data["cache"] = None
    validation = _get_section(values, "validation")
    # The suffix stays: it tells readers what kind of file belongs there.
    for name in ("images", "last_images", "media"):
        if validation.get(name):
            validation[name] = [
                f"path/to/{name}_{index:02d}{Path(str(item)).suffix}" for index, item in enumerate(validation[name])
            ]
    if validation.get("references"):
        validation["references"] = [
            [
                f"path/to/reference_{index:02d}_{position}{Path(str(item)).suffix}"
                for position, item in enumerate([files] if isinstance(files, str) else files)
            ]
            for index, files in enumerate(validation["references"])
        ]
    if validation.get("model") is not None and get_hub_name(validation["model"]) is None:
        validation["model"] = "path/to/validation_model"
    if validation.get("other_expert"):
        validation["other_expert"] = "path/to/other_expert"
    if validation.get("conversations"):
        validation["conversations"] = "path/to/conversations.json"
    # These three point to files of this machine, or to this run.
    _get_section(values, "guard")["quarantine"] = None
    _get_section(values, "train")["resume"] = "none"
    _get_section(values, "run")["dir"] = "runs/mine"
    return yaml.safe_dump(redact_value(values), sort_keys=False, allow_unicode=True)


def redact_json(record: Any) -> str:
    """A record as JSON without paths and names of machines or users."""
    return json.dumps(redact_value(record), indent=2, ensure_ascii=False) + "\n"


def _get_section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of the recipe as a dict, created if it is missing."""
    if not isinstance(values.get(name), dict):
        values[name] = {}
    return values[name]
