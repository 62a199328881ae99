"""The published Stable Diffusion 3.5 configs: sizes, LoRA sizes, and recipes that fit them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from launching import ROOT
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# Parameters of the transformer, layers with LoRA and its parameters at rank 16, and the longest side; computed.
# Stability AI state 2.5 billion, including medium's position table, and 8.1.
PUBLISHED = {
    "medium": (2_243_171_520, 24 * 7 - 1 + 23 + 13 * 4, 11_894_784, 6144),
    "large": (8_056_627_520, 38 * 7 - 1 + 37, 23_502_848, 3072),
}


def config_of(size: str, component: str) -> dict[str, Any]:
    path = CONFIGS / f"stable-diffusion-3.5-{size}" / component / "config.json"
    return json.loads(path.read_text())


def counted(config: dict[str, Any]) -> int:
    """Weights and biases of every layer, by hand; the last block gives no text, and positions are no parameters."""
    width, text, pooled = 64 * config["num_layers"], 4096, 2048

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    feed_forward = linear(width, 4 * width) + linear(4 * width, width)
    stream = 4 * linear(width, width) + 2 * 64 + feed_forward + linear(width, 6 * width)
    second = 4 * linear(width, width) + 2 * 64 + linear(width, 3 * width)
    last_block = linear(width, width) + feed_forward + linear(width, 4 * width)
    embedded = linear(256, width) + linear(pooled, width) + 2 * linear(width, width)
    ends = linear(64, width) + linear(text, width) + linear(width, 2 * width) + linear(width, 64)
    seconds = len(config["dual_attention_layers"]) * second
    return 2 * config["num_layers"] * stream + seconds - last_block + embedded + ends


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_are_the_published_ones_and_its_recipe_fits(size: str, tmp_path: Path) -> None:
    num_parameters, layers, adapter, max_tokens = PUBLISHED[size]
    recipe = load_recipe(ROOT / "recipes" / "sd3" / f"3.5_{size}.yaml")
    name = f"stable-diffusion-3.5-{size}"
    assert recipe.model.path == f"stabilityai/{name}"
    path = Path(shutil.copytree(CONFIGS / name, tmp_path / "unnamed"))
    for config in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, config.with_name("model.safetensors"))
    family = get_family("sd3")
    model = recipe.model.model_copy(update={"path": str(path)})
    checkpoint = family.open(model).apply_recipe(recipe)
    with torch.device("meta"):
        config = checkpoint.info.transformer_config
        transformer: Any = SD3Transformer2DModel.from_config(config).requires_grad_(False)
        assert sum(p.numel() for p in transformer.parameters()) == num_parameters == counted(config)
        targets = checkpoint.info.lora_targets(family.lora_targets)
        report = attach_lora(transformer, LoraConfig(rank=16), targets, seed=0)
    assert (report.num_adapted, report.num_parameters) == (layers, adapter)
    assert adapter == layers * 16 * 2 * 64 * config["num_layers"]
    objective = checkpoint.denoiser.objective
    assert (objective.shift, objective.num_train_timesteps, objective.distribution.density) == (
        3,
        1000,
        "logit_normal",
    )
    spec = checkpoint.encoders.text_spec(torch.bfloat16)
    assert [tuple(shape) for shape, _ in spec.values()] == [(333, 4096), (2048,)]
    checkpoint.info.check_shape(VideoShape(1, 1040, max_tokens))
    with pytest.raises(DitLoraError, match=f"width can be {max_tokens} at most"):
        checkpoint.info.check_shape(VideoShape(1, 1040, max_tokens + 16))
    with pytest.raises(DitLoraError, match="width must be a multiple of 16; got 760, nearest 752"):
        checkpoint.info.check_shape(VideoShape(1, 1040, 760))


def test_the_text_encoders_are_as_wide_as_the_transformers_take() -> None:
    for size in PUBLISHED:
        clips = [config_of(size, f"text_encoder{number}") for number in ("", "_2")]
        config = config_of(size, "transformer")
        assert sum(c["projection_dim"] for c in clips) == config["pooled_projection_dim"]
        assert sum(c["hidden_size"] for c in clips) <= config["joint_attention_dim"]
        assert config_of(size, "text_encoder_3")["d_model"] == config["joint_attention_dim"]


def test_every_recipe_of_the_family_is_tried_and_its_licence_known() -> None:
    recipe_names = {path.stem for path in (ROOT / "recipes" / "sd3").glob("*.yaml")}
    assert recipe_names == {f"3.5_{size}" for size in PUBLISHED}
    for size in (*PUBLISHED, "large-turbo"):
        base = f"stabilityai/stable-diffusion-3.5-{size}"
        licence = get_family("sd3").get_license(base)
        assert (licence.id, licence.name) == ("other", "stabilityai-ai-community")
        assert licence.link == f"https://huggingface.co/{base}/blob/main/LICENSE.md"
