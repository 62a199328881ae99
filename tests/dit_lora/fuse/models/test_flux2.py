"""FLUX.2 on fused ops is the stock model: both kinds of blocks, modulation that all share, a mask, fp16's clipping."""

from typing import Any, ClassVar

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2SwiGLU
from fuse_checks import adapted, fuse_all
from fuse_contract import Inputs, draw
from fuse_two_streams import TwoStreams
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import fuse
from dit_lora.fuse.patches import get_fusion

TEXT, IMAGE = 3, 6
SINGLE_OUT = "single_transformer_blocks.0.attn.to_out"


def build() -> Any:
    """Head width 16 is 4 for the image, the row, the column and the text's place."""
    return Flux2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=12,
        timestep_guidance_channels=8,
        axes_dims_rope=(4, 4, 4, 4),
    )


class TestFlux2(TwoStreams):
    targets: ClassVar = [
        *(
            "to_q",
            "to_k",
            "to_v",
            "to_out.0",
            "add_q_proj",
            "add_k_proj",
            "add_v_proj",
            "to_add_out",
        ),
        *("linear_in", "linear_out", "to_qkv_mlp_proj", SINGLE_OUT),
        *("double_stream_modulation_img.linear", "double_stream_modulation_txt.linear"),
        "single_stream_modulation.linear",
    ]
    kept = (15.2, 0.65)
    recomputed = 3

    def stock(self) -> nn.Module:
        return build()

    def inputs(self, variant: str) -> Inputs:
        return {
            "hidden_states": draw(2, IMAGE, 4).requires_grad_(),
            "encoder_hidden_states": draw(2, TEXT, 12, seed=4).requires_grad_(),
            "timestep": torch.tensor([0.17, 0.803]),
            "guidance": torch.tensor([1.0, 3.5]),
            "txt_ids": torch.tensor([[0, 0, 0, i] for i in range(TEXT)]),
            "img_ids": torch.tensor([[0, i // 3, i % 3, 0] for i in range(IMAGE)]),
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        image, text, _ = self.streams(generator)
        ids = torch.rand(24 + 192, 4, generator=generator)
        rotary, elements = model.pos_embed(ids), image.numel() + text.numel()
        # Without a gradient, as where adapters of the blocks alone train.
        of_image, of_text = (torch.randn(2, 192, generator=generator).bfloat16() for _ in "it")
        block = model.transformer_blocks[0]
        return (
            lambda: block(image, text, of_image, of_text, rotary),
            [of_image, of_text, *rotary],
            elements,
        )

    def single_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        image, _, _ = self.streams(generator)
        rotary = model.pos_embed(torch.rand(192, 4, generator=generator))
        modulation = torch.randn(2, 96, generator=generator).bfloat16()
        block = model.single_transformer_blocks[0]
        return lambda: block(image, None, modulation, rotary), [modulation, *rotary], image.numel()

    def test_a_single_block_keeps_less(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = self.lowered(self.build(["to_qkv_mlp_proj", SINGLE_OUT]))
        monkeypatch.setattr(self, "block_run", self.single_run)
        stock = self.kept_units(model)
        fused = self.kept_units(fuse_all(model))
        assert fused <= 14, (fused, stock)
        assert fused <= 0.54 * stock, (fused, stock)

    def test_a_mask_is_heeded(self) -> None:
        mask = torch.ones(2, 1, 1, TEXT + IMAGE, dtype=torch.bool)
        mask[1, ..., 1:TEXT] = False
        model_inputs = {**self.inputs(""), "joint_attention_kwargs": {"attention_mask": mask}}
        model = self.equal_when_fused(build(), model_inputs)
        masked, free = self.run(model, model_inputs), self.run(model)
        assert not torch.equal(masked["output 0"][1], free["output 0"][1])

    def test_a_single_block_joins_and_parts_streams_if_it_is_asked(self) -> None:
        model = self.build().requires_grad_(False)
        block, rotary = model.single_transformer_blocks[0], model.pos_embed(torch.rand(9, 4))
        model_inputs = (draw(2, IMAGE, 32), draw(2, TEXT, 32, seed=4), draw(2, 96, seed=5), rotary)
        stock = block(*model_inputs, split_hidden_states=True)
        fuse_all(model)
        actual = block(*model_inputs, split_hidden_states=True)
        for ours, theirs in zip(actual, stock, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
        assert [len(x[0]) for x in actual] == [TEXT, IMAGE]

    @pytest.mark.parametrize("kind", ["transformer_blocks", "single_transformer_blocks"])
    def test_modulation_of_each_token_runs_the_stock_block(self, kind: str) -> None:
        """Diffusers' cache of references blends two rows of it."""
        model = self.build().requires_grad_(False)
        block, double = model.get_submodule(kind)[0], kind == "transformer_blocks"
        image, text = draw(2, IMAGE, 32), draw(2, TEXT, 32, seed=4)
        if double:
            model_inputs = (image, text, draw(2, IMAGE, 192, seed=5), draw(2, 192, seed=6))
        else:
            model_inputs = (image, None, draw(2, IMAGE, 96, seed=5))
        stock = block(*model_inputs)
        fuse_all(model)
        torch.testing.assert_close(block(*model_inputs), stock, rtol=2e-5, atol=2e-5)

    @pytest.mark.parametrize("kind", ["transformer_blocks", "single_transformer_blocks"])
    def test_fp16_is_clipped_as_in_the_stock_block(self, kind: str) -> None:
        model = adapted(build(), ["to_q"]).half()
        block, double = model.get_submodule(kind)[0], kind == "transformer_blocks"
        gates = torch.full((2, 192 if double else 96), 3e4).half()
        gates[:, :-32] = 0.5
        image, text = draw(2, IMAGE, 32).half(), draw(2, TEXT, 32, seed=4).half()
        layer = block.ff_context.linear_out if double else block.attn.to_out
        layer.weight.data.mul_(100.0)
        model_inputs = (image, text, gates / 1e4, gates) if double else (image, None, gates)
        stock, actual = block(*model_inputs), fuse_all(model) and block(*model_inputs)
        of_text = [x[0] if double else x for x in (stock, actual)]
        assert of_text[1].abs().max() == of_text[0].abs().max() == 65504
        assert all(x.isfinite().all() for x in of_text)


def test_what_is_not_the_stock_block_is_kept() -> None:
    model = build()
    for module in model.modules():
        if isinstance(module, Flux2SwiGLU):
            module.gate_fn = nn.GELU()
    model.transformer_blocks[0].norm2_context = nn.RMSNorm(32)
    model.single_transformer_blocks[0].norm = nn.LayerNorm(32)
    model.single_transformer_blocks[0].attn.norm_k = nn.Identity()
    model.transformer_blocks[0].attn.set_processor(Flux2KVAttnProcessor())
    with pytest.raises(DitLoraError, match="can use ada_norm"):
        fuse(model, {"ada_norm": "on"}, check=False)
    with pytest.raises(DitLoraError, match="can use qk_norm_rope"):
        fuse(model, {"qk_norm_rope": "on"}, check=False)
    model.single_transformer_blocks[0].norm = nn.LayerNorm(32, elementwise_affine=False)
    model.single_transformer_blocks[0].attn.norm_k = nn.RMSNorm(16)
    model.single_transformer_blocks[0].attn.mlp_act_fn = nn.GLU()
    report = str(fuse(model, {"ada_norm": "on"}, check=False))
    assert "attention: not in 1 modules: its activation is a GLU" in report
    assert "ada_norm: not in 2 modules: its activation is a GELU" in report
    assert "ada_norm: not in 1 modules: one of its norms is a RMSNorm" in report
    assert [n for op, n in get_fusion(model).patched_modules if op == "ada_norm"] == ["single_transformer_blocks.0"]
