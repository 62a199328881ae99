"""Wan on fused ops is the stock model, with one timestep a sample or one a token."""

from typing import Any, ClassVar

import torch
from diffusers import WanTransformer3DModel
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Contract, Inputs, draw
from torch import nn

from dit_lora.fuse.api import fuse
from dit_lora.fuse.models import streams
from dit_lora.fuse.patches import get_fusion

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
TOKENS = 3 * 1 * 3


def build(**config: Any) -> Any:
    """Head width 24 is 8 for time, 8 for height, 8 for width."""
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=80,
        num_layers=2,
        rope_max_seq_len=16,
        eps=0.1,  # large, so that it is seen
        **config,
    )


class TestWan(Contract):
    ops = ("lora_linear", "qk_norm_rope", "ada_norm")
    targets: ClassVar = [*ATTENTION, "ffn.net.2", "time_proj"]
    module = streams
    variants = ("a sample", "a token")
    blocks = "blocks"
    # As Diffusers keeps them (WanTransformer3DModel._keep_in_fp32_modules).
    wide = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
    kept = (14.3, 0.54)

    def stock(self) -> nn.Module:
        return build()

    def inputs(self, variant: str) -> Inputs:
        timesteps = torch.tensor([17.0, 803.0])
        rows = torch.linspace(0, 999, 2 * TOKENS).view(2, TOKENS).flip(1)
        return {
            "hidden_states": draw(2, 4, 3, 2, 6).requires_grad_(),
            "timestep": timesteps if variant == "a sample" else rows,
            "encoder_hidden_states": draw(2, 5, 12, seed=4).requires_grad_(),
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        tokens = torch.randn(2, 192, 48, generator=generator).bfloat16().requires_grad_()
        text = torch.randn(2, 5, 48, generator=generator).bfloat16()
        rows = torch.randn(2, 6, 48, generator=generator).bfloat16()
        rotary = model.rope(torch.empty(2, 4, 3, 16, 16))
        block = model.blocks[0]
        return lambda: block(tokens, text, rows, rotary), [text, rows, *rotary], tokens.numel()

    def test_without_a_norm_before_the_text(self) -> None:
        for mode in ("lora", "all trained"):
            model = adapted(build(cross_attn_norm=False), self.targets)
            if mode == "all trained":
                self.all_trained(model)
            expected = self.run(model)
            assert_equal(self.run(fuse_all(model)), expected, 5e-5)

    def test_attention_to_an_image_stays_as_it_is(self) -> None:
        model = adapted(build(image_dim=20, added_kv_proj_dim=48), ATTENTION)
        model_inputs = {
            **self.inputs("a sample"),
            "encoder_hidden_states": draw(2, 512, 12, seed=4),
            "encoder_hidden_states_image": draw(2, 7, 20, seed=5).requires_grad_(),
        }
        expected = self.run(model, model_inputs)
        fuse_all(model)
        fusion = get_fusion(model)
        kept_layers = [(name, reason) for op, name, reason in fusion.skipped_modules if op == "attention"]
        assert kept_layers == [(f"blocks.{i}.attn2", "it attends to an image too") for i in (0, 1)]
        assert ("qk_norm_rope", "blocks.0.attn1") in fusion.patched_modules
        assert_equal(self.run(model, model_inputs), expected)


def test_projections_that_diffusers_fused_run_its_own_processor() -> None:
    """Without adapters: with them it is refused."""
    model = build().requires_grad_(False)
    inputs = TestWan().inputs("a sample")
    expected = TestWan().run(model, inputs)
    fuse(model, {"qk_norm_rope": "on", "ada_norm": "on"}, check=False)
    for block in model.blocks:
        for attention in (block.attn1, block.attn2):
            attention.fuse_projections()
            del attention.to_k  # a processor that asked it would fail
    model.requires_grad_(False)  # what Diffusers made of them trains
    assert_equal(TestWan().run(model, inputs), expected)


def test_other_norms_are_kept() -> None:
    model = build()
    model.blocks[0].norm2 = nn.LayerNorm(48)
    model.blocks[1].attn2.norm_k = nn.LayerNorm(48)
    report = fuse(model, {"qk_norm_rope": "on", "ada_norm": "on"}, check=False)
    assert "ada_norm: not in 1 modules: one of its norms is a LayerNorm" in str(report)
    assert "attention: not in 1 modules: one of its norms is a LayerNorm" in str(report)
