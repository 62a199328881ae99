"""Tiny Z-Image checkpoints and batches, and how their tests open them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family

CAPTIONS = ("A red cat on\na mat", "", "a longer caption, of a green square below a blue disc")


def opened(path: Path | str) -> Any:
    return get_family("z_image").open(ModelConfig(family="z_image", path=str(path)))


def changed(tiny: Path, out: Path, component: str, **values: Any) -> Path:
    """A copy of a checkpoint with other values in one config."""
    shutil.copytree(tiny, out)
    names = {"": "model_index.json", "scheduler": "scheduler/scheduler_config.json"}
    file = out / names.get(component, f"{component}/config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return out


def some_batch(lengths: tuple[int, ...] = (3, 512, 77)) -> dict[str, torch.Tensor]:
    """Three samples of 4 x 6 latents, and captions of these lengths with noise where they have pads."""
    g = torch.Generator().manual_seed(0)
    return {
        "latent_mean": torch.randn(3, 4, 4, 6, generator=g),
        "latent_logvar": torch.randn(3, 4, 4, 6, generator=g),
        "prompt_embeds": torch.randn(3, 512, 16, generator=g),
        "prompt_attention_mask": torch.arange(512) < torch.tensor(lengths)[:, None],
    }
