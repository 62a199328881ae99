"""LTX-Video on fused ops is the stock model, with one timestep a sample or one a token."""

from typing import Any, ClassVar

import torch
from diffusers import LTXVideoTransformer3DModel
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Contract, Inputs, draw
from torch import nn

from dit_lora.fuse.api import fuse
from dit_lora.fuse.models import streams

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
GRID = {"num_frames": 3, "height": 1, "width": 3}
TOKENS = 9


def build(**config: Any) -> Any:
    """Width 32 is not a multiple of 6: its first two channels are not rotated."""
    return LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=12,
        norm_eps=0.1,  # large, so that it is seen where it is
        **config,
    )


class TestLTX(Contract):
    ops = ("lora_linear", "qk_norm_rope", "ada_norm")
    targets: ClassVar = [*ATTENTION, "ff.net.2", "time_embed.linear"]
    module = streams
    variants = ("a sample", "a token, masked")
    kept = (15.9, 0.54)

    def stock(self) -> nn.Module:
        return build()

    def inputs(self, variant: str) -> Inputs:
        timesteps = torch.tensor([17.0, 803.0])
        rows = torch.linspace(0, 999, 2 * TOKENS).view(2, TOKENS).flip(1)
        masked = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        return {
            "hidden_states": draw(2, TOKENS, 8).requires_grad_(),
            "encoder_hidden_states": draw(2, 5, 12, seed=4).requires_grad_(),
            "timestep": timesteps if variant == "a sample" else rows,
            "encoder_attention_mask": None if variant == "a sample" else masked,
            "rope_interpolation_scale": (1 / 25, 32, 32),
            **GRID,
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        tokens = torch.randn(2, 192, 32, generator=generator).bfloat16().requires_grad_()
        text = torch.randn(2, 5, 32, generator=generator).bfloat16()
        rows = torch.randn(2, 1, 6 * 32, generator=generator).bfloat16()
        rotary = model.rope(tokens, 3, 8, 8, (1 / 25, 32, 32))
        block = model.transformer_blocks[0]
        return lambda: block(tokens, text, rows, rotary), [text, rows, *rotary], tokens.numel()

    def test_norms_with_weights(self) -> None:
        for mode in ("lora", "all trained"):
            model = adapted(build(norm_elementwise_affine=True), self.targets)
            if mode == "all trained":
                self.all_trained(model)
            expected = self.run(model)
            assert_equal(self.run(fuse_all(model)), expected, 5e-5)


def test_other_norms_are_kept() -> None:
    model = build()
    model.transformer_blocks[0].norm2 = nn.LayerNorm(32)
    model.transformer_blocks[1].attn2.norm_k = nn.LayerNorm(32)
    report = fuse(model, {"qk_norm_rope": "on", "ada_norm": "on"}, check=False)
    assert "ada_norm: not in 1 modules: one of its norms is a LayerNorm" in str(report)
    assert "attention: not in 1 modules: one of its norms is a LayerNorm" in str(report)


def test_a_chosen_backend_and_context_parallelism_reach_the_stock_processor() -> None:
    """Diffusers sets both on the processor that it finds."""
    model = build()
    stock = model.transformer_blocks[0].attn1.processor
    fuse(model, {"qk_norm_rope": "on", "ada_norm": "on"}, check=False)
    processor = model.transformer_blocks[0].attn1.processor
    assert processor is not stock
    assert not processor.should_use_stock_processor
    model.set_attention_backend("native")
    assert stock._attention_backend == processor._attention_backend == "native"
    processor._parallel_config = object()
    assert stock._parallel_config is processor._parallel_config
    assert processor.should_use_stock_processor
