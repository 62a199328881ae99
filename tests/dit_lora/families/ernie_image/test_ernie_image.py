"""ERNIE-Image's own facts: the rewriter of prompts stays out, Turbo is known by its name, sizes are the published."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases.subject import changed
from launching import ROOT
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.config.load import load_recipe, parse_recipe
from dit_lora.config.recipe import LoraConfig, ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.ernie_image.checkpoint import MAX_TEXT_TOKENS
from dit_lora.training.tasks.diffusion.model import patch_kernels

CONFIGS = ROOT / "tests" / "fixtures" / "configs" / "ERNIE-Image"
FAMILY = get_family("ernie_image")


def opened(path: Path) -> Any:
    return FAMILY.open(ModelConfig(family="ernie_image", path=str(path)))


def test_samples_and_captions_do_without_the_prompt_enhancer(
    tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A component that cannot be loaded shows that nobody asks for it."""
    path = changed(
        tiny_checkpoints["ernie-image"],
        tmp_path / "with-enhancer",
        "model_index.json",
        pe=["transformers", "Ministral3ForCausalLM"],
        pe_tokenizer=["transformers", "Qwen2Tokenizer"],
    )
    checkpoint = opened(path)
    pipeline = checkpoint.sampler.pipeline(torch.float32)
    assert pipeline.pe is None
    encode = checkpoint.encoders.load_text_encoder(torch.float32, torch.device("cpu"))
    encoded = encode(["a red disc " * 80])
    assert int(encoded["prompt_attention_mask"].sum()) == MAX_TEXT_TOKENS
    # A prompt of a sample is cut as a caption is.
    (embeddings,) = pipeline.encode_prompt("a red disc " * 80, torch.device("cpu"))
    assert torch.equal(embeddings, encoded["prompt_embeds"][0])


@pytest.mark.parametrize(
    ("name", "warned"), [("ERNIE-Image-Turbo", True), ("ERNIE-Image", False), ("ERNIE-Image-De-Turbo", False)]
)
def test_a_run_on_turbo_starts_with_a_warning(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, recipe_values: dict[str, Any], name: str, warned: bool
) -> None:
    path = Path(shutil.copytree(tiny_checkpoints["ernie-image"], tmp_path / name))
    values = {"data": {"path": ".", "height": 64, "width": 96}, "model": {"family": "ernie_image", "path": str(path)}}
    recipe = parse_recipe({**recipe_values, **values}, "test")
    checkpoint = FAMILY.open(recipe.model, recipe)
    notes = checkpoint.info.recipe_notes(recipe)
    assert any("breaks sampling in eight steps" in note for note in notes) == warned
    train = {**recipe_values["train"], "target": "guided"}
    assert not checkpoint.info.recipe_notes(parse_recipe({**recipe_values, **values, "train": train}, "test"))


def test_sharing_a_samples_tokens_is_not_refused_for_a_kernel_that_nobody_set(
    tiny_checkpoints: dict[str, Path], recipe_values: dict[str, Any]
) -> None:
    """`enable_context_parallel` refuses it, by its own option."""
    path = tiny_checkpoints["ernie-image"]
    values = {
        "data": {"path": ".", "height": 64, "width": 96},
        "model": {"family": "ernie_image", "path": str(path)},
        "train": {"steps": 1, "context_parallel": 2},
    }
    recipe = parse_recipe({**recipe_values, **values}, "test")
    assert patch_kernels(recipe, opened(path).denoiser.load_transformer(torch.float32)) == ""


def test_a_shift_by_size_is_refused(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tiny = tiny_checkpoints["ernie-image"]
    path = changed(tiny, tmp_path / "dynamic", "scheduler/scheduler_config.json", use_dynamic_shifting=True)
    with pytest.raises(DitLoraError, match="shifts by image size"):
        opened(path)


def counted(config: dict[str, Any]) -> int:
    """Weights of every layer, by hand."""
    width = config["hidden_size"]
    layer = 4 * width * width + 3 * width * config["ffn_hidden_size"] + 2 * width + 2 * 128
    time = 2 * (width + 1) * width + 6 * (width + 1) * width
    ends = 129 * width + 3072 * width + 2 * (width + 1) * width + (width + 1) * 128
    return config["num_layers"] * layer + time + ends


def test_sizes_are_the_published_ones_and_its_recipe_fits(tmp_path: Path) -> None:
    """Its authors speak of 8 billion parameters."""
    recipe = load_recipe(ROOT / "recipes" / "ernie_image" / "base.yaml")
    assert recipe.model.path == "baidu/ERNIE-Image"
    path = Path(shutil.copytree(CONFIGS, tmp_path / "ERNIE-Image"))
    for file in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, file.with_name("model.safetensors"))
    checkpoint = opened(path).apply_recipe(recipe)
    with torch.device("meta"):
        config = checkpoint.info.transformer_config
        transformer = checkpoint.denoiser.transformer_class.from_config(config).requires_grad_(False)
        num_parameters = sum(p.numel() for p in transformer.parameters())
        report = attach_lora(transformer, LoraConfig(rank=16), FAMILY.lora_targets, seed=0)
    assert num_parameters == counted(config) == 8_033_490_048
    assert (report.num_adapted, report.num_parameters) == (144, 18_874_368)
    assert checkpoint.denoiser.objective.shift == 4.0
    licence = FAMILY.get_license("baidu/ERNIE-Image-Turbo")
    assert licence is not None
    assert licence.id == "apache-2.0"
