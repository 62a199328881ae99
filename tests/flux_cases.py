"""Tiny FLUX checkpoints, and how their tests open them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family

CPU = torch.device("cpu")
FAMILY = {"flux-dev": "flux", "flux-schnell": "flux", "flux2-klein": "flux2", "flux2-dev": "flux2"}
every_variant = pytest.mark.parametrize("variant", list(FAMILY))


def open_checkpoint(path: Path) -> Any:
    index = json.loads((path / "model_index.json").read_text())
    name = "flux2" if "Flux2" in index["_class_name"] else "flux"
    return get_family(name).open(ModelConfig(family=name, path=str(path)))
