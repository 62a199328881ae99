"""Tiny chat models to adapt, ours too, and how to train and call them."""

from pathlib import Path
from typing import Any

import torch
from tiny_chat_models import MODELS, batch, samples
from torch import nn

from dit_lora.families.tiny_videochat2 import build_tiny
from dit_lora.models.videochat2.modeling import VideoChat2ForConditionalGeneration

NAMES = (*MODELS, "videochat2")
WITHIN = {"mistral": ()} | dict.fromkeys(("llava", "qwen", "videochat2"), ("language_model",))
CONNECTOR = {
    "mistral": "model.norm.*",
    "llava": "model.multi_modal_projector.*",
    "qwen": "model.visual.merger.*",
    "videochat2": "model.*query_tokens",  # parameters that belong to no layer
}


def chat_model(name: str, folder: Path) -> Any:
    """A frozen model in fp32; of ours, the folder is made its checkpoint."""
    if name == "videochat2":
        build_tiny("videochat2-mistral", folder, 0)
        model = VideoChat2ForConditionalGeneration.from_pretrained(folder)
    else:
        model = MODELS[name]()
    return model.requires_grad_(False).eval()


def train_a_little(model: nn.Module, scale: float = 0.3) -> None:
    """Move everything that trains, as if by training."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator)


def logits(model: nn.Module, name: str) -> torch.Tensor:
    """Of a few samples, in whichever mode the model is."""
    with torch.no_grad():
        return model(**inputs(name)).logits


def inputs(name: str) -> dict[str, torch.Tensor]:
    if name != "videochat2":
        found = batch(samples(name))
        return {key: value for key, value in found.items() if not key.startswith("answer")}
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(300, 500, (2, 11), generator=random)
    ids[:, 2:7] = 552  # 3 queries and 2 more
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(2, 4, 3, 32, 32, generator=random),
        "instruction_ids": torch.randint(5, 99, (2, 3), generator=random),
        "instruction_mask": torch.ones(2, 3, dtype=torch.int64),
    }
