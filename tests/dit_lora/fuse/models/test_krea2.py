"""Krea 2 on fused ops equals the stock model.

Covers zero-centered norms, shared modulation, grouped keys, the gate, and padding in the middle.
"""

from typing import Any, ClassVar

import pytest
import torch
from diffusers import Krea2Transformer2DModel
from fuse_checks import fuse_all
from fuse_contract import Contract, Inputs, draw
from torch import nn

from dit_lora.fuse.api import fuse
from dit_lora.fuse.models import krea2, swiglu
from dit_lora.fuse.patches import get_fusion

TEXT, LAYERS, IMAGE = 5, 3, 6
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "to_gate"]


def build(**config: Any) -> Any:
    """Head width 8 is 4 for the frame, 2 for the row and 2 for the column; four query heads read two of keys."""
    return Krea2Transformer2DModel(
        **{
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "timestep_embed_dim": 8,
            "text_hidden_dim": 16,
            "num_text_layers": LAYERS,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 1,
            "text_intermediate_size": 24,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
            "norm_eps": 0.1,  # large, so that it is seen where it is
            **config,
        }
    )


class TestKrea2(Contract):
    ops = ("lora_linear", "qk_norm_rope", "ada_norm")
    targets: ClassVar = [*ATTENTION, "ff.gate", "ff.up", "ff.down", "final_layer.linear"]
    module = krea2
    variants = ("masked", "whole")
    # As Diffusers keeps them (Krea2Transformer2DModel._keep_in_fp32_modules).
    wide = ("norm",)
    kept = (11.9, 0.55)

    def stock(self) -> nn.Module:
        return build()

    def inputs(self, variant: str) -> Inputs:
        mask = torch.ones(2, TEXT, dtype=torch.bool)
        mask[1, 1:3] = False
        ids = torch.tensor([[0, 0, 0]] * TEXT + [[0, i // 3, i % 3] for i in range(IMAGE)])
        return {
            "hidden_states": draw(2, IMAGE, 4).requires_grad_(),
            "encoder_hidden_states": draw(2, TEXT, LAYERS, 16, seed=4).requires_grad_(),
            "timestep": torch.tensor([0.17, 0.803]),
            "position_ids": ids,
            "encoder_attention_mask": mask if variant == "masked" else None,
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        tokens = torch.randn(2, 192, 32, generator=generator).bfloat16().requires_grad_()
        temb = torch.randn(2, 1, 6 * 32, generator=generator).bfloat16()
        rotary = model.rotary_emb(torch.rand(192, 3, generator=generator))
        block = model.transformer_blocks[0]
        return lambda: block(tokens, temb, rotary), [temb, *rotary], tokens.numel()

    def fusion_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        tokens = torch.randn(2, 192, 16, generator=generator).bfloat16().requires_grad_()
        block = model.text_fusion.refiner_blocks[0]
        return lambda: block(tokens), [], tokens.numel()

    def test_adapters_of_the_feed_forward_keep_its_projections_alone(self) -> None:
        model = self.lowered(self.build(self.targets))
        stock = self.kept_units(model)
        fused = self.kept_units(fuse_all(model))
        assert fused <= 13.5, (fused, stock)
        assert fused <= 0.5 * stock, (fused, stock)

    def test_a_block_of_the_text_fusion_keeps_less(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = self.lowered(self.build(ATTENTION))
        monkeypatch.setattr(self, "block_run", self.fusion_run)
        stock = self.kept_units(model)
        fused = self.kept_units(fuse_all(model))
        assert fused <= 12.8, (fused, stock)
        assert fused <= 0.54 * stock, (fused, stock)

    def test_norms_and_hidden_values_are_computed_again_for_adapters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once for each block, and for the final layer's norm.

        A wrong name or shape of a tensor would save it instead.
        """
        model, outputs = fuse_all(self.build()), []
        for module, name in ((krea2, "recompute_norm"), (swiglu, "recompute_gated_hidden")):
            patched = getattr(module, name)

            def counted(*args: Any, again: Any = patched, name: str = name) -> torch.Tensor:
                outputs.append(name)
                return again(*args)

            monkeypatch.setattr(module, name, counted)
        self.run(model)
        assert sorted(outputs) == ["recompute_gated_hidden"] * 4 + ["recompute_norm"] * 5

    def test_padding_in_the_middle_is_left_out(self) -> None:
        """Values of padding tokens change nothing, with fused processors as with stock ones."""
        model, model_inputs = fuse_all(self.build()), self.inputs("masked")
        expected = self.run(model, model_inputs)["output 0"]
        text = model_inputs["encoder_hidden_states"].detach().clone()
        text[1, 1:3] += 3.0
        actual = self.run(model, {**model_inputs, "encoder_hidden_states": text})["output 0"]
        assert torch.equal(actual, expected)
        text[1, 3] += 3.0
        changed_output = self.run(model, {**model_inputs, "encoder_hidden_states": text})["output 0"]
        assert not torch.equal(changed_output[1], expected[1])


def test_norms_of_q_and_k_start_backward_from_what_they_multiply_by() -> None:
    """Published weights lie around zero, by which nothing could be divided."""
    model = build()
    fuse(model, {"qk_norm_rope": "on"}, check=False)
    attention = model.transformer_blocks[0].attn
    assert not attention.norm_q.weight.any()
    assert attention.processor.has_recoverable_norms
    nn.init.constant_(attention.norm_k.weight, -1.0)
    fuse(model, {"qk_norm_rope": "on"}, check=False)
    assert not attention.processor.has_recoverable_norms


def test_what_is_not_the_stock_block_is_kept() -> None:
    model = build()
    model.transformer_blocks[0].norm2 = nn.RMSNorm(32)
    model.transformer_blocks[1].attn.norm_k = nn.RMSNorm(8)
    model.text_fusion.layerwise_blocks[0].norm1 = nn.LayerNorm(16)
    model.final_layer.norm = nn.Identity()
    fuse(model, {"ada_norm": "on", "qk_norm_rope": "on"}, check=False)
    fusion = get_fusion(model)
    assert {(op, name): reason for op, name, reason in fusion.skipped_modules} == {
        ("ada_norm", "transformer_blocks.0"): "one of its norms is a RMSNorm",
        ("attention", "transformer_blocks.1.attn"): "one of its norms is a RMSNorm",
        ("ada_norm", "text_fusion.layerwise_blocks.0"): "one of its norms is a LayerNorm",
        ("ada_norm", "final_layer"): "one of its norms is a Identity",
    }
    assert [name for op, name in fusion.patched_modules if op == "ada_norm" and "ff" not in name] == [
        "text_fusion.refiner_blocks.0",
        "transformer_blocks.1",
    ]
