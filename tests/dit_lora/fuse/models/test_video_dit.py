"""The video DiT on fused ops is the same model, made of classes or of text."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Contract, Inputs, draw
from torch import nn

from dit_lora.families import get_family
from dit_lora.fuse.models import streams
from dit_lora.fuse.patches import get_fusion
from dit_lora.models.video_dit import VideoDiTTransformer3DModel

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


class TestVideoDiT(Contract):
    ops = ("lora_linear", "ada_norm")
    targets: ClassVar = [*ATTENTION, "ff.net.2", "adaln.linear"]
    module = streams
    without_gradient = ("to_k.base_layer.bias",)
    kept = (12.2, 0.72)

    def stock(self) -> nn.Module:
        model = VideoDiTTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            sample_frames=3,
            sample_height=4,
            sample_width=6,
            num_classes=10,
        )
        for name, parameter in model.named_parameters():
            if "adaln" in name or name.startswith("proj_out"):  # zero in a fresh model
                nn.init.normal_(parameter, std=0.1)
        return model

    def inputs(self, variant: str) -> Inputs:
        return {
            "hidden_states": draw(2, 4, 3, 4, 6).requires_grad_(),
            "timestep": torch.tensor([17, 803]),
            "class_labels": torch.tensor([1, 7]),
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        tokens = torch.randn(2, 192, 32, generator=generator).bfloat16().requires_grad_()
        condition = torch.randn(2, 32, generator=generator).bfloat16()
        block = model.transformer_blocks[0]
        return lambda: block(tokens, condition), [condition], tokens.numel()


@pytest.mark.parametrize("variant", ["video-dit-class", "video-dit-text"])
def test_a_tiny_checkpoint(variant: str, tmp_path: Path) -> None:
    get_family("video_dit").build_tiny_checkpoint(variant, tmp_path, 0)
    model = VideoDiTTransformer3DModel.from_pretrained(tmp_path, subfolder="transformer")
    model = adapted(model, ATTENTION)
    inputs: Inputs = {
        "hidden_states": draw(2, 4, 5, 4, 6).requires_grad_(),
        "timestep": torch.tensor([17, 803]),
    }
    if variant == "video-dit-class":
        inputs["class_labels"] = torch.tensor([1, 5])
    else:
        inputs["pooled_projections"] = draw(2, 16, seed=4)
    contract = TestVideoDiT()
    expected = contract.run(model, inputs)
    fuse_all(model)
    assert set(get_fusion(model).get_active_ops()) == {"lora_linear", "ada_norm"}
    assert_equal(contract.run(model, inputs), expected)
