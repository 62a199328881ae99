"""The published LTX-2 configs: sizes, LoRA sizes, a caption's place in the cache, and recipes that fit them."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from launching import ROOT
from safetensors.torch import save_file
from torch import nn

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import LoraConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.ltx2.sound import count_audio_tokens

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
RECIPES = ROOT / "recipes" / "ltx2"
FAMILY = get_family("ltx2")
# Parameters of the transformer, MiB of a caption in bf16. Lightricks speaks of 19 and 22 billion; the second has the
# connectors and the vocoder in it.
PUBLISHED = {
    "LTX-2": (18_876_174_592, 15),
    "LTX-2.3-Diffusers": (18_988_838_144, 12),
    # 37.976 GB in bf16, the published size of its files.
    "LTX-2.5-Diffusers": (18_987_859_200, 12),
}
KINDS = {
    "2_t2v": ("LTX-2", "LTX2Info"),
    "2.3_t2v": ("LTX-2.3-Diffusers", "LTX2Info"),
    "2.3_t2v_sound": ("LTX-2.3-Diffusers", "LTX2Info"),
    "2.3_i2v": ("LTX-2.3-Diffusers", "LTX2ImageInfo"),
    "2.3_i2v_sound": ("LTX-2.3-Diffusers", "LTX2ImageInfo"),
    "2.3_ic_lora": ("LTX-2.3-Diffusers", "LTX2InContextInfo"),
    "2.5_t2v": ("LTX-2.5-Diffusers", "LTX2Info"),
}
SOUND = ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
MIB = 2**20


def opened(stem: str, folder: Path) -> Any:
    """The recipe's checkpoint, of a fixture with fp32 weights that nothing reads."""
    name, _ = KINDS[stem]
    path = Path(shutil.copytree(CONFIGS / name, folder / "unnamed"))
    for config in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, config.with_name("model.safetensors"))
    recipe = load_recipe(RECIPES / f"{stem}.yaml")
    model = recipe.model.model_copy(update={"path": str(path)})
    return FAMILY.open(model, recipe.model_copy(update={"model": model}))


@cache
def config_of(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name / "transformer" / "config.json").read_text())


def counted(config: dict[str, Any]) -> int:
    """Weights and biases of every layer, by hand."""
    video, audio = (
        config[f"{kind}num_attention_heads"] * config[f"{kind}attention_head_dim"] for kind in ("", "audio_")
    )
    gated, heads = config.get("gated_attn", False), config["num_attention_heads"]

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    def attention(query: int, inner: int, keys: int) -> int:
        layers = linear(query, inner) + 2 * linear(keys, inner) + linear(inner, query)
        return layers + 2 * inner + (linear(query, heads) if gated else 0)

    def embedded(width: int, rows: int) -> int:
        return linear(256, width) + linear(width, width) + linear(width, rows * width)

    rows = 9 if gated else 6
    block, ends = attention(video, audio, audio) + attention(audio, audio, video), 0
    texts = config["cross_attention_dim"], config["audio_cross_attention_dim"]
    for width, text in zip((video, audio), texts, strict=True):
        block += attention(width, width, width) + attention(width, width, text)
        block += linear(width, 4 * width) + linear(4 * width, width)
        if width == video and not config.get("ff_bias", True):
            block -= 5 * width
        block += (rows + 5 + (2 if gated else 0)) * width
        ends += linear(128, width) + linear(width, 128) + 2 * width
        ends += embedded(width, rows) + embedded(width, 4) + embedded(width, 1)
        projection = linear(config["caption_channels"], width) + linear(width, width)
        ends += embedded(width, 2) if gated else projection
    ends += video if config.get("use_keyframes_abs_pos_embedding", False) else 0
    return config["num_layers"] * block + ends


def adapted(model: nn.Module) -> dict[str, int]:
    """The names of the layers with an adapter, with their inputs and outputs together."""
    return {
        name: module.in_features + module.out_features
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str, tmp_path: Path) -> None:
    """And layers with LoRA: the video's 384, and with sound all attention's 1,152."""
    num_parameters, _ = PUBLISHED[name]
    stem = next(stem for stem, (kind_name, _) in KINDS.items() if kind_name == name)
    checkpoint = opened(stem, tmp_path)
    with torch.device("meta"):
        meta_model: Any = LTX2VideoTransformer3DModel.from_config(config_of(name)).requires_grad_(False)
    assert sum(p.numel() for p in meta_model.parameters()) == num_parameters == counted(config_of(name))
    with torch.device("meta"):
        targets = checkpoint.info.lora_targets(FAMILY.lora_targets)
        report = attach_lora(meta_model, LoraConfig(rank=16), targets, seed=0)
    layers = adapted(meta_model)
    assert report.num_adapted == len(layers) == 48 * 2 * 4 == 384
    assert report.num_parameters == 16 * sum(layers.values()) == 50_331_648
    assert not [layer for layer in layers if layer.split(".")[2] in SOUND]
    meta_model.delete_adapters("default")
    with torch.device("meta"):
        targets = replace(checkpoint.info, has_sound=True).lora_targets(FAMILY.lora_targets)
        report = attach_lora(meta_model, LoraConfig(rank=16), targets, seed=0)
    layers = adapted(meta_model)
    assert report.num_adapted == len(layers) == 48 * 6 * 4 == 1152
    assert report.num_parameters == 16 * sum(layers.values()) == 106_954_752
    assert {layer.split(".")[2] for layer in layers} == {"attn1", "attn2", *SOUND}


@pytest.mark.parametrize("stem", KINDS)
def test_its_recipe_fits_a_published_checkpoint(stem: str, tmp_path: Path) -> None:
    name, kind = KINDS[stem]
    recipe, checkpoint = load_recipe(RECIPES / f"{stem}.yaml"), opened(stem, tmp_path)
    # The folder that 2.5's recipe writes with the full model in it.
    paths = {"LTX-2": "Lightricks/LTX-2", "LTX-2.5-Diffusers": "models/ltx-2.5"}
    assert recipe.model.path == paths.get(name, f"diffusers/{name}")
    assert type(checkpoint.info).__name__ == kind
    shape = VideoShape.from_data(recipe.data)
    grid = torch.Size((128, (shape.frames - 1) // 8 + 1, shape.height // 32, shape.width // 32))
    assert grid[1:].numel() == 6144
    assert "6,144 video tokens" in (RECIPES / f"{stem}.yaml").read_text()
    assert checkpoint.info.has_sound == stem.endswith("_sound")
    heard = count_audio_tokens(checkpoint.info.audio_vae, shape.frames / checkpoint.info.frame_rate)
    assert not checkpoint.info.has_sound or f"and {heard} of sound" in (RECIPES / f"{stem}.yaml").read_text()
    assert (checkpoint.info.frame_rate, checkpoint.info.text_tokens) == (24, 1024)
    # Where the trainer's line ends; a sixth of those tokens are its other end.
    assert checkpoint.denoiser.compute_shift_mu(grid) == pytest.approx(0.95 + (6144 - 1024) * 1.1 / 3072)
    assert checkpoint.denoiser.compute_shift_mu(torch.Size((128, 4, 16, 16))) == pytest.approx(0.95)
    levels = checkpoint.denoiser.objective.distribution
    assert (levels.density, checkpoint.denoiser.num_train_timesteps) == ("stretched_logit_normal", 1000)
    with pytest.raises(DitLoraError, match="width must be a multiple of 32; got 752"):
        checkpoint.info.check_shape(VideoShape(121, 512, 752))
    with pytest.raises(DitLoraError, match=r"frames must be 8n \+ 1; got 120"):
        checkpoint.info.check_shape(VideoShape(120, 512, 768))


@pytest.mark.parametrize("stem", ["2_t2v", "2.3_t2v", "2.5_t2v"])
def test_a_caption_takes_in_the_cache_what_the_recipe_says(stem: str, tmp_path: Path) -> None:
    """What the connectors make of it, in place of all hidden states of Gemma: 367 MiB."""
    _, mebibytes = PUBLISHED[KINDS[stem][0]]
    checkpoint = opened(stem, tmp_path)
    spec = checkpoint.encoders.text_spec(torch.bfloat16)
    size = sum(shape.numel() * dtype.itemsize for shape, dtype in spec.values())
    assert size / MIB == pytest.approx(mebibytes, rel=0.05)
    assert f"{size / 1e6:.1f} MB of cache a caption" in (RECIPES / f"{stem}.yaml").read_text()
    text = json.loads((checkpoint.path / "text_encoder" / "config.json").read_text())["text_config"]
    states = (text["num_hidden_layers"] + 1) * text["hidden_size"]
    assert checkpoint.info.connectors["text_proj_in_factor"] == text["num_hidden_layers"] + 1
    assert checkpoint.info.text_tokens * states * 2 / MIB == pytest.approx(367, rel=0.01)


def test_every_recipe_of_the_family_is_tried() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize("path", ["Lightricks/LTX-2", "diffusers/LTX-2.3-Diffusers", "Lightricks/LTX-2.5-Diffusers"])
def test_the_licence_of_each_base_is_known(path: str) -> None:
    licence = FAMILY.get_license(path)
    assert licence is not None
    assert (licence.id, licence.name) == ("other", f"ltx-2{'.x' if '2.5' in path else ''}-community-license-agreement")
