"""The published Qwen-Image-Edit configs: the checkpoint class of each, its sizes, and the tokens left for captions."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import ROOT
from safetensors.torch import save_file

from dit_lora.config.data import VideoShape
from dit_lora.config.load import load_recipe
from dit_lora.families import get_family

CONFIGS = ROOT / "tests" / "fixtures" / "configs"
PARAMETERS = 20_430_401_088  # as Qwen-Image: nothing that edits has weights of its own
RECIPES = {"Qwen-Image-Edit": "edit", "Qwen-Image-Edit-2511": "edit_plus"}


def checkpoint_of(name: str, folder: Path) -> Any:
    """The checkpoint as its recipe opens it: Qwen-Image's configs under its own, with weights that nothing reads."""
    path = folder / name
    for source in (CONFIGS / "Qwen-Image", CONFIGS / name):
        shutil.copytree(source, path, dirs_exist_ok=True)
    for config in path.glob("*/config.json"):
        save_file({"none": torch.zeros(1)}, config.with_name("model.safetensors"))
    recipe = load_recipe(ROOT / "recipes" / "qwen_image" / f"{RECIPES[name]}.yaml")
    assert recipe.model.path == f"Qwen/{name}"
    model = recipe.model.model_copy(update={"path": str(path)})
    return get_family("qwen_image").open(model, recipe)


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_qwen_image_with_other_inputs(name: str, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, tmp_path)
    with torch.device("meta"):
        transformer = checkpoint.denoiser.transformer_class.from_config(dict(checkpoint.info.transformer_config))
    assert sum(p.numel() for p in transformer.parameters()) == PARAMETERS
    assert transformer.zero_cond_t is name.endswith("2511")
    takes = checkpoint.info.reference_spec
    assert (takes.min_count, takes.max_count) == ((1, 3) if name.endswith("2511") else (1, 1))
    assert takes.is_encoded_with_caption
    assert not takes.is_resizable
    # Of 1:1, 16:9 and 2:3, whatever the size; the target's is its own.
    for size, scaled in (
        ((60, 60), (1024, 1024)),
        ((90, 160), (768, 1376)),
        ((600, 400), (1248, 832)),
    ):
        assert takes.encoded_shape(*size, VideoShape(1, 64, 64)) == VideoShape(1, *scaled)
    shift = checkpoint.denoiser.compute_shift(torch.Size([16, 1, 128, 128]))
    assert shift == pytest.approx(math.exp(0.5 + (4096 - 256) * 0.4 / 7936))


@pytest.mark.parametrize(
    ("name", "tokens"), [("Qwen-Image-Edit", 512 + 1428), ("Qwen-Image-Edit-2511", 512 + 3 * 222)]
)
def test_captions_are_as_long_as_docs_and_recipes_say(name: str, tokens: int, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(name, tmp_path)
    spec = checkpoint.encoders.text_spec(torch.bfloat16)
    assert spec == {
        "prompt_embeds": ((tokens, 3584), torch.bfloat16),
        "prompt_mask": ((tokens,), torch.bool),
    }
    assert checkpoint.encoders.text_cache_key()["tokens"] == tokens
    text = (ROOT / "recipes" / "qwen_image" / f"{RECIPES[name]}.yaml").read_text()
    assert f"{tokens * (3584 * 2 + 1) / 1e6:.1f} MB of cache a caption" in text
    page = " ".join((ROOT / "docs" / "models.md").read_text().split())
    assert f"{tokens}" in page
    assert f"{tokens * 3584 * 2 / 2**20:.1f}" in page
