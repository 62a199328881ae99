"""VDiT-XL and Latte-1: sizes against counts by hand and DiT-XL's known one, LoRA sizes, recipes that fit them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LatteTransformer3DModel
from launching import ROOT
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.models.video_dit import VideoDiTTransformer3DModel

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# facebookresearch/DiT's README gives 675 M for DiT-XL/2; its state dict has 675,129,632 numbers, of which
# 256 x 1152 are the fixed position table.
DIT_XL_2 = 675_129_632 - 256 * 1152
RECIPES = {
    "video_dit/ucf101_scratch": "VDiT-XL-1x2x2",
    "video_dit/ucf101_lora": "VDiT-XL-1x2x2",
    "latte/latte1_lora": "Latte-1",
}


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def video_dit_count(depth: int, width: int, patch: int, condition: int) -> int:
    """Weights and biases of every layer, by hand; `patch` in latent values of one channel."""
    block = (
        linear(width, 6 * width)
        + linear(width, 3 * width)
        + linear(width, width)
        + linear(width, 4 * width)
        + linear(4 * width, width)
    )
    return (
        linear(4 * patch, width)
        + linear(256, width)
        + linear(width, width)
        + condition
        + depth * block
        + linear(width, 2 * width)
        + linear(width, 8 * patch)
    )


def latte_count(layers: int, width: int, text: int) -> int:
    attention = 4 * linear(width, width)
    feed_forward = linear(width, 4 * width) + linear(4 * width, width)
    spatial = 2 * attention + feed_forward + 6 * width  # its scale_shift_table
    temporal = attention + feed_forward + 6 * width
    return (
        linear(4 * 4, width)
        + linear(text, width)
        + linear(width, width)
        + linear(256, width)
        + linear(width, width)
        + linear(width, 6 * width)
        + layers * (spatial + temporal)
        + 2 * width
        + linear(width, 4 * 8)
    )


def config_of(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name / "transformer" / "config.json").read_text())


def size(model_class: Any, **config: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model_class.from_config(config).parameters())


def test_vdit_xl_has_the_size_of_dit_xl() -> None:
    """Of 1000 classes it has exactly DiT-XL/2's weights; text and patches in time change what they should."""
    model, config = VideoDiTTransformer3DModel, config_of("VDiT-XL-1x2x2")
    classes = {**config, "text_dim": None, "num_classes": 1000}
    assert size(model, **classes) == DIT_XL_2 == video_dit_count(28, 1152, 4, 1001 * 1152)
    text = linear(512, 1152)
    assert size(model, **config) == 674_272_544 == video_dit_count(28, 1152, 4, text)
    longer = {**config, "patch_size_t": 2}
    assert size(model, **longer) == video_dit_count(28, 1152, 8, text)
    # DiT-B/2 and DiT-S/2's widths: OpenDiT has them for images.
    small = {**classes, "num_layers": 12, "num_attention_heads": 6, "attention_head_dim": 64}
    assert size(model, **small) == video_dit_count(12, 384, 4, 1001 * 384)


def test_latte_1s_size() -> None:
    assert size(LatteTransformer3DModel, **config_of("Latte-1")) == 1_057_246_880
    assert latte_count(28, 1152, 4096) == 1_057_246_880


@pytest.mark.parametrize(
    ("model_class", "name", "family", "layers"),
    [
        (VideoDiTTransformer3DModel, "VDiT-XL-1x2x2", "video_dit", 28 * 4),
        (LatteTransformer3DModel, "Latte-1", "latte", 28 * 12),
    ],
)
def test_lora_sizes(model_class: Any, name: str, family: str, layers: int) -> None:
    """Every adapted layer is 1152 wide on both sides."""
    with torch.device("meta"):
        model = model_class.from_config(config_of(name)).requires_grad_(False)
        report = attach_lora(model, LoraConfig(rank=16), get_family(family).lora_targets, seed=0)
    assert report.num_adapted == layers
    assert report.num_parameters == layers * 16 * 2 * 1152


def opened(name: str, folder: Path, recipe: Any) -> Any:
    """The checkpoint of a fixture, with weights that nothing reads."""
    path = Path(shutil.copytree(CONFIGS / name, folder / name))
    for component in ("transformer", "vae", "text_encoder"):
        (path / component).mkdir(exist_ok=True)
        save_file({"none": torch.zeros(1)}, path / component / "model.safetensors")
    model = recipe.model.model_copy(update={"path": str(path)})
    return get_family(recipe.model.family).open(model)


@pytest.mark.parametrize("name", RECIPES)
def test_its_recipe_fits_the_model(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    checkpoint = opened(RECIPES[name], tmp_path, recipe).apply_recipe(recipe)
    assert checkpoint.denoiser.should_train_variance
    assert checkpoint.denoiser.num_train_timesteps == 1000
    latents = VideoShape.from_data(recipe.data)
    config = config_of(RECIPES[name])
    frames = config.get("sample_frames") or config.get("video_length", 16)
    assert (latents.frames, latents.height // 8) == (
        frames,
        config.get("sample_height") or config["sample_size"],
    )
    torch.testing.assert_close(checkpoint.denoiser.objective.alpha[0].double(), torch.tensor(0.9999).double().sqrt())
    torch.testing.assert_close(checkpoint.denoiser.objective.log_beta[-1], torch.tensor(0.02).double().log().float())


def test_every_recipe_of_the_families_is_here() -> None:
    folders = [ROOT / "recipes" / family for family in ("video_dit", "latte")]
    recipe_names = {f"{path.parent.name}/{path.stem}" for f in folders for path in f.glob("*.yaml")}
    assert recipe_names == set(RECIPES)


def test_frames_that_latte_1_has_no_positions_for(tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "latte" / "latte1_lora.yaml")
    checkpoint = opened("Latte-1", tmp_path, recipe)
    checkpoint.info.check_shape(VideoShape(1, 256, 768))
    with pytest.raises(DitLoraError, match="frames must be 16, as its config's video_length, or 1"):
        checkpoint.info.check_shape(VideoShape(32, 512, 512))
