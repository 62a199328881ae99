"""The published FLUX configs: sizes, LoRA sizes, and recipes that fit them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# Recipe, parameters of the transformer, layers with LoRA and its parameters at rank 16; computed. Black Forest Labs
# speak of 12, 4, 9 and 32 billion.
PUBLISHED = {
    "FLUX.1-dev": ("flux/dev", 11_901_408_320, 19 * 12 + 38 * 3, 44_826_624),
    "FLUX.1-Kontext-dev": ("flux/kontext", 11_901_408_320, 19 * 12 + 38 * 3, 44_826_624),
    "FLUX.1-schnell": ("flux/schnell", 11_891_178_560, 19 * 12 + 38 * 3, 44_826_624),
    "FLUX.2-klein-base-4B": ("flux2/klein_base_4b", 3_875_544_576, 5 * 4 + 20 * 2, 16_711_680),
    "FLUX.2-klein-base-9B": ("flux2/klein_base_9b", 9_078_581_248, 8 * 4 + 24 * 2, 27_787_264),
    "FLUX.2-dev": ("flux2/dev", 32_223_281_152, 8 * 4 + 48 * 2, 77_070_336),
}
ANOTHER = {"flux2/klein_base_4b_edit"}
"""Recipes of a checkpoint that has one already."""


def opened(name: str, folder: Path, recipe: Any) -> Any:
    """The checkpoint of a fixture, with fp32 weights that nothing reads."""
    path = Path(shutil.copytree(CONFIGS / name, folder / name))
    for config in [*path.glob("*/config.json")]:
        save_file({"none": torch.zeros(1)}, config.with_name("model.safetensors"))
    model = recipe.model.model_copy(update={"path": str(path)})
    return get_family(recipe.model.family).open(model)


def counted(config: dict[str, Any]) -> int:
    """Weights of every layer of FLUX.2, by hand; none has a bias."""
    width, head = 128 * config["num_attention_heads"], 128
    double = 2 * (4 * width * width + 9 * width * width + 2 * head)  # each stream
    single = 9 * width * width + 4 * width * width + 2 * head
    modulation = (6 + 6 + 3 + 2) * width * width
    embedded = (256 + width) * width * (2 if config["guidance_embeds"] else 1)
    ends = (128 + config["joint_attention_dim"] + 128) * width
    blocks = config["num_layers"] * double + config["num_single_layers"] * single
    return blocks + modulation + embedded + ends


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones_and_its_recipe_fits(name: str, tmp_path: Path) -> None:
    stem, num_parameters, layers, adapter = PUBLISHED[name]
    recipe = load_recipe(ROOT / "recipes" / f"{stem}.yaml")
    assert recipe.model.path == f"black-forest-labs/{name}"
    checkpoint = opened(name, tmp_path, recipe).apply_recipe(recipe)
    with torch.device("meta"):
        config = checkpoint.info.transformer_config
        transformer = checkpoint.denoiser.transformer_class.from_config(config).requires_grad_(False)
        assert sum(p.numel() for p in transformer.parameters()) == num_parameters
        assert name.startswith("FLUX.1") or counted(config) == num_parameters
        targets = checkpoint.info.lora_targets(get_family(recipe.model.family).lora_targets)
        report = attach_lora(transformer, LoraConfig(rank=16), targets, seed=0)
    assert (report.num_adapted, report.num_parameters) == (layers, adapter)
    assert (checkpoint.info.guidance is not None) == name.endswith("-dev")
    assert checkpoint.denoiser.objective.shift == (1.0 if name == "FLUX.1-schnell" else None)
    checkpoint.info.check_shape(VideoShape(1, 1040, 752))
    with pytest.raises(DitLoraError, match="width must be a multiple of 16; got 760, nearest 752"):
        checkpoint.info.check_shape(VideoShape(1, 1040, 760))


def test_every_recipe_of_the_families_has_its_published_checkpoint() -> None:
    recipe_names = {
        f"{folder}/{path.stem}" for folder in ("flux", "flux2") for path in (ROOT / "recipes" / folder).glob("*.yaml")
    }
    assert recipe_names == {stem for stem, *_ in PUBLISHED.values()} | ANOTHER


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_licence_of_each_base_is_known(name: str) -> None:
    family = get_family("flux2" if name.startswith("FLUX.2") else "flux")
    licence = family.get_license(f"black-forest-labs/{name}")
    open_ones = ("FLUX.1-schnell", "FLUX.2-klein-base-4B")
    assert licence is not None
    assert licence.id == ("apache-2.0" if name in open_ones else "other")
    assert (licence.link is None) == (name in open_ones)


def test_the_text_encoders_are_as_wide_as_the_transformers_take() -> None:
    """Three layers' states side by side."""
    for name in (stem for stem in PUBLISHED if stem.startswith("FLUX.2")):
        config = json.loads((CONFIGS / name / "text_encoder" / "config.json").read_text())
        width = config.get("text_config", config)["hidden_size"]
        transformer_config = json.loads((CONFIGS / name / "transformer" / "config.json").read_text())
        assert transformer_config["joint_attention_dim"] == 3 * width
