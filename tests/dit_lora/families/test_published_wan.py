"""The published Wan configs: sizes, LoRA sizes, and recipes that fit them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from launching import ROOT
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.experts import split_recipe_by_expert
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# Parameters of a transformer, and of LoRA at rank 16 on q, k, v and out of both attentions; computed. Wan's names say
# 1.3, 14 and 5 B.
SIZES = {
    "Wan2.1-T2V-1.3B-Diffusers": (1_418_996_800, 11_796_480),
    "Wan2.1-T2V-14B-Diffusers": (14_288_491_584, 52_428_800),
    "Wan2.1-I2V-14B-480P-Diffusers": (16_394_878_784, 52_428_800),
    "Wan2.1-FLF2V-14B-720P-diffusers": (16_395_536_704, 52_428_800),
    "Wan2.2-T2V-A14B-Diffusers": (14_288_491_584, 52_428_800),
    "Wan2.2-I2V-A14B-Diffusers": (14_288_901_184, 52_428_800),
    "Wan2.2-TI2V-5B-Diffusers": (4_999_787_712, 23_592_960),
}
# Kind, noise levels, shift, and tokens of a sample.
RECIPES: dict[str, tuple[str, tuple[float, float], float, int]] = {
    "2.1_t2v_1.3b": ("Conditioning", (0, 1), 3, 32_760),
    "2.1_t2v_14b": ("Conditioning", (0, 1), 3, 32_760),
    "2.1_i2v_14b": ("MaskAndImageConditioning", (0, 1), 3, 32_760),
    "2.1_flf2v_14b": ("MaskAndImageConditioning", (0, 1), 16, 75_600),
    "2.2_t2v_a14b_high": ("Conditioning", (0.875, 1), 3, 32_760),
    "2.2_t2v_a14b_low": ("Conditioning", (0, 0.875), 3, 32_760),
    "2.2_i2v_a14b": ("MaskAndImageConditioning", (0.9, 1), 3, 32_760),
    "2.2_ti2v_5b_t2v": ("Conditioning", (0, 1), 5, 27_280),
    "2.2_ti2v_5b_i2v": ("FirstFrameConditioning", (0, 1), 5, 27_280),
}


def config_of(name: str, component: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name / component / "config.json").read_text())


def counted(config: dict[str, Any]) -> int:
    """Weights and biases of every layer, by hand."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    hidden, image = config["ffn_dim"], config.get("image_dim")

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    attention = 4 * linear(width, width) + 2 * width
    of_image = 2 * linear(width, width) + width if image else 0
    feed_forward = linear(width, hidden) + linear(hidden, width)
    block = 2 * attention + of_image + feed_forward + 2 * width + 6 * width
    embeddings = (
        linear(4 * config["in_channels"], width)
        + linear(256, width)
        + linear(width, width)
        + linear(width, 6 * width)
        + linear(config["text_dim"], width)
        + linear(width, width)
    )
    if image:
        embeddings += 2 * image + linear(image, image) + linear(image, width) + 2 * width
        embeddings += image * config.get("pos_embed_seq_len", 0)
    ends = 2 * width + linear(width, 4 * config["out_channels"])
    return embeddings + config["num_layers"] * block + ends


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name: str) -> None:
    config, (num_parameters, adapter) = config_of(name, "transformer"), SIZES[name]
    with torch.device("meta"):
        transformer: Any = WanTransformer3DModel.from_config(config).requires_grad_(False)
        assert sum(p.numel() for p in transformer.parameters()) == num_parameters == counted(config)
        report = attach_lora(transformer, LoraConfig(rank=16), get_family("wan").lora_targets, seed=0)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    assert report.num_adapted == 8 * config["num_layers"]
    assert report.num_parameters == adapter == report.num_adapted * 16 * 2 * width
    if name.startswith("Wan2.2") and "A14B" in name:
        assert config_of(name, "transformer_2") == config


@pytest.mark.parametrize("stem", RECIPES)
def test_its_recipe_fits_a_published_checkpoint(stem: str, tmp_path: Path) -> None:
    kind, levels, shift, tokens = RECIPES[stem]
    recipe = load_recipe(ROOT / "recipes" / "wan" / f"{stem}.yaml")
    owner, name = recipe.model.path.split("/")
    assert owner == "Wan-AI"
    path = Path(shutil.copytree(CONFIGS / name, tmp_path / "unnamed"))
    for config in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, config.parent / "model.safetensors")
    model = recipe.model.model_copy(update={"path": str(path)})
    turns = split_recipe_by_expert(recipe.model_copy(update={"model": model}))
    checkpoint = get_family("wan").open(turns[0].model, turns[0])
    assert type(checkpoint.denoiser.conditioning).__name__ == kind
    objective = checkpoint.denoiser.objective
    assert (objective.distribution.t_min, objective.distribution.t_max) == levels
    assert (objective.shift, objective.num_train_timesteps) == (shift, 1000)
    shape, step = VideoShape.from_data(recipe.data), checkpoint.info.size_multiple
    assert step == (32 if "5b" in stem else 16)
    num_tokens = ((shape.frames - 1) // 4 + 1) * (shape.height // step) * (shape.width // step)
    assert num_tokens == tokens
    assert f"{tokens:,} video tokens" in (ROOT / "recipes" / "wan" / f"{stem}.yaml").read_text()
    assert (turns[0].data.fps, checkpoint.info.text_tokens) == (24 if "5b" in stem else 16, 512)
    with pytest.raises(DitLoraError, match=f"width must be a multiple of {step}; got 840"):
        checkpoint.info.check_shape(VideoShape(81, 480, 840))
    with pytest.raises(DitLoraError, match=f"height can be {1024 * step} at most"):
        checkpoint.info.check_shape(VideoShape(81, 1025 * step, 832))
    if len(turns) == 2:
        low = get_family("wan").open(turns[1].model, turns[1])
        assert (low.denoiser.objective.distribution.t_min, low.denoiser.objective.distribution.t_max) == (
            0,
            levels[0],
        )


def test_every_recipe_of_the_family_is_tried() -> None:
    assert {path.stem for path in (ROOT / "recipes" / "wan").glob("*.yaml")} == set(RECIPES)
