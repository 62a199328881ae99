"""The recipes of chat models, at the published sizes: what opens, what trains, and what their headers count."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from launching import ROOT
from transformers import AutoConfig, AutoModelForImageTextToText

from dit_lora.adapters.groups import build_recipe_groups
from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.config.optim import GroupConfig, GroupsConfig
from dit_lora.config.recipe import Recipe
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.chat import checkpoint as chat_checkpoint
from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration
from dit_lora.training.tasks.chat.task import ChatTask

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
RECIPES = {
    "videochat2/mistral_stage3": "VideoChat2-Mistral-7B",
    "videochat2/mistral_stage2": "VideoChat2-Mistral-7B",
    "videochat2/mistral_hd": "VideoChat2-HD-Mistral-7B",
    "chat/llava_next_video": "LLaVA-NeXT-Video-7B-hf",
    "chat/qwen": "Qwen2.5-VL-7B-Instruct",
    "chat/smolvlm2": "SmolVLM2-2.2B-Instruct",
}
# Of a language model: blocks, width, width of keys and values, of the feed-forward.
BLOCKS = {
    "VideoChat2-Mistral-7B": (32, 4096, 1024, 14336),
    "LLaVA-NeXT-Video-7B-hf": (32, 4096, 4096, 11008),
    "Qwen2.5-VL-7B-Instruct": (28, 3584, 512, 18944),
    "SmolVLM2-2.2B-Instruct": (24, 2048, 2048, 8192),
}
BLOCKS["VideoChat2-HD-Mistral-7B"] = BLOCKS["VideoChat2-Mistral-7B"]
# Mistral-7B-Instruct-v0.2, and VideoChat2's own parts: tests/dit_lora/models/videochat2/test_published_videochat2.py.
MISTRAL = 7_241_732_096
PROJECTION_AND_QUERIES = 768 * 4096 + 4096 + 96 * 768
FROZEN = {
    "VideoChat2-Mistral-7B": MISTRAL,
    "VideoChat2-HD-Mistral-7B": MISTRAL,
    "LLaVA-NeXT-Video-7B-hf": 7_063_431_168,
    "Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "SmolVLM2-2.2B-Instruct": 2_246_784_880,
}
# Two linear layers; Qwen's norm and its two layers for 4 patches; one layer for 9 patches.
CONNECTORS = {
    "LLaVA-NeXT-Video-7B-hf": 1024 * 4096 + 4096 + 4096 * 4096 + 4096,
    "Qwen2.5-VL-7B-Instruct": 1280 + 5120 * 5120 + 5120 + 5120 * 3584 + 3584,
    "SmolVLM2-2.2B-Instruct": 9 * 1152 * 2048,
}
# Pixels of a video of 480x720.
SHAPES = {
    "videochat2/mistral_stage3": VideoShape(8, 224, 224),
    "videochat2/mistral_stage2": VideoShape(4, 224, 224),
    "videochat2/mistral_hd": VideoShape(8, 2 * 224, 3 * 224),
    "chat/llava_next_video": VideoShape(16, 336, 336),
    "chat/qwen": VideoShape(16, 13 * 28, 19 * 28),
    "chat/smolvlm2": VideoShape(16, 384, 384),
}


class _Tokenizer:
    """Names every token by its number; the fixtures hold no vocabulary."""

    def __len__(self) -> int:
        return 10**6

    def convert_ids_to_tokens(self, token: int) -> str:
        return f"[{token}]"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(text[1:-1])]


@pytest.fixture(autouse=True)
def _no_vocabulary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(CONFIGS, configs)
    for folder in configs.glob("VideoChat2*"):
        (folder / "qformer_tokenizer").mkdir()
    monkeypatch.setattr(sys.modules[__name__], "CONFIGS", configs)

    def loaded(path: Path, *, local_files_only: bool, trust_remote_code: bool) -> _Tokenizer:
        assert (path.is_dir(), local_files_only, trust_remote_code) == (True, True, False)
        return _Tokenizer()

    monkeypatch.setattr(chat_checkpoint.AutoTokenizer, "from_pretrained", loaded)


def recipe_of(name: str) -> Recipe:
    path = ROOT / "recipes" / f"{name}.yaml"
    return load_recipe(path, [f"model.path={CONFIGS / RECIPES[name]}"])


def built(recipe: Recipe, checkpoint: Any) -> Any:
    """The model, without memory for its weights."""
    with torch.device("meta"):
        if recipe.model.family == "videochat2":
            model: Any = VideoChat2ForConditionalGeneration(checkpoint.config)
        else:
            config: Any = AutoConfig.from_pretrained(checkpoint.path)
            model = AutoModelForImageTextToText.from_config(config)
    return model.to(torch.bfloat16).requires_grad_(False)


def lora_count(recipe: Recipe, config: str) -> int:
    """rank x (inputs + outputs) of every adapted layer."""
    blocks, width, keys, inner = BLOCKS[config]
    per_block = 2 * (width + width) + 2 * (width + keys) + 3 * (width + inner)
    head = width + 32000 if recipe.model.family == "videochat2" else 0
    return recipe.lora.rank * (blocks * per_block + head)


def said(name: str) -> set[int]:
    """The counts of parameters in the header."""
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    header = text[: text.index("model:")]
    return {int(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})+", header)}


def test_every_recipe_of_a_chat_family_is_tried_here() -> None:
    recipe_names = {
        f"{path.parent.name}/{path.stem}"
        for folder in CHAT_FAMILIES
        for path in (ROOT / "recipes" / folder).glob("*.yaml")
    }
    assert recipe_names == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_what_its_header_counts(name: str) -> None:
    config, recipe = RECIPES[name], recipe_of(name)
    family = get_family(recipe.model.family)
    checkpoint = family.open(recipe.model, recipe)
    assert checkpoint.shape("video", 480, 720) == SHAPES[name]
    model = built(recipe, checkpoint)
    num_parameters = sum(p.numel() for p in model.parameters())
    groups = recipe.optim.groups
    loaded: Any = SimpleNamespace(load_model=lambda dtype: model)
    with torch.device("meta"):
        _, param_groups, _ = ChatTask().load_trainable(recipe, family, loaded, torch.bfloat16)
    counts = {group["name"]: sum(p.numel() for p in group["params"]) for group in param_groups}
    assert all(p.dtype == torch.float32 for group in param_groups for p in group["params"])
    expected = {"adapter": lora_count(recipe, config)} if groups.adapter else {}
    if recipe.model.family == "videochat2":
        num_backbone = num_parameters - MISTRAL - PROJECTION_AND_QUERIES
        expected |= {"connector": PROJECTION_AND_QUERIES, "backbone": num_backbone}
        headed = {MISTRAL, *expected.values(), sum(expected.values())}
    else:
        headed = {FROZEN[config], expected["adapter"], CONNECTORS[config]}
        assert connector_count(name, recipe, model) == CONNECTORS[config]
    assert counts == expected
    assert num_parameters - sum(expected.get(part, 0) for part in ("connector", "backbone")) == FROZEN[config]
    assert said(name) == headed
    # bf16, and fp32 weight, gradient and two moments.
    gib = (2 * FROZEN[config] + 16 * sum(expected.values())) / 2**30
    assert f"# Memory: {gib:.1f} GiB of" in (ROOT / "recipes" / f"{name}.yaml").read_text()


def connector_count(name: str, recipe: Recipe, model: Any) -> int:
    """Of the group that the recipe has as a comment."""
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    (line,) = [row for row in text.splitlines() if row.strip().startswith("# connector:")]
    group = yaml.safe_load(line.replace("# connector", "connector"))["connector"]
    groups = GroupsConfig(adapter=recipe.optim.groups.adapter, connector=GroupConfig(**group))
    param_groups = build_recipe_groups(model, groups, get_family("chat").group_patterns)
    (connector,) = [param_group for param_group in param_groups if param_group["name"] == "connector"]
    return sum(p.numel() for p in connector["params"])


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("videochat2")])
def test_a_videochat2_recipe_gives_the_media_their_tokens_and_the_text_the_originals(
    name: str,
) -> None:
    """512 tokens of text as max_txt_l has it; stage 2's captions have fewer."""
    recipe = recipe_of(name)
    checkpoint: Any = get_family("videochat2").open(recipe.model, recipe)
    shape = SHAPES[name]
    media = checkpoint.config.num_media_tokens(shape.height, shape.width)
    views = 7 if name.endswith("hd") else 1
    assert media == views * 96
    assert recipe.chat is not None
    text = recipe.chat.max_tokens - media
    assert text == (160 if name.endswith("stage2") else 512)
