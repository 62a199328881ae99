"""Tiny Sana and SANA-Video models and their inputs, for the tests of them on fused ops."""

from typing import Any

import torch
from diffusers import SanaTransformer2DModel, SanaVideoTransformer3DModel
from fuse_checks import adapted, values
from torch import nn

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
TARGETS = [*ATTENTION, "conv_inverted", "linear_1"]
TEXT = 7
COMMON: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "cross_attention_dim": 32,
    "caption_channels": 12,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
}


def build(kind: str, *, targets: list[str] = TARGETS, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module
    if kind == "sana-video":
        heads = {"num_attention_heads": 2, "attention_head_dim": 16, "rope_max_seq_len": 16}
        model = SanaVideoTransformer3DModel(**COMMON | heads | options)
    else:
        heads = {"num_attention_heads": 2, "attention_head_dim": 16, "sample_size": 6}
        norm = "rms_norm_across_heads" if kind == "sana-1.5" else None
        model = SanaTransformer2DModel(**COMMON | heads | {"qk_norm": norm} | options)
    return adapted(model, targets)


def make_inputs(kind: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> dict[str, Any]:
    """Two different samples: images of 5 x 6 tokens, or 3 latent frames of 3 x 2; the captions differ in length."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 6, 4) if kind == "sana-video" else (5, 6)
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(2, 4, *shape, generator=generator),
        "encoder_hidden_states": torch.randn(2, TEXT, 12, generator=generator),
    }
    inputs = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.items()}
    inputs["timestep"] = torch.tensor([17, 803])
    inputs["encoder_attention_mask"] = (torch.arange(TEXT) < torch.tensor([[4], [6]])).long()
    return inputs


def run(model: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
    return values(model, lambda m: m(**inputs, return_dict=False), tensors)
