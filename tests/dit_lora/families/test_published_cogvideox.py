"""The published CogVideoX configs: sizes, LoRA sizes, and recipes that fit them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from launching import ROOT
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# Of the transformer, and of LoRA at rank 128 on q, k, v and out. finetrainers documents 132,120,576 for 5B;
# the others are computed.
SIZES = {
    "CogVideoX-2b": (1_693_783_872, 58_982_400),
    "CogVideoX-5b": (5_570_283_072, 132_120_576),
    "CogVideoX-5b-I2V": (5_570_479_680, 132_120_576),
    "CogVideoX1.5-5B": (5_570_676_352, 132_120_576),
    "CogVideoX1.5-5B-I2V": (5_571_594_880, 132_120_576),
}
RECIPES = {
    "CogVideoX-2b": "2b_t2v",
    "CogVideoX-5b": "5b_t2v",
    "CogVideoX-5b-I2V": "5b_i2v",
    "CogVideoX1.5-5B": "1.5_t2v",
    "CogVideoX1.5-5B-I2V": "1.5_i2v",
}


def transformer_config(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name / "transformer" / "config.json").read_text())


def opened(name: str, folder: Path, recipe: Any) -> Any:
    """The checkpoint of a fixture, with weights that nothing reads."""
    path = Path(shutil.copytree(CONFIGS / name, folder / name))
    for component in ("transformer", "vae", "text_encoder"):
        (path / component).mkdir(exist_ok=True)
        save_file({"none": torch.zeros(1)}, path / component / "model.safetensors")
    return get_family("cogvideox").open(recipe.model.model_copy(update={"path": str(path)}))


def counted(config: dict[str, Any]) -> int:
    """Weights and biases of every layer, by hand."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    time, text, offset = (
        config["time_embed_dim"],
        config["text_embed_dim"],
        config.get("ofs_embed_dim"),
    )
    patch = config["patch_size"] ** 2 * config.get("patch_size_t", 1)

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    modulated = linear(time, 6 * width) + 2 * width
    attention = 4 * linear(width, width) + 4 * config["attention_head_dim"]
    block = 2 * modulated + attention + linear(width, 4 * width) + linear(4 * width, width)
    return (
        linear(config["in_channels"] * patch, width)
        + linear(text, width)
        + linear(width, time)
        + linear(time, time)
        + (2 * linear(offset, offset) if offset else 0)
        + config["num_layers"] * block
        + 2 * width  # norm_final
        + linear(time, 2 * width)
        + 2 * width  # norm_out
        + linear(width, config["out_channels"] * patch)
    )


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name: str) -> None:
    config, (num_parameters, adapter) = transformer_config(name), SIZES[name]
    with torch.device("meta"):
        transformer = CogVideoXTransformer3DModel.from_config(config).requires_grad_(False)
        assert sum(p.numel() for p in transformer.parameters()) == num_parameters == counted(config)
        report = attach_lora(transformer, LoraConfig(rank=128), get_family("cogvideox").lora_targets, seed=0)
    layers = config["num_layers"]
    width = config["num_attention_heads"] * config["attention_head_dim"]
    assert report.num_parameters == adapter == layers * 4 * 128 * 2 * width
    assert report.num_adapted == 4 * layers


@pytest.mark.parametrize("name", RECIPES)
def test_its_recipe_fits_a_published_checkpoint(name: str, tmp_path: Path) -> None:
    path = ROOT / "recipes" / "cogvideox" / f"{RECIPES[name]}.yaml"
    recipe = load_recipe(path)
    assert recipe.model.path == f"THUDM/{name}"
    checkpoint = opened(name, tmp_path, recipe).apply_recipe(recipe)
    shape = VideoShape.from_data(recipe.data)
    assert checkpoint.info.pipeline_class.__name__ == (
        "CogVideoXImageToVideoPipeline" if name.endswith("I2V") else "CogVideoXPipeline"
    )
    latents = (shape.frames - 1) // 4 + 1
    assert latents + checkpoint.denoiser.num_padding_frames(latents) == (22 if "1.5" in name else 13)
    assert checkpoint.denoiser.num_train_timesteps == 1000
    rotary = checkpoint.denoiser._rotary_embeddings(
        latents + checkpoint.denoiser.num_padding_frames(latents),
        shape.height // 8,
        shape.width // 8,
        torch.device("cpu"),
    )
    tokens = (11 if "1.5" in name else 13) * shape.height * shape.width // 256
    assert rotary is None if name == "CogVideoX-2b" else rotary[0].shape == (tokens, 64)


def test_every_recipe_of_the_family_has_its_published_checkpoint() -> None:
    recipe_names = {path.stem for path in (ROOT / "recipes" / "cogvideox").glob("*.yaml")}
    assert recipe_names == set(RECIPES.values())


def test_shapes_that_published_checkpoints_have_no_positions_for(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "cogvideox" / "5b_i2v.yaml")
    learned = opened("CogVideoX-5b-I2V", tmp_path, recipe)
    with pytest.raises(DitLoraError, match="frames must be 49, which its learned positions are for"):
        learned.info.check_shape(VideoShape(25, 480, 720))
    with pytest.raises(DitLoraError, match="width must be 720, which its learned positions are for"):
        learned.info.check_shape(VideoShape(49, 480, 704))
    sliced = opened("CogVideoX1.5-5B-I2V", tmp_path, recipe)
    sliced.info.check_shape(VideoShape(81, 1360, 768))
    with pytest.raises(DitLoraError, match="width can be 2400 at most"):
        sliced.info.check_shape(VideoShape(81, 768, 2416))
    opened("CogVideoX-5b", tmp_path, recipe).info.check_shape(VideoShape(81, 2416, 768))
