"""What the Hub asks of a model card's metadata, as far as ours has it; what it warns of is wrong here."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

# https://huggingface.co/docs/hub/repositories-licenses, those of the bases that have recipes
LICENSES = ("apache-2.0", "mit", "cc-by-nc-4.0", "llama2", "other")
# huggingface.js, packages/tasks/src/pipelines.ts
TASKS = (
    "text-to-image",
    "image-to-image",
    "text-to-video",
    "image-to-video",
    "video-to-video",
    "video-text-to-text",
)
RELATIONS = ("adapter", "finetune", "merge", "quantized")
_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# huggingface_hub.repocard.REGEX_YAML_BLOCK, "exact same regex as in the Hub server"
_BLOCK = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(\r\n|\n|$))")


def metadata(card: str) -> Any:
    """The card's YAML block, parsed."""
    match = _BLOCK.match(card)
    return yaml.safe_load(match[2]) if match else None


def card_problems(card: str) -> list[str]:
    """Everything that is wrong with a card's metadata."""
    try:
        values = metadata(card)
    except yaml.YAMLError as error:
        return [f"no YAML: {error}"]
    return list(_problems(values)) if isinstance(values, dict) else ["metadata is no mapping"]


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    allowed_values = {
        "license": LICENSES,
        "pipeline_tag": TASKS,
        "base_model_relation": RELATIONS,
        "library_name": ("diffusers", "peft", "transformers"),
    }
    for key, allowed in allowed_values.items():
        if key in values and values[key] not in allowed:
            yield f"{key} {values[key]!r} is not in {allowed}"
    has_license_name = values.get("license_name") and values.get("license_link")
    if values.get("license") == "other" and not has_license_name:
        yield "license other needs license_name and license_link"
    if "base_model" in values and not _ID.fullmatch(str(values["base_model"])):
        yield f"base_model {values['base_model']!r} is no id"
    if not all(isinstance(tag, str) for tag in values.get("tags", [])):
        yield "tags are no texts"
    for widget in values.get("widget", []):
        if not isinstance(widget.get("text"), str) or not widget.get("output", {}).get("url"):
            yield f"widget {widget!r}"
    for model in values.get("model-index", []):
        for result in model["results"]:
            if {"task", "dataset", "metrics"} - set(result) or not result["dataset"].get("name"):
                yield f"model-index {result!r}"
