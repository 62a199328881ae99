"""The published Z-Image configs: sizes, LoRA sizes, what a caption costs, and recipes that fit them."""

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
from dit_lora.families.z_image.checkpoint import DE_DISTILLATION_ADAPTER

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# By recipe, its checkpoint and its scheduler's shift.
PUBLISHED = {"base": ("Z-Image", 6.0), "turbo": ("Z-Image-Turbo", 3.0)}
BLOCKS = 2 + 2 + 30


def opened(name: str, folder: Path, recipe: Any) -> Any:
    """The checkpoint of a fixture, with weights that nothing reads."""
    path = Path(shutil.copytree(CONFIGS / name, folder / name))
    for config in [*path.glob("*/config.json")]:
        save_file({"none": torch.zeros(1)}, config.with_name("model.safetensors"))
    model = recipe.model.model_copy(update={"path": str(path)})
    return get_family("z_image").open(model)


def counted(config: dict[str, Any]) -> int:
    """Weights of every layer, by hand."""
    width, hidden = config["dim"], int(config["dim"] / 3 * 8)
    block = 4 * width * width + 2 * 128 + 3 * width * hidden + 4 * width
    modulation = 257 * 4 * width  # of the image's refiner and of the layers
    text = config["cap_feat_dim"]
    time = 257 * 1024 + 1025 * 256
    ends = (64 + 1) * width + text + (text + 1) * width + (width + 1) * 64 + 257 * width
    return BLOCKS * block + (BLOCKS - 2) * modulation + time + ends + 2 * width


@pytest.mark.parametrize("stem", PUBLISHED)
def test_sizes_are_the_published_ones_and_its_recipe_fits(stem: str, tmp_path: Path) -> None:
    """Its authors speak of 6 billion parameters."""
    name, shift = PUBLISHED[stem]
    recipe = load_recipe(ROOT / "recipes" / "z_image" / f"{stem}.yaml")
    assert recipe.model.path == f"Tongyi-MAI/{name}"
    checkpoint = opened(name, tmp_path, recipe).apply_recipe(recipe)
    with torch.device("meta"):
        config = checkpoint.info.transformer_config
        transformer = checkpoint.denoiser.transformer_class.from_config(config).requires_grad_(False)
        num_parameters = sum(p.numel() for p in transformer.parameters())
        assert num_parameters == counted(config) == 6_154_908_736
        targets = checkpoint.info.lora_targets(get_family("z_image").lora_targets)
        report = attach_lora(transformer, LoraConfig(rank=16), targets, seed=0)
    assert report.num_adapted == 136 == 4 * BLOCKS
    assert report.num_parameters == 136 * 16 * 2 * 3840
    assert (checkpoint.denoiser.objective.shift, checkpoint.info.scheduler_shift) == (2.0, shift)
    assert len(checkpoint.info.recipe_notes(recipe)) == 0  # Turbo's trains over what takes the distillation back
    checkpoint.info.check_shape(VideoShape(1, 1040, 752))
    checkpoint.info.check_shape(VideoShape(1, 8192, 1024))
    with pytest.raises(DitLoraError, match="width must be a multiple of 16; got 760, nearest 752"):
        checkpoint.info.check_shape(VideoShape(1, 1040, 760))
    with pytest.raises(DitLoraError, match="height can be 8192 at most"):
        checkpoint.info.check_shape(VideoShape(1, 8208, 1024))


def test_a_caption_costs_two_and_a_half_mib_and_its_mask(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "z_image" / "base.yaml")
    spec = opened("Z-Image", tmp_path, recipe).encoders.text_spec(torch.bfloat16)
    bytes_of = {name: size.numel() * dtype.itemsize for name, (size, dtype) in spec.items()}
    assert bytes_of == {"prompt_embeds": 2.5 * 2**20, "prompt_attention_mask": 512}


def test_turbos_recipe_trains_over_what_takes_the_distillation_back() -> None:
    recipe = load_recipe(ROOT / "recipes" / "z_image" / "turbo.yaml")
    (base_adapter,) = recipe.lora.under
    assert (base_adapter.path, base_adapter.in_samples) == (DE_DISTILLATION_ADAPTER, False)
    assert (recipe.validation.guidance_scale, recipe.validation.inference_steps) == (0.0, 8)


@pytest.mark.parametrize("name", ["Z-Image", "Z-Image-Turbo"])
def test_the_licence_of_each_base_is_known(name: str) -> None:
    licence = get_family("z_image").get_license(f"Tongyi-MAI/{name}")
    assert licence is not None
    assert licence.id == "apache-2.0"


def test_every_recipe_of_the_family_has_its_published_checkpoint() -> None:
    assert {path.stem for path in (ROOT / "recipes" / "z_image").glob("*.yaml")} == {*PUBLISHED}


def test_the_text_encoder_is_as_wide_as_the_transformer_takes() -> None:
    for name, _ in PUBLISHED.values():
        width = json.loads((CONFIGS / name / "text_encoder" / "config.json").read_text())
        config = json.loads((CONFIGS / name / "transformer" / "config.json").read_text())
        assert config["cap_feat_dim"] == width["hidden_size"]
