"""The published Qwen-Image configs: sizes, LoRA sizes, the recipe that fits them, and what a caption costs on disk."""

import json
import math
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
from dit_lora.data.cache.cache import TensorCache, encode_entry, make_entry_key
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

CONFIGS = ROOT / "tests" / "fixtures" / "configs" / "Qwen-Image"
# Computed. Qwen speak of 20 billion; an operator report counts the same number from the published files.
PARAMETERS = 20_430_401_088
# Names that Diffusers' script and DiffSynth-Studio adapt, layers with LoRA and its parameters at rank 16.
IMAGE_STREAM = ("to_q", "to_k", "to_v", "to_out.0")
BOTH_STREAMS = (
    *(*IMAGE_STREAM, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    *("img_mlp.net.2", "img_mod.1", "txt_mlp.net.2", "txt_mod.1"),
)
ADAPTERS = {IMAGE_STREAM: (60 * 4, 23_592_960), BOTH_STREAMS: (60 * 12, 117_964_800)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Any:
    """The checkpoint as the recipe opens it, with fp32 weights that nothing reads."""
    path = Path(shutil.copytree(CONFIGS, tmp_path / "Qwen-Image"))
    for config in [*path.glob("*/config.json")]:
        save_file({"none": torch.zeros(1)}, config.with_name("model.safetensors"))
    recipe = load_recipe(ROOT / "recipes" / "qwen_image" / "base.yaml")
    assert recipe.model.path == "Qwen/Qwen-Image"
    model = recipe.model.model_copy(update={"path": str(path)})
    return get_family("qwen_image").open(model, recipe)


def counted(config: dict[str, Any]) -> int:
    """Weights and biases of every layer, by hand."""
    width, head = config["num_attention_heads"] * 128, 128

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    attention = 4 * linear(width, width) + 2 * head
    mlp = linear(width, 4 * width) + linear(4 * width, width)
    stream = attention + mlp + linear(width, 6 * width)
    text = config["joint_attention_dim"]
    ends = linear(64, width) + text + linear(text, width) + linear(width, 64)
    time = linear(256, width) + linear(width, width) + linear(width, 2 * width)
    return config["num_layers"] * 2 * stream + ends + time


def test_sizes_are_the_published_ones_and_the_recipe_fits(checkpoint: Any) -> None:
    config = checkpoint.info.transformer_config
    with torch.device("meta"):
        transformer = checkpoint.denoiser.transformer_class.from_config(dict(config))
    assert sum(p.numel() for p in transformer.parameters()) == PARAMETERS == counted(config)
    checkpoint.info.check_shape(VideoShape(1, 1328, 1328))
    with pytest.raises(DitLoraError, match="width must be a multiple of 16; got 760, nearest 752"):
        checkpoint.info.check_shape(VideoShape(1, 1040, 760))
    # 0.5 at 256 tokens and 0.9 at 8192; musubi-tuner's advice is a shift of 2.2 at 1328x1328.
    shift = checkpoint.denoiser.compute_shift(torch.Size([16, 1, 166, 166]))
    assert shift == pytest.approx(math.exp(0.5 + (83 * 83 - 256) * 0.4 / 7936))
    assert 2.2 < shift < 2.4


@pytest.mark.parametrize("targets", ADAPTERS)
def test_the_default_targets_and_the_recipes_other_ones_are_as_large_as_computed(
    checkpoint: Any, targets: tuple[str, ...]
) -> None:
    family = get_family("qwen_image")
    assert checkpoint.info.lora_targets(family.lora_targets) == IMAGE_STREAM
    with torch.device("meta"):
        transformer = checkpoint.denoiser.transformer_class.from_config(dict(checkpoint.info.transformer_config))
        report = attach_lora(transformer.requires_grad_(False), LoraConfig(rank=16), targets, seed=0)
    assert (report.num_adapted, report.num_parameters) == ADAPTERS[targets]
    # The recipe names both.
    text = (ROOT / "recipes" / "qwen_image" / "base.yaml").read_text()
    assert all(target in text for target in BOTH_STREAMS)


def test_a_captions_size_is_that_of_512_tokens_of_the_text_encoder(checkpoint: Any, tmp_path: Path) -> None:
    """3.5 MiB: half of what the 1024 tokens take that the pipeline can be asked for; on disk next to nothing more."""
    width = json.loads((CONFIGS / "text_encoder" / "config.json").read_text())["hidden_size"]
    spec = checkpoint.encoders.text_spec(torch.bfloat16)
    assert spec["prompt_embeds"] == ((512, width), torch.bfloat16)
    tensors = {name: torch.ones(size, dtype=dtype) for name, (size, dtype) in spec.items()}
    cache = TensorCache(tmp_path / "texts")
    entries = [encode_entry(make_entry_key({"n": n}), tensors, sample=str(n), facts={"n": n}) for n in range(4)]
    cache.write_entries(entries)
    stored = sum(file.stat().st_size for file in (tmp_path / "texts").rglob("*"))
    # Of a thousand: 3.42 GiB, 3.67 GB.
    assert 250 * stored == pytest.approx(1000 * 3.5 * 2**20, rel=0.01)


def test_its_licence_is_known_and_its_recipe_is_the_families() -> None:
    family = get_family("qwen_image")
    edit = ("Qwen-Image-Edit", "Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511")
    for name in ("Qwen-Image", "Qwen-Image-2512", *edit):
        assert family.get_license(f"Qwen/{name}").id == "apache-2.0"
    recipes = {path.stem for path in (ROOT / "recipes" / "qwen_image").glob("*.yaml")}
    assert recipes == {"base", "edit", "edit_plus"}
    assert family.default_recipe == "qwen_image/base"
