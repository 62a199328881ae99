"""The published Sana configs: sizes, LoRA sizes, and recipes that fit them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SanaTransformer2DModel, SanaVideoTransformer3DModel
from launching import ROOT
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# Of the transformer, and of LoRA at rank 16 on q, k, v and out of both attentions; computed. Sana's paper gives
# 590 M and 1604 M for the first two (arXiv 2410.10629, table 1).
SIZES = {
    "Sana_600M_512px_diffusers": (591_747_872, 8_257_536),
    "Sana_1600M_1024px_diffusers": (1_604_462_752, 11_468_800),
    "Sana_1600M_1024px_BF16_diffusers": (1_604_462_752, 11_468_800),
    "SANA1.5_4.8B_1024px_diffusers": (4_721_825_952, 34_406_400),
    "SANA-Video_2B_480p_diffusers": (2_056_862_144, 11_468_800),
}
RECIPES = {
    "Sana_600M_512px_diffusers": ("600m_512", True),
    "Sana_1600M_1024px_diffusers": ("1.6b_1024", True),
    "Sana_1600M_1024px_BF16_diffusers": ("1.6b_1024_bf16", False),
    "SANA1.5_4.8B_1024px_diffusers": ("1.5_4.8b", False),
    "SANA-Video_2B_480p_diffusers": ("video_2b", False),
}


def transformer_config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name / "transformer" / "config.json").read_text())


def opened(name: str, folder: Path, recipe: Any) -> Any:
    """The checkpoint of a fixture, with fp32 weights that nothing reads."""
    path = Path(shutil.copytree(CONFIGS / name, folder / name))
    for component in ("transformer", "vae", "text_encoder"):
        (path / component).mkdir(exist_ok=True)
        save_file({"none": torch.zeros(1)}, path / component / "model.safetensors")
    model = recipe.model.model_copy(update={"path": str(path)})
    return get_family(recipe.model.family).open(model)


def counted(config: dict[str, Any]) -> int:
    """Weights and biases of every layer, by hand."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    hidden = int(config["mlp_ratio"] * width)
    video = config["_class_name"] == "SanaVideoTransformer3DModel"
    patch = 4 if video else 1

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    norms = 2 * width if config.get("qk_norm") else 0
    self_attention = 3 * width * width + linear(width, width) + norms
    cross_attention = 4 * linear(width, width) + norms
    mix_ffn = linear(width, 2 * hidden) + (3 * 3 + 1) * 2 * hidden + hidden * width
    if video:
        mix_ffn += 3 * width * width  # over frames
    block = self_attention + cross_attention + mix_ffn + 6 * width
    return (
        linear(config["in_channels"] * patch, width)
        + linear(256, width)
        + linear(width, width)
        + linear(width, 6 * width)  # time
        + linear(config["caption_channels"], width)
        + linear(width, width)
        + width  # caption_norm
        + config["num_layers"] * block
        + 2 * width
        + linear(width, config["out_channels"] * patch)
    )


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name: str) -> None:
    config, (num_parameters, adapter) = transformer_config(name), SIZES[name]
    video = config["_class_name"] == "SanaVideoTransformer3DModel"
    model: Any = SanaVideoTransformer3DModel if video else SanaTransformer2DModel
    with torch.device("meta"):
        transformer = model.from_config(config).requires_grad_(False)
        assert sum(p.numel() for p in transformer.parameters()) == num_parameters == counted(config)
        targets = get_family("sana").lora_targets
        report = attach_lora(transformer, LoraConfig(rank=16), targets, seed=0)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    assert report.num_adapted == 8 * config["num_layers"]
    assert report.num_parameters == adapter == report.num_adapted * 16 * 2 * width


@pytest.mark.parametrize("name", RECIPES)
def test_its_recipe_fits_a_published_checkpoint(name: str, tmp_path: Path) -> None:
    """Shape, shift, and whether its activations must saturate: of a folder that keeps the published name."""
    stem, saturates = RECIPES[name]
    recipe = load_recipe(ROOT / "recipes" / "sana" / f"{stem}.yaml")
    assert recipe.model.path == f"Efficient-Large-Model/{name}"
    checkpoint = opened(name, tmp_path, recipe).apply_recipe(recipe)
    assert checkpoint.denoiser.num_train_timesteps == 1000
    assert checkpoint.denoiser.objective.shift == 3.0
    assert getattr(checkpoint.info, "should_saturate", False) is saturates
    shape = VideoShape.from_data(recipe.data)
    native = transformer_config(name)["sample_size"]
    if recipe.model.family == "sana":
        assert (shape.height, shape.width) == (32 * native, 32 * native)
    else:
        assert (shape.frames, shape.height, shape.width) == (81, 16 * native, 832)
    assert checkpoint.encoders.text_cache_key()["tokens"] == 300


def test_every_recipe_of_the_families_has_its_published_checkpoint() -> None:
    recipe_names = {path.stem for path in (ROOT / "recipes" / "sana").glob("*.yaml")}
    assert recipe_names == {stem for stem, _ in RECIPES.values()}


@pytest.mark.parametrize("name", RECIPES)
def test_published_checkpoints_take_multiples_of_32(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "sana" / f"{RECIPES[name][0]}.yaml")
    checkpoint, frames = opened(name, tmp_path, recipe), recipe.data.frames
    checkpoint.info.check_shape(VideoShape(frames, 544, 992))
    with pytest.raises(DitLoraError, match="width must be a multiple of 32; got 1008, nearest 992"):
        checkpoint.info.check_shape(VideoShape(frames, 544, 1008))
