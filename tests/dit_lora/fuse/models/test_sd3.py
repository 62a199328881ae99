"""Stable Diffusion 3 on fused ops equals the stock model.

Covers 3.5's second attention, the last block, which has no text output, and a model without q norms.
"""

from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Inputs, draw
from fuse_two_streams import TwoStreams
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import fuse
from dit_lora.fuse.patches import get_fusion


def build(**config: Any) -> Any:
    config = {"qk_norm": "rms_norm", "dual_attention_layers": (0,), **config}
    return SD3Transformer2DModel(
        sample_size=6,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=32,
        pooled_projection_dim=10,
        out_channels=4,
        pos_embed_max_size=4,
        **config,
    )


class TestSD3(TwoStreams):
    kept = (17.8, 0.53)
    recomputed = 5

    def stock(self) -> nn.Module:
        return build()

    def inputs(self, variant: str) -> Inputs:
        return {
            "hidden_states": draw(2, 4, 4, 6).requires_grad_(),
            "encoder_hidden_states": draw(2, 3, 12, seed=4).requires_grad_(),
            "pooled_projections": draw(2, 10, seed=5),
            "timestep": torch.tensor([17.0, 803.0]),
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        image, text, temb = self.streams(generator)
        block, elements = model.transformer_blocks[0], image.numel() + text.numel()
        return lambda: block(image, text, temb), [temb], elements

    @pytest.mark.parametrize("qk_norm", [None, "layer_norm"])
    def test_without_a_second_attention(self, qk_norm: str | None) -> None:
        self.without_gradient = () if qk_norm else ("to_k.base_layer.bias", "add_k_proj.base_layer.bias")
        model = self.equal_when_fused(build(dual_attention_layers=(), qk_norm=qk_norm), self.inputs(""))
        assert len(get_fusion(model).patched_modules) > 2

    def test_a_chunked_feed_forward_runs_the_stock_block(self) -> None:
        model = adapted(build(), self.targets)
        expected, lengths = self.run(model), []
        fuse_all(model).enable_forward_chunking(1, dim=1)
        ff = model.transformer_blocks[1].ff
        ff.register_forward_pre_hook(lambda _module, args: lengths.append(args[0].shape[1]))
        assert_equal(self.run(model), expected)
        assert lengths == 6 * [1]

    def test_a_mask_is_ignored_as_the_stock_attention_does(self) -> None:
        mask = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
        model_inputs = {**self.inputs(""), "joint_attention_kwargs": {"attention_mask": mask}}
        self.equal_when_fused(build(), model_inputs)


def test_other_norms_are_kept() -> None:
    model = build()
    model.transformer_blocks[0].norm1.norm = nn.LayerNorm(32)
    model.transformer_blocks[1].norm1_context.norm = nn.RMSNorm(32)
    model.transformer_blocks[1].attn.norm_added_q = nn.Identity()
    with pytest.raises(DitLoraError, match=r"transformer_blocks\.1: one of its norms is a RMSNorm"):
        fuse(model, {"ada_norm": "on"}, check=False)
    report = str(fuse(model, {"qk_norm_rope": "on"}, check=False))
    assert "attention: not in 1 modules: one of its norms is a Identity" in report
