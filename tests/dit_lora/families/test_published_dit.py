"""The published DiT config: its size, its LoRA's size, and recipes that fit it."""

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from diffusers import DiTTransformer2DModel
from launching import ROOT
from PIL import Image
from safetensors.torch import save_file

from dit_lora.adapters.attach import attach_lora
from dit_lora.adapters.groups import build_recipe_groups
from dit_lora.config.load import load_recipe
from dit_lora.config.recipe import LoraConfig
from dit_lora.families import get_family

FIXTURE = ROOT / "tests" / "fixtures" / "configs" / "DiT-XL-2-256"
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def opened(recipe: Any, folder: Path) -> Any:
    """The checkpoint of the fixture, with weights that nothing reads."""
    path = Path(shutil.copytree(FIXTURE, folder / "model"))
    for component in ("transformer", "vae"):
        save_file({"none": torch.zeros(1)}, path / component / "model.safetensors")
    return get_family("dit").open(recipe.model.model_copy(update={"path": str(path)}))


def counted(layers: int, width: int, classes: int) -> tuple[int, int]:
    """Weights and biases by hand: as DiT has them, and what Diffusers repeats in every block."""

    def linear(inputs: int, outputs: int) -> int:
        return inputs * outputs + outputs

    embedders = linear(256, width) + linear(width, width) + (classes + 1) * width
    block = linear(width, 6 * width) + 4 * linear(width, width)
    block += linear(width, 4 * width) + linear(4 * width, width)
    ends = linear(2 * 2 * 4, width) + linear(width, 2 * width) + linear(width, 2 * 2 * 8)
    return ends + embedders + layers * block, (layers - 1) * embedders


def test_the_size_is_the_published_one() -> None:
    """675,129,632 with the position table (DiT's own log); Diffusers repeats the embedders in 28 blocks."""
    config = json.loads((FIXTURE / "transformer" / "config.json").read_text())
    num_parameters, repeated = counted(28, 1152, 1000)
    assert num_parameters + 256 * 1152 == 675_129_632
    with torch.device("meta"):
        transformer = DiTTransformer2DModel.from_config(config).requires_grad_(False)
        size = sum(p.numel() for p in transformer.parameters())
        report = attach_lora(transformer, LoraConfig(rank=16), get_family("dit").lora_targets, seed=0)
    assert size == num_parameters + repeated == 749_826_464
    assert (report.num_adapted, report.num_parameters) == (4 * 28, 28 * 4 * 16 * 2 * 1152)


def test_the_lora_recipe_takes_classes_of_ones_own_and_imagenets(tmp_path: Path) -> None:
    for name in ("tabby_cat", "my_dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("RGB", (256, 256)).save(tmp_path / "images" / name / "0.png")
    overrides = [f"data.path={tmp_path / 'images'}"]
    recipe = load_recipe(ROOT / "recipes" / "dit" / "xl2_256_lora.yaml", overrides)
    checkpoint = opened(recipe, tmp_path).apply_recipe(recipe)
    assert (
        checkpoint.info.trained_classes.find_label_row("tabby cat"),
        checkpoint.info.trained_classes.find_label_row("my dog"),
    ) == (281, 1001)
    assert checkpoint.info.pipeline_class.__module__.startswith("diffusers.")
    assert checkpoint.denoiser.should_train_variance
    with torch.device("meta"):
        config = {**checkpoint.info.transformer_config}
        transformer = DiTTransformer2DModel.from_config(config).requires_grad_(False)
        attach_lora(transformer, recipe.lora, get_family("dit").lora_targets, seed=0)
        groups = build_recipe_groups(transformer, recipe.optim.groups, get_family("dit").group_patterns)
    sizes = {group["name"]: sum(p.numel() for p in group["params"]) for group in groups}
    assert sizes == {"adapter": 4_128_768, "connector": 28 * 1002 * 1152}


def test_the_cifar_recipe_builds_dit_s2_with_ten_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dataset's columns are the published ones: img, and label with its names."""
    images = [Image.new("RGB", (32, 32), (i, i, i)) for i in range(10)]
    features = {"img": datasets.Image(), "label": datasets.ClassLabel(names=CIFAR10)}
    rows = datasets.Dataset.from_dict({"img": images, "label": list(range(10))}, features=datasets.Features(features))
    monkeypatch.setattr(datasets, "load_dataset", {"uoft-cs/cifar10": {"train": rows}}.__getitem__)
    overrides = [f"run.dir={tmp_path / 'run'}"]
    recipe = load_recipe(ROOT / "recipes" / "dit" / "cifar10_scratch.yaml", overrides)
    checkpoint = opened(recipe, tmp_path).apply_recipe(recipe)
    assert [checkpoint.info.trained_classes.find_label_row(name) for name in CIFAR10] == list(range(10))
    assert checkpoint.info.trained_classes.null_label_row == 10
    with torch.device("meta"):
        config = {**checkpoint.info.transformer_config}
        transformer = DiTTransformer2DModel.from_config(config)
    assert sum(p.numel() for p in transformer.parameters()) == sum(counted(12, 384, 10))
