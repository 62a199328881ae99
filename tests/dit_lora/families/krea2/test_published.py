"""The published config of Krea 2 Raw: sizes, LoRA sizes, a caption's place in the cache, and a recipe that fits it."""

import json
import re
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
from dit_lora.data.cache.cache import TensorCache, encode_entry
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family

CONFIGS = ROOT / "tests" / "fixtures" / "configs" / "Krea-2-Raw"
RECIPE = ROOT / "recipes" / "krea2" / "raw.yaml"
FAMILY = get_family("krea2")
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "to_gate")
AROUND = (
    *(
        "img_in",
        "final_layer.linear",
        "text_fusion.projector",
        "txt_in.linear_1",
        "txt_in.linear_2",
    ),
    *("time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Any:
    """With fp32 weights that nothing reads."""
    path = Path(shutil.copytree(CONFIGS, tmp_path / "Krea-2-Raw"))
    for config in [*path.glob("*/config.json")]:
        save_file({"none": torch.zeros(1)}, config.with_name("model.safetensors"))
    recipe = load_recipe(RECIPE)
    return FAMILY.open(recipe.model.model_copy(update={"path": str(path)}))


def counted(config: dict[str, Any]) -> int:
    """Weights of every layer, by hand; attention and feed-forward have no bias."""
    head = config["attention_head_dim"]
    width, text = head * config["num_attention_heads"], config["text_hidden_dim"]
    keys = head * config["num_key_value_heads"]
    # q, gate and output; k and v; three of the feed-forward; two norms, two of heads; the table.
    block = 3 * width * width + 2 * keys * width + 3 * width * config["intermediate_size"]
    block += 2 * width + 2 * head + 6 * width
    # Keys of the fusion are as many as its queries.
    fusion = 5 * text * text + 3 * text * config["text_intermediate_size"] + 2 * text
    fusion += 2 * (text // config["text_num_attention_heads"])
    time = config["timestep_embed_dim"] * width + width * width + 2 * width
    time += 6 * width * width + 6 * width
    channels = config["in_channels"]
    image = channels * width + width + width * channels + channels + 3 * width
    text_parameters = text + text * width + width * width + 2 * width + config["num_text_layers"]
    blocks = config["num_layerwise_text_blocks"] + config["num_refiner_text_blocks"]
    return config["num_layers"] * block + blocks * fusion + time + image + text_parameters


def attached(checkpoint: Any, targets: tuple[str, ...]) -> tuple[Any, set[str]]:
    """The report, and the names of the layers that have an adapter."""
    with torch.device("meta"):
        config = checkpoint.info.transformer_config
        model = checkpoint.denoiser.transformer_class.from_config(config).requires_grad_(False)
        report = attach_lora(model, LoraConfig(rank=16), targets, seed=0)
    return report, {n for n, m in model.named_modules() if hasattr(m, "lora_A")}


def test_sizes_are_the_published_ones_and_its_recipe_fits(checkpoint: Any) -> None:
    """Krea speaks of 12 billion."""
    recipe = load_recipe(RECIPE)
    assert recipe.model.path == "krea/Krea-2-Raw"
    fitting = checkpoint.apply_recipe(recipe)
    with torch.device("meta"):
        config = fitting.info.transformer_config
        transformer = fitting.denoiser.transformer_class.from_config(config)
    num_parameters = sum(p.numel() for p in transformer.parameters())
    assert num_parameters == counted(config) == 12_820_073_036
    assert fitting.denoiser.objective.shift is None
    assert fitting.denoiser.compute_shift_mu(torch.Size([16, 1, 160, 160])) == pytest.approx(1.15)
    assert fitting.denoiser.compute_shift_mu(torch.Size([16, 1, 32, 32])) == pytest.approx(0.5)
    fitting.info.check_shape(VideoShape(1, 1040, 752))
    with pytest.raises(DitLoraError, match="width must be a multiple of 16; got 760, nearest 752"):
        fitting.info.check_shape(VideoShape(1, 1040, 760))


def test_the_default_layers_are_attentions_with_its_gate(checkpoint: Any) -> None:
    """The layers are those of 28 blocks and four of the text fusion; the feed-forward's gate is another layer."""
    report, names = attached(checkpoint, checkpoint.info.lora_targets(FAMILY.lora_targets))
    blocks = [f"transformer_blocks.{i}" for i in range(28)]
    blocks += [f"text_fusion.{kind}_blocks.{i}" for kind in ("layerwise", "refiner") for i in (0, 1)]
    assert names == {f"{block}.attn.{layer}" for block in blocks for layer in ATTENTION}
    assert (report.num_adapted, report.num_parameters) == (160, 25_034_752)


def test_the_longer_list_of_the_recipe_names_what_it_should(checkpoint: Any) -> None:
    match = re.search(r"# targets: \[(.*?)\]", RECIPE.read_text(), re.DOTALL)
    assert match
    targets = tuple(re.sub(r"[\s#]+", " ", match[1]).replace(" ", "").split(","))
    assert set(targets) == {*ATTENTION, *AROUND, "ff.up", "ff.down"}
    report, names = attached(checkpoint, targets)
    assert report.num_adapted == 160 + 2 * 32 + len(AROUND)
    assert names >= set(AROUND)
    assert not [name for name in names if name.endswith("ff.gate")]


def test_a_caption_takes_thirty_mebibytes_of_the_cache(checkpoint: Any, tmp_path: Path) -> None:
    spec = checkpoint.encoders.text_spec(torch.bfloat16)
    tensors = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in spec.items()}
    cache = TensorCache(tmp_path / "texts")
    cache.write_entries([encode_entry("a" * 64, tensors, sample="one", facts={})])
    on_disk = sum(file.stat().st_size for file in cache.root.rglob("*") if file.is_file())
    assert on_disk == pytest.approx(512 * 12 * 2560 * 2, rel=0.05)
    read, fault = cache.read("a" * 64, spec)
    assert fault is None
    assert read["prompt_embeds_mask"].dtype is torch.bool


def test_the_text_encoder_has_the_layers_that_the_transformer_takes(checkpoint: Any) -> None:
    text = json.loads((CONFIGS / "text_encoder" / "config.json").read_text())["text_config"]
    transformer_config = checkpoint.info.transformer_config
    assert transformer_config["text_hidden_dim"] == text["hidden_size"]
    assert len(checkpoint.info.text_encoder_layers) == transformer_config["num_text_layers"]
    assert max(checkpoint.info.text_encoder_layers) <= text["num_hidden_layers"]


@pytest.mark.parametrize("name", ["Krea-2-Raw", "Krea-2-Turbo"])
def test_the_licence_is_kreas_own(name: str) -> None:
    licence = FAMILY.get_license(f"krea/{name}")
    assert licence is not None
    assert (licence.id, licence.name) == ("other", "krea-2-community-license")
    assert licence.link == "https://www.krea.ai/krea-2-licensing"
