"""The published LTX-Video configs: sizes, LoRA size, and recipes that fit them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, LTXVideoTransformer3DModel
from launching import ROOT
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
# Parameters of the transformer, and of LoRA at rank 32 on q, k, v and out of both attentions; computed. Lightricks say
# 2B.
WHOLE, ADAPTER = 1_923_385_472, 28 * 8 * 32 * 2 * 2048
RECIPES = {"0.9_t2v": "LTXVideoInfo", "0.9_i2v": "LTXVideoImageInfo"}


def counted(layers: int, width: int, channels: int, text: int) -> int:
    """Weights and biases of every layer, by hand."""

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    attention = 4 * linear(width, width) + 2 * width
    feed_forward = linear(width, 4 * width) + linear(4 * width, width)
    block = 2 * attention + feed_forward + 6 * width
    time = linear(256, width) + linear(width, width) + linear(width, 6 * width)
    caption = linear(text, width) + linear(width, width)
    return layers * block + time + caption + 2 * width + linear(channels, width) + linear(width, channels)


@pytest.mark.parametrize("name", ["LTX-Video", "LTX-Video-0.9.1-diffusers"])
@pytest.mark.parametrize("stem", RECIPES)
def test_sizes_are_the_published_ones_and_its_recipe_fits(name: str, stem: str, tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes" / "ltx_video" / f"{stem}.yaml")
    assert recipe.model.path == "Lightricks/LTX-Video"
    path = Path(shutil.copytree(CONFIGS / name, tmp_path / "unnamed"))
    for config in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, config.with_name("model.safetensors"))
    family = get_family("ltx_video")
    model = recipe.model.model_copy(update={"path": str(path)})
    checkpoint = family.open(model).apply_recipe(recipe)
    assert type(checkpoint.info).__name__ == RECIPES[stem]
    with torch.device("meta"):
        config, vae_config = checkpoint.info.transformer_config, checkpoint.info.vae_config
        transformer: Any = LTXVideoTransformer3DModel.from_config(config).requires_grad_(False)
        assert sum(p.numel() for p in transformer.parameters()) == WHOLE
        vae = AutoencoderKLLTXVideo.from_config(vae_config)
        targets = checkpoint.info.lora_targets(family.lora_targets)
        report = attach_lora(transformer, LoraConfig(rank=32), targets, seed=0)
    assert counted(28, 2048, 128, 4096) == WHOLE
    assert (report.num_adapted, report.num_parameters) == (28 * 8, ADAPTER)
    factors = (checkpoint.info.spatial_factor, checkpoint.info.temporal_factor)
    assert factors == (32, 8) == (vae.spatial_compression_ratio, vae.temporal_compression_ratio)
    shape = VideoShape.from_data(recipe.data)
    size = torch.Size([128, (shape.frames - 1) // 8 + 1, shape.height // 32, shape.width // 32])
    assert size[1:].numel() == 4032
    assert "4,032 video tokens" in (ROOT / "recipes" / "ltx_video" / f"{stem}.yaml").read_text()
    assert checkpoint.denoiser.compute_shift(size) == pytest.approx(7.6, abs=0.05)
    assert (checkpoint.info.frame_rate, checkpoint.info.text_tokens) == (25, 128)
    assert ("decode_timestep" in checkpoint.sampler.shape_kwargs(shape)) == ("0.9.1" in name)
    with pytest.raises(DitLoraError, match="width must be a multiple of 32; got 840"):
        checkpoint.info.check_shape(VideoShape(89, 448, 840))


def test_every_recipe_of_the_family_is_tried_and_its_licence_known() -> None:
    assert {path.stem for path in (ROOT / "recipes" / "ltx_video").glob("*.yaml")} == set(RECIPES)
    licence = get_family("ltx_video").get_license("Lightricks/LTX-Video")
    assert licence.link.endswith("LTX-Video-Open-Weights-License-0.X.txt")
