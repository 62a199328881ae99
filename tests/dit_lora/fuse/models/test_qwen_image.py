"""Qwen-Image on fused ops equals the stock model.

Covers both streams, rotated text, a caption mask, modulation by token, and fp16 clipping.
"""

import gc
from typing import Any, ClassVar

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Inputs, draw
from fuse_two_streams import TwoStreams
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import fuse
from dit_lora.fuse.models import complex_rotary
from dit_lora.fuse.models.complex_rotary import get_rotary_tables
from dit_lora.fuse.patches import get_fusion

TEXT, ROWS, COLUMNS = 5, 2, 3
IMAGE = ROWS * COLUMNS


def build(**config: Any) -> Any:
    """A small model. Head width 16 is 4 for the frame, 6 for rows, 6 for columns.

    The second block reads the text that the first one wrote.
    """
    return QwenImageTransformer2DModel(
        in_channels=4,
        out_channels=1,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=12,
        axes_dims_rope=(4, 6, 6),
        **config,
    )


def mask() -> torch.Tensor:
    """The second caption has two tokens and a pad between them."""
    text_mask = torch.ones(2, TEXT, dtype=torch.bool)
    text_mask[1, [1, 3, 4]] = False
    return text_mask


class TestQwenImage(TwoStreams):
    targets: ClassVar = [
        *("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"),
        *("to_add_out", "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.2"),
        *("img_mod.1", "txt_mod.1"),
    ]
    variants = ("", "masked")
    kept = (13.3, 0.65)
    recomputed = 4

    def stock(self) -> nn.Module:
        return build()

    def inputs(self, variant: str) -> Inputs:
        return {
            "hidden_states": draw(2, IMAGE, 4).requires_grad_(),
            "encoder_hidden_states": draw(2, TEXT, 12, seed=4).requires_grad_(),
            "encoder_hidden_states_mask": mask() if variant == "masked" else None,
            "timestep": torch.tensor([0.17, 0.803]),
            "img_shapes": [[(1, ROWS, COLUMNS)]] * 2,
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        image, text, temb = self.streams(generator)
        angles = model.pos_embed([[(1, 12, 16)]], max_txt_seq_len=24, device=image.device)
        tables = [table for angle in angles for table in get_rotary_tables(angle)]
        block, elements = model.transformer_blocks[0], image.numel() + text.numel()
        return lambda: block(image, text, None, temb, angles), [temb, *angles, *tables], elements

    def test_a_mask_is_heeded(self) -> None:
        """As the stock model heeds it, where the pad stands in the middle too."""
        model = fuse_all(self.build())
        model_inputs = self.inputs("masked")
        before = self.run(model, model_inputs)
        text = model_inputs["encoder_hidden_states"].detach().clone()
        text[~mask()] += 3.0
        padded = {**model_inputs, "encoder_hidden_states": text.requires_grad_()}
        actual = self.run(model, padded)["output 0"]
        torch.testing.assert_close(actual, before["output 0"], rtol=0, atol=2e-6)
        unmasked = {**padded, "encoder_hidden_states_mask": None}
        assert not torch.allclose(self.run(model, unmasked)["output 0"][1], actual[1], atol=1e-3)

    def test_the_text_is_rotated_from_where_the_picture_ends(self) -> None:
        """By its tables' own rows: another place of the text gives another output, as in the stock model."""
        model = fuse_all(self.build())
        wide = {**self.inputs(""), "img_shapes": [[(1, 1, IMAGE)]] * 2}
        expected = self.run(model, wide)
        with get_fusion(model).use_stock_code():
            assert_equal(self.run(model, wide), expected)
        assert not torch.equal(expected["output 0"], self.run(model)["output 0"])

    def test_tables_are_made_once_for_all_blocks_and_freed_with_the_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, tables_built, make = fuse_all(self.build()), [], complex_rotary._compute_tables

        def counted(angles: torch.Tensor) -> Any:
            tables_built.append(angles.shape)
            return make(angles)

        monkeypatch.setattr(complex_rotary, "_TABLE_CACHE", WeakIdKeyDictionary())
        monkeypatch.setattr(complex_rotary, "_compute_tables", counted)
        model.enable_gradient_checkpointing()
        self.run(model)
        assert tables_built == [(IMAGE, 8), (TEXT, 8)]
        gc.collect()
        assert not complex_rotary._TABLE_CACHE

    def test_modulation_by_token_runs_the_stock_block(self) -> None:
        """In an editing model, references are modulated as clean. Without references the flag makes no difference."""
        model = adapted(build(zero_cond_t=True), self.targets)
        plain = adapted(build(), self.targets)
        plain.load_state_dict(model.state_dict())
        model_inputs = self.inputs("masked")
        edit = {**model_inputs, "img_shapes": [[(1, 1, 3), (1, 1, 3)]] * 2}
        expected, of_plain = self.run(model, edit), self.run(plain, model_inputs)
        with pytest.raises(DitLoraError, match=r"modulation differs from token to token \(zero"):
            fuse(model, {"ada_norm": "on"}, check=False)
        fuse_all(model)
        assert get_fusion(model).get_active_ops() == ["lora_linear", "qk_norm_rope"]
        assert_equal(self.run(model, edit), expected)
        assert_equal(self.run(model, model_inputs), of_plain)

    @pytest.mark.parametrize("stream", ["img", "txt"])
    def test_fp16_is_clipped_as_in_the_stock_block(self, stream: str) -> None:
        model = adapted(build(), ["to_q"]).half()
        block = model.transformer_blocks[0]
        block.get_submodule(f"{stream}_mlp").net[2].weight.data.mul_(3e4)
        block.get_submodule(f"{stream}_mod")[1].bias.data[-32:] = 30.0
        image, text = draw(2, IMAGE, 32).half(), draw(2, TEXT, 32, seed=4).half()
        model_inputs = (image, text, None, draw(2, 32, seed=5).half())
        stock, actual = block(*model_inputs), fuse_all(model) and block(*model_inputs)
        index = 0 if stream == "txt" else 1
        assert actual[index].abs().max() == stock[index].abs().max() == 65504
        assert all(x.isfinite().all() for x in (*stock, *actual))

    def test_another_mask_is_refused_as_the_stock_processor_does(self) -> None:
        model = fuse_all(self.build())
        model_inputs = {**self.inputs(""), "attention_kwargs": {"attention_mask": mask()}}
        with pytest.raises(ValueError, match="does not accept an external attention_mask"):
            self.run(model, model_inputs)


def test_what_is_not_the_stock_block_is_kept() -> None:
    model = build()
    first_block, second = model.transformer_blocks
    first_block.txt_norm2 = nn.RMSNorm(32)
    second.img_norm1 = nn.LayerNorm(32)
    for block in (first_block, second):
        block.attn.norm_added_k = nn.Identity()
    with pytest.raises(DitLoraError, match="can use ada_norm"):
        fuse(model, {"ada_norm": "on"}, check=False)
    with pytest.raises(DitLoraError, match="can use qk_norm_rope"):
        fuse(model, {"qk_norm_rope": "on"}, check=False)
    second.img_norm1 = nn.LayerNorm(32, elementwise_affine=False)
    report = str(fuse(model, {"ada_norm": "on"}, check=False))
    assert "ada_norm: not in 1 modules: one of its norms is a RMSNorm" in report
    assert "attention: not in 2 modules: one of its norms is a Identity" in report
    assert [n for op, n in get_fusion(model).patched_modules if op == "ada_norm"] == ["transformer_blocks.1"]
