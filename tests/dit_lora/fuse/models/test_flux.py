"""Flux on fused ops equals the stock model: both kinds of blocks, masks, fp16 clipping, IP-Adapter's third output."""

from typing import Any, ClassVar

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Inputs, draw
from fuse_two_streams import TARGETS, TwoStreams
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import fuse
from dit_lora.fuse.patches import get_fusion

TEXT, IMAGE = 3, 6


def build() -> Any:
    """Head width 16 is 4 for the index, 6 for the row, 6 for the column."""
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=12,
        pooled_projection_dim=10,
        axes_dims_rope=(4, 6, 6),
    )


class TestFlux(TwoStreams):
    targets: ClassVar = [*TARGETS, "norm.linear", "proj_mlp", "proj_out"]
    without_gradient = ("to_k_ip.0.bias",)
    kept = (13.3, 0.72)
    recomputed = 4

    def stock(self) -> nn.Module:
        return build()

    def inputs(self, variant: str) -> Inputs:
        return {
            "hidden_states": draw(2, IMAGE, 4).requires_grad_(),
            "encoder_hidden_states": draw(2, TEXT, 12, seed=4).requires_grad_(),
            "pooled_projections": draw(2, 10, seed=5),
            "timestep": torch.tensor([0.17, 0.803]),
            "txt_ids": torch.tensor([[1.0, 0.0, 2.0]]).repeat(TEXT, 1),
            "img_ids": torch.tensor([[0.0, i // 3, i % 3] for i in range(IMAGE)]),
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        image, text, temb = self.streams(generator)
        rotary = model.pos_embed(torch.rand(24 + 192, 3, generator=generator))
        block, elements = model.transformer_blocks[0], image.numel() + text.numel()
        return lambda: block(image, text, temb, rotary), [temb, *rotary], elements

    def test_bf16_autocast_is_no_worse_where_every_weight_trains(self) -> None:
        self.check_bf16_autocast(trains_every_weight=True)

    def test_a_single_block_keeps_less(self) -> None:
        model = self.lowered(self.build(["to_q", "to_k", "to_v", "proj_out"]))
        model.transformer_blocks[0] = model.single_transformer_blocks[0]
        stock = self.kept_units(model)
        fused = self.kept_units(fuse_all(model))
        assert fused <= 15.2, (fused, stock)
        assert fused <= 0.8 * stock, (fused, stock)

    def test_a_mask_is_heeded(self) -> None:
        mask = torch.ones(2, 1, 1, TEXT + IMAGE, dtype=torch.bool)
        mask[1, ..., 1:TEXT] = False
        model_inputs = {**self.inputs(""), "joint_attention_kwargs": {"attention_mask": mask}}
        model = self.equal_when_fused(build(), model_inputs)
        masked, free = self.run(model, model_inputs), self.run(model)
        assert not torch.equal(masked["output 0"][1], free["output 0"][1])

    def test_an_ip_adapters_output_is_added(self) -> None:
        model = build()
        attn = model.transformer_blocks[0].attn
        attn.set_processor(FluxIPAdapterAttnProcessor(32, 7, num_tokens=(2,), scale=[0.6]))
        prompt = draw(2, 2, 7, seed=6)
        model_inputs = {**self.inputs(""), "joint_attention_kwargs": {"ip_hidden_states": [prompt]}}
        self.equal_when_fused(model, model_inputs)
        assert isinstance(attn.processor, FluxIPAdapterAttnProcessor)

    def test_projections_that_diffusers_fused_run_its_own_processor(self) -> None:
        """Without adapters: with them it is refused."""
        model = build().requires_grad_(False)
        expected = self.run(model)
        fuse(model, {"qk_norm_rope": "on", "ada_norm": "on"}, check=False)
        model.fuse_qkv_projections()
        model.requires_grad_(False)  # what Diffusers made of them trains
        del model.transformer_blocks[0].attn.to_k  # a processor that asked it would fail
        assert_equal(self.run(model), expected)

    @pytest.mark.parametrize("kind", ["transformer_blocks", "single_transformer_blocks"])
    def test_fp16_is_clipped_as_in_the_stock_block(self, kind: str) -> None:
        model = adapted(build(), ["to_q"]).half()
        block = model.get_submodule(kind)[0]
        double = kind == "transformer_blocks"
        norm, rows = (block.norm1_context, (5, 6)) if double else (block.norm, (2, 3))
        output = block.ff_context.net[2] if double else block.proj_out
        norm.linear.bias.data[32 * rows[0] : 32 * rows[1]] = 3e4  # the last gate
        output.bias.data.fill_(10.0)
        model_inputs = (
            draw(2, IMAGE, 32).half(),
            draw(2, TEXT, 32, seed=4).half(),
            draw(2, 32).half(),
        )
        stock = block(*model_inputs)
        fuse_all(model)
        actual = block(*model_inputs)
        assert actual[0].abs().max() == stock[0].abs().max() == 65504
        assert all(x.isfinite().all() for x in actual)


def test_other_norms_are_kept() -> None:
    model = build()
    model.transformer_blocks[0].norm2_context = nn.RMSNorm(32)
    model.single_transformer_blocks[0].norm.norm = nn.LayerNorm(32)
    model.single_transformer_blocks[0].attn.norm_k = nn.Identity()
    with pytest.raises(DitLoraError, match="can use ada_norm"):
        fuse(model, {"ada_norm": "on"}, check=False)
    report = str(fuse(model, {"qk_norm_rope": "on"}, check=False))
    assert "attention: not in 1 modules: one of its norms is a Identity" in report
    model.transformer_blocks[0].norm2_context = nn.LayerNorm(32, elementwise_affine=False)
    report = fuse(model, {"ada_norm": "on"}, check=False)
    assert "ada_norm: not in 1 modules: one of its norms has weights" in str(report)
    assert [n for op, n in get_fusion(model).patched_modules if op == "ada_norm"] == ["transformer_blocks.0"]
