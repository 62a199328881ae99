"""Tiny chat models to adapt, and how to train and call them."""

from typing import Any

import torch
from tiny_chat_models import MODELS, batch, samples
from torch import nn

WITHIN = {"mistral": ()} | dict.fromkeys(("llava", "qwen", "videochat2"), ("language_model",))
CONNECTOR = {
    "mistral": "model.norm.*",
    "llava": "model.multi_modal_projector.*",
    "qwen": "model.visual.merger.*",
    "videochat2": "model.*query_tokens",  # parameters that belong to no layer
}


def chat_model(name: str) -> Any:
    """A frozen model in fp32; equal at every call."""
    return MODELS[name]().requires_grad_(False).eval()


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
    model_batch = batch(samples(name))
    return {key: value for key, value in model_batch.items() if not key.startswith("answer")}
