"""HunyuanVideo on fused ops is the stock model: a mask of the text, both kinds of blocks, those that replace tokens."""

from typing import Any, ClassVar

import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Inputs, draw
from fuse_two_streams import TARGETS, TwoStreams
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import fuse
from dit_lora.fuse.patches import fusion_of


def build(**config: Any) -> Any:
    """Head width 16 is 4 for time, 6 for height, 6 for width."""
    return HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=12,
        pooled_projection_dim=10,
        rope_axes_dim=(4, 6, 6),
        **config,
    )


class TestHunyuanVideo(TwoStreams):
    targets: ClassVar = [*TARGETS, "norm.linear", "proj_mlp", "proj_out"]
    without_gradient = ("refiner_blocks.0.attn.to_k.base_layer.bias",)
    kept = (11.3, 0.61)
    recomputed = 4

    def stock(self) -> nn.Module:
        return build()

    def inputs(self, variant: str) -> Inputs:
        return {
            "hidden_states": draw(2, 4, 2, 2, 6).requires_grad_(),
            "timestep": torch.tensor([17, 803]),
            "encoder_hidden_states": draw(2, 4, 12, seed=4).requires_grad_(),
            "encoder_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
            "pooled_projections": draw(2, 10, seed=5),
            "guidance": torch.tensor([1000.0, 6000.0]),
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        video, text, temb = self.streams(generator)
        rotary = model.rope(torch.empty(2, 4, 3, 16, 16))
        mask = torch.ones(2, 1, 1, 192 + 24, dtype=torch.bool)
        block, elements = model.transformer_blocks[0], video.numel() + text.numel()
        return lambda: block(video, text, temb, mask, rotary), [temb, mask, *rotary], elements

    def test_a_single_block_keeps_less(self) -> None:
        model = self.lowered(self.build(["to_q", "to_k", "to_v", "proj_out"]))
        model.transformer_blocks[0] = model.single_transformer_blocks[0]
        stock = self.kept_units(model)
        fused = self.kept_units(fuse_all(model))
        assert fused <= 11.2, (fused, stock)
        assert fused <= 0.75 * stock, (fused, stock)

    def test_the_mask_hides_text(self) -> None:
        model = fuse_all(self.build())
        given = self.inputs("")
        masked = self.run(model, given)
        given["encoder_attention_mask"] = torch.ones(2, 4, dtype=torch.long)
        free = self.run(model, given)
        assert torch.equal(masked["output 0"][0], free["output 0"][0])
        assert not torch.equal(masked["output 0"][1], free["output 0"][1])

    def test_layer_norms_of_q_and_k(self) -> None:
        self.equal_when_fused(build(qk_norm="layer_norm"), self.inputs(""))

    def test_blocks_that_replace_tokens_have_their_own_forward_and_fused_attention(self) -> None:
        model = adapted(build(image_condition_type="token_replace"), self.targets)
        expected = self.run(model)
        fuse(model, {"qk_norm_rope": "on", "lora_linear": "on"}, check=False)
        assert {n for op, n in fusion_of(model).replaced if op == "qk_norm_rope"} == {
            "transformer_blocks.0.attn",
            "single_transformer_blocks.0.attn",
        }
        assert_equal(self.run(model), expected)
        model.transformer_blocks[0].norm1.norm = nn.LayerNorm(32)
        with pytest.raises(DitLoraError, match="nothing that takes ada_norm"):
            fuse(model, {"ada_norm": "on"}, check=False)

    def test_attention_without_a_text_is_the_stock_processors(self) -> None:
        model = fuse_all(self.build())
        attn, x = model.single_transformer_blocks[0].attn, draw(2, 5, 32)
        found, none = attn(x)
        assert none is None
        assert torch.equal(found, HunyuanVideoAttnProcessor2_0()(attn, x)[0])


def test_other_norms_are_kept() -> None:
    model = build()
    model.transformer_blocks[0].norm1_context.norm = nn.LayerNorm(32)
    model.single_transformer_blocks[0].norm.norm = nn.RMSNorm(32)
    model.single_transformer_blocks[0].attn.norm_q = nn.Identity()
    with pytest.raises(
        DitLoraError, match=r"single_transformer_blocks\.0: one of its norms is a RMS"
    ):
        fuse(model, {"ada_norm": "on"}, check=False)
    report = str(fuse(model, {"qk_norm_rope": "on"}, check=False))
    assert "attention: not in 1 modules: one of its norms is a Identity" in report
