"""LTX-2 on fused ops equals the stock model.

Covers both generations and rotations, one timestep per sample or per token, with and without audio.
"""

import copy
from typing import Any, ClassVar

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoAttnProcessor
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Contract, Inputs, draw
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.fuse.api import fuse
from dit_lora.fuse.models import streams

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
TOKENS, SOUND, TEXT = 9, 12, 5
GRID = {"num_frames": 3, "height": 1, "width": 3, "audio_num_frames": SOUND}
NEW = {"gated_attn": True, "cross_attn_mod": True}
OF_2_3 = {
    **NEW,
    **{f"audio_{name}": value for name, value in NEW.items()},
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}


def build(**config: Any) -> Any:
    """Heads of 16 and 8 elements, no multiples of 6: the first angles are 0."""
    common: dict[str, Any] = {
        "in_channels": 8,
        "out_channels": 8,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "cross_attention_dim": 32,
        "audio_in_channels": 6,
        "audio_out_channels": 6,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 16,
        "audio_cross_attention_dim": 32,
        "num_layers": 2,
        "caption_channels": 12,
        "norm_eps": 0.1,  # large, so that it is seen where it is
        "rope_type": "split",
    }
    return LTX2VideoTransformer3DModel(**{**common, **config})


class Joint(Contract):
    """Both streams, at timesteps of their own."""

    ops = ("lora_linear", "qk_norm_rope", "ada_norm")
    module = streams
    variants = ("a sample", "a token, masked")
    widths: ClassVar[tuple[int, int]] = (12, 12)
    """Widths of the text, for video and for sound."""

    def inputs(self, variant: str) -> Inputs:
        sigma, sound = torch.tensor([17.0, 803.0]), torch.tensor([611.0, 94.0])
        rows = torch.linspace(0, 999, 2 * TOKENS).view(2, TOKENS).flip(1)
        masked = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        per_token = variant != "a token, masked"
        return {
            "hidden_states": draw(2, TOKENS, 8).requires_grad_(),
            "audio_hidden_states": draw(2, SOUND, 6, seed=6).requires_grad_(),
            "encoder_hidden_states": draw(2, TEXT, self.widths[0], seed=4).requires_grad_(),
            "audio_encoder_hidden_states": draw(2, TEXT, self.widths[1], seed=5).requires_grad_(),
            "timestep": sigma if per_token else rows,
            "audio_timestep": sound,
            "sigma": sigma,
            "audio_sigma": sound,
            "encoder_attention_mask": None if per_token else masked,
            "audio_encoder_attention_mask": None if per_token else masked.flip(0),
            "isolate_modalities": variant == "alone",
            # As the pipelines do; without it, attention between the two has a row a token too.
            "use_cross_timestep": True,
            "fps": 8.0,
            **GRID,
        }

    def test_neither_attends_to_the_other(self) -> None:
        model, model_inputs = self.build(), self.inputs("alone")
        expected = self.run(model, model_inputs)
        assert "transformer_blocks.0.audio_to_video_attn.to_q.lora_A.default.weight" not in expected
        assert_equal(self.run(fuse_all(model), model_inputs), expected)

    def kind(self, name: str) -> str:
        """One layer in all twelve attentions; each has few numbers."""
        *parent_path, layer = name.split(".", 3)
        return layer if len(parent_path) == 3 and "attn" in parent_path[2] else name

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).bfloat16()

        tokens, sound = random(2, 192, 32).requires_grad_(), random(2, 64, 32).requires_grad_()
        count = len(model.transformer_blocks[0].scale_shift_table)
        rows = [
            *(random(2, 1, count * width) for width in (32, 32)),
            *(random(2, 1, 4 * width) for width in (32, 32)),
            *(random(2, 1, width) for width in (32, 32)),
        ]
        rows += [random(2, 1, 2 * width) for width in (32, 32)] if count == 9 else [None, None]
        video = model.rope.prepare_video_coords(2, 3, 8, 8, tokens.device)
        audio = model.audio_rope.prepare_audio_coords(2, 64, tokens.device)
        rotary = (
            model.rope(video),
            model.audio_rope(audio),
            model.cross_attn_rope(video[:, :1]),
            model.cross_attn_audio_rope(audio[:, :1]),
        )
        text, of_sound = random(2, 5, 32), random(2, 5, 32)
        block = model.transformer_blocks[0]
        excluded = [text, of_sound, *rows, *(table for pair in rotary for table in pair)]
        return (
            lambda: block(tokens, sound, text, of_sound, *rows, *rotary),
            [tensor for tensor in excluded if tensor is not None],
            tokens.numel() + sound.numel(),
        )


@pytest.mark.thorough  # 2.3 has all of it and more
class TestFirst(Joint):
    """2.0: text is projected in the model, and attention has no gates."""

    targets: ClassVar = [*ATTENTION, "ff.net.2", "audio_ff.net.0.proj", "time_embed.linear"]
    kept = (25.1, 0.48)

    def stock(self) -> nn.Module:
        return build()

    def test_with_interleaved_pairs(self) -> None:
        model = adapted(build(rope_type="interleaved"), self.targets)
        inputs = self.inputs("a token, masked")
        expected = self.run(model, inputs)
        assert_equal(self.run(fuse_all(model), inputs), expected)

    def test_a_row_a_token_for_all(self) -> None:
        """Without `use_cross_timestep` the two attend to each other by rows of their own tokens."""
        model = adapted(build(), self.targets)
        inputs = {**self.inputs("a token, masked"), "use_cross_timestep": False}
        expected = self.run(model, inputs)
        assert_equal(self.run(fuse_all(model), inputs), expected)


class TestSecond(Joint):
    """2.3: text is modulated, and attention has a gate per head and its own processor."""

    targets: ClassVar = [*ATTENTION, "to_gate_logits", "audio_ff.net.2", "prompt_adaln.linear"]
    widths = (32, 32)
    kept = (25.5, 0.48)

    def stock(self) -> nn.Module:
        return build(**OF_2_3)

    @pytest.mark.parametrize("rows", [None, [1.0, 0.0]])
    def test_perturbed_attention_is_the_stock_processors(self, rows: Any) -> None:
        model = adapted(self.stock(), self.targets)
        inputs = {
            **self.inputs("a sample"),
            "spatio_temporal_guidance_blocks": [1],
            "perturbation_mask": None if rows is None else torch.tensor(rows),
        }
        expected, plain = self.run(model, inputs), self.run(model)
        assert not torch.equal(expected["output 0"], plain["output 0"])
        assert_equal(self.run(fuse_all(model), inputs), expected)

    def test_text_modulated_alike_at_all_timesteps(self) -> None:
        model = adapted(build(**OF_2_3, use_prompt_adaln_single=False), ATTENTION)
        expected = self.run(model)
        assert_equal(self.run(fuse_all(model)), expected)


def test_what_is_not_the_stock_block_is_kept() -> None:
    model = build()
    model.transformer_blocks[0].audio_norm2 = nn.LayerNorm(16)
    model.transformer_blocks[1].video_to_audio_norm = nn.LayerNorm(16)
    model.transformer_blocks[1].audio_to_video_attn.norm_k = nn.Identity()
    with pytest.raises(DitLoraError, match="can use ada_norm"):
        fuse(model, {"ada_norm": "on"}, check=False)
    model.transformer_blocks[0].audio_norm2 = copy.deepcopy(model.transformer_blocks[0].norm2)
    report = str(fuse(model, {"qk_norm_rope": "on", "ada_norm": "on"}, check=False))
    assert "attention: not in 1 modules: one of its norms is a Identity" in report
    assert "ada_norm: not in 1 modules: one of its norms is a LayerNorm" in report
    processor = model.transformer_blocks[1].audio_to_video_attn.processor
    assert type(processor) is LTX2AudioVideoAttnProcessor
