"""A published recipe has no local paths of the training machine, and keeps names from the Hub."""

from pathlib import Path
from typing import Any

import yaml

from dit_lora.config.load import dump_recipe, parse_recipe
from dit_lora.hub.cleaning import redact_recipe


def cleaned(values: dict[str, Any]) -> dict[str, Any]:
    text = redact_recipe(yaml.safe_load(dump_recipe(parse_recipe(values, "test"))), "me/base", ())
    parse_recipe(yaml.safe_load(text), "published")  # it is a recipe still
    cleaned_values: dict[str, Any] = yaml.safe_load(text)
    return cleaned_values


def test_adapters_and_checkpoints_of_this_machine_become_placeholders(
    recipe_values: dict[str, Any], tmp_path: Path
) -> None:
    recipe_values["validation"] |= {"prompts": ["x"], "model": str(tmp_path / "turbo")}
    adapters_under = [{"path": "me/adapter", "scale": 0.5}, {"path": "./gone/mine.safetensors"}]
    recipe_values["lora"] = {"init": str(tmp_path), "under": adapters_under}
    cleaned_values = cleaned(recipe_values)
    assert cleaned_values["lora"]["init"] == "path/to/lora"
    assert [entry["path"] for entry in cleaned_values["lora"]["under"]] == [
        "me/adapter",
        "path/to/under_1",
    ]
    assert cleaned_values["validation"]["model"] == "path/to/validation_model"
    assert str(tmp_path) not in yaml.safe_dump(cleaned_values)


def test_pictures_and_folders_of_references_and_masks_become_placeholders(
    recipe_values: dict[str, Any],
) -> None:
    folders = {"reference_folders": ["secret/low", "secret/style"], "mask_folder": "secret/masks"}
    recipe_values["data"] |= folders
    recipe_values["validation"] |= {
        "prompts": ["x", "y"],
        "references": ["secret/a.png", ["secret/b.jpg", "secret/c.jpg"]],
        "images": ["secret/a.png", "secret/b.png"],
        "last_images": ["secret/c.png", "secret/d.png"],
    }
    cleaned_values = cleaned(recipe_values)
    assert "secret" not in yaml.safe_dump(cleaned_values)
    data, validation = cleaned_values["data"], cleaned_values["validation"]
    assert data["reference_folders"] == ["path/to/references_0", "path/to/references_1"]
    assert data["mask_folder"] == "path/to/masks"
    assert validation["references"] == [
        ["path/to/reference_00_0.png"],
        ["path/to/reference_01_0.jpg", "path/to/reference_01_1.jpg"],
    ]
    recipe_values["data"] = {
        "sources": [{"path": "a", **folders}, {"path": "b", "mask_folder": "secret/more"}],
        **{name: value for name, value in recipe_values["data"].items() if name not in folders},
    }
    del recipe_values["data"]["path"]
    cleaned_values = cleaned(recipe_values)
    assert "secret" not in yaml.safe_dump(cleaned_values)
    assert cleaned_values["data"]["sources"][0]["reference_folders"] == [
        "path/to/references_1_0",
        "path/to/references_1_1",
    ]


def test_what_is_on_the_hub_keeps_its_name(recipe_values: dict[str, Any]) -> None:
    recipe_values["validation"] |= {"prompts": ["x"], "model": "owner/turbo"}
    recipe_values["lora"] = {"init": "hub:models/start"}
    cleaned_values = cleaned(recipe_values)
    assert (cleaned_values["lora"]["init"], cleaned_values["validation"]["model"]) == (
        "hub:models/start",
        "owner/turbo",
    )
    del recipe_values["lora"]["init"]
    assert cleaned(recipe_values)["lora"]["init"] == "kaiming"
