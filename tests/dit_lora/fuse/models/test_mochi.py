"""Mochi on fused ops is the stock model: each sample attends to its own text, whatever its length."""

import gc
from typing import Any

import torch
from diffusers import MochiTransformer3DModel
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Inputs, draw
from fuse_two_streams import TwoStreams
from torch import nn

from dit_lora.fuse.api import fuse
from dit_lora.fuse.models import mochi
from dit_lora.fuse.patches import fusion_of


def build() -> Any:
    return MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        pooled_projection_dim=24,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=8,
        max_sequence_length=8,
    )


class TestMochi(TwoStreams):
    kept = (20.5, 0.66)
    recomputed = 4

    def stock(self) -> nn.Module:
        return build()

    def all_trained(self, model: nn.Module) -> nn.Module:
        """But for the rotation, with which the stock attention runs."""
        model = super().all_trained(model)
        model.pos_frequencies.requires_grad_(False)
        return model

    def inputs(self, variant: str) -> Inputs:
        return {
            "hidden_states": draw(2, 4, 2, 2, 6).requires_grad_(),
            "encoder_hidden_states": draw(2, 4, 16, seed=4).requires_grad_(),
            "timestep": torch.tensor([17.0, 803.0]),
            "encoder_attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        video, text, temb = self.streams(generator, text=24)
        rotary = model.rope(model.pos_frequencies, 3, 8, 8, dtype=torch.float32)
        tables = [mochi._table(angles) for angles in rotary]  # all blocks share them
        block, elements = model.transformer_blocks[0], video.numel() + text.numel()
        besides = [temb, torch.ones(2, 24), *rotary, *tables]
        return lambda: block(video, text, temb, besides[1], rotary), besides, elements

    def test_a_mask_with_holes(self) -> None:
        """The stock attention moves the text that there is to the front."""
        mask = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])
        self.equal_when_fused(build(), {**self.inputs(""), "encoder_attention_mask": mask})

    def test_a_trained_rotation_runs_the_stock_attention(self) -> None:
        model = adapted(build(), self.targets)
        model.pos_frequencies.requires_grad_(True)
        expected = self.run(model)
        assert expected["pos_frequencies"].abs().max() > 0
        assert_equal(self.run(fuse_all(model)), expected)

    def test_tables_are_shared_by_blocks_and_go_with_the_step(self) -> None:
        model = fuse_all(self.build())
        gc.collect()
        before = len(mochi._TABLES)
        held: list[int] = []
        model.transformer_blocks[1].register_forward_hook(
            lambda *_: held.append(len(mochi._TABLES) - before)
        )
        self.run(model)
        gc.collect()
        assert held == [2]
        assert len(mochi._TABLES) == before


def test_other_norms_are_kept() -> None:
    model = build()
    model.transformer_blocks[1].attn1.norm_added_k = nn.Identity()
    report = fuse(model, {"qk_norm_rope": "on", "ada_norm": "on"}, check=False)
    assert "attention: not in 1 modules: one of its norms is a Identity" in str(report)
    assert ("qk_norm_rope", "transformer_blocks.0.attn1") in fusion_of(model).replaced
