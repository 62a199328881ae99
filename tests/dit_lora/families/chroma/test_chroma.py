"""Chroma's own facts: prompts are cut like captions, Flash is known by its name, sizes are the published."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases.subject import CPU
from launching import ROOT
from safetensors.torch import save_file
from yaml import safe_load

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.load import load_recipe, parse_recipe
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.config.timesteps import TimestepsConfig
from dit_lora.families import get_family
from dit_lora.numerics.noise_levels import NoiseLevelDistribution

CONFIGS = ROOT / "tests" / "fixtures" / "configs" / "Chroma1-HD"
FAMILY = get_family("chroma")


def opened(path: Path) -> Any:
    return FAMILY.open(ModelConfig(family="chroma", path=str(path)))


def test_a_caption_keeps_one_pad_in_training_and_samples(tiny_checkpoints: dict[str, Path]) -> None:
    checkpoint = opened(tiny_checkpoints["chroma"])
    tokenizer = checkpoint.encoders.load_text_limit().tokenizer
    encoded = checkpoint.encoders.load_text_encoder(torch.float32, CPU)(["a red disc", ""])
    lengths = [len(tokenizer(caption).input_ids) + 1 for caption in ("a red disc", "")]
    assert encoded["prompt_attention_mask"].sum(1).tolist() == lengths
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    with torch.no_grad():
        embeddings, mask = pipeline._get_t5_prompt_embeds("a red disc")
    assert torch.equal(embeddings[0], encoded["prompt_embeds"][0, : lengths[0]])
    assert bool(mask.all())
    text = {name: tensor[:1] for name, tensor in encoded.items()}
    empty = {name: tensor[1:] for name, tensor in encoded.items()}
    arguments = checkpoint.sampler.prompt_kwargs(text, empty)
    assert torch.equal(arguments["prompt_embeds"], embeddings)
    assert arguments["negative_prompt_embeds"].shape[1] == lengths[1]


@pytest.mark.parametrize(("name", "warned"), [("Chroma1-Flash", True), ("Chroma1-HD", False)])
def test_a_run_on_flash_starts_with_a_warning(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, recipe_values: dict[str, Any], name: str, warned: bool
) -> None:
    path = Path(shutil.copytree(tiny_checkpoints["chroma"], tmp_path / name))
    values = {"data": {"path": ".", "height": 64, "width": 96}, "model": {"family": "chroma", "path": str(path)}}
    recipe = parse_recipe({**recipe_values, **values}, "test")
    checkpoint = FAMILY.open(recipe.model, recipe)
    notes = checkpoint.info.recipe_notes(recipe)
    assert any("breaks sampling in few steps" in note for note in notes) == warned
    train = {**recipe_values["train"], "target": "guided"}
    assert not checkpoint.info.recipe_notes(parse_recipe({**recipe_values, **values, "train": train}, "test"))


def counted(config: dict[str, Any]) -> int:
    """Weights of every layer, by hand."""
    width, hidden = config["num_attention_heads"] * config["attention_head_dim"], config["approximator_hidden_dim"]
    linear = (width + 1) * width
    feed_forward = (width + 1) * 4 * width + (4 * width + 1) * width
    double = 2 * (4 * linear + feed_forward) + 4 * 128
    single = 3 * linear + (width + 1) * 4 * width + (5 * width + 1) * width + 2 * 128
    approximator = (64 + 1) * hidden + 5 * (2 * (hidden + 1) * hidden + hidden) + (hidden + 1) * width
    ends = (4096 + 1) * width + (64 + 1) * width + (width + 1) * 64
    return 19 * double + 38 * single + approximator + ends


def test_sizes_are_the_published_ones_and_its_recipe_fits(tmp_path: Path) -> None:
    """Its author speaks of 8.9 billion parameters."""
    recipe = load_recipe(ROOT / "recipes" / "chroma" / "hd.yaml")
    assert recipe.model.path == "lodestones/Chroma1-HD"
    path = Path(shutil.copytree(CONFIGS, tmp_path / "Chroma1-HD"))
    for file in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, file.with_name("model.safetensors"))
    checkpoint = opened(path).apply_recipe(recipe)
    with torch.device("meta"):
        config = checkpoint.info.transformer_config
        transformer = checkpoint.denoiser.transformer_class.from_config(config).requires_grad_(False)
        num_parameters = sum(p.numel() for p in transformer.parameters())
        report = attach_lora(transformer, LoraConfig(rank=16), FAMILY.lora_targets, seed=0)
    assert num_parameters == counted(config)
    assert num_parameters / 1e9 == pytest.approx(8.9, abs=0.01)
    # Four layers of both streams and two of each feed-forward; three of the single blocks.
    assert report.num_adapted == 19 * 12 + 38 * 3
    licence = FAMILY.get_license("lodestones/Chroma1-HD")
    assert licence is not None
    assert licence.id == "apache-2.0"


def test_the_recipes_other_noise_levels_are_those_of_chromas_author() -> None:
    """Their density is 2 - 7.7 (level - 0.5)^2, normalised (lodestone-rock/flow, trainer/train_chroma.py)."""
    text = (ROOT / "recipes" / "chroma" / "hd.yaml").read_text()
    match = re.search(r"# timesteps: (\{.*\})  .* within (\S+) of", text)
    assert match is not None
    config = TimestepsConfig.model_validate(safe_load(match[1]))
    assert config.shift == 1
    levels = torch.linspace(1e-6, 1 - 1e-6, 2001, dtype=torch.float64)
    integral = 2 * levels - 7.7 / 3 * ((levels - 0.5) ** 3 + 0.125)
    difference = NoiseLevelDistribution(std=config.std or 1.0).cdf(levels, shift=1.0) - integral / (2 - 7.7 / 12)
    assert difference.abs().max() < float(match[2])
