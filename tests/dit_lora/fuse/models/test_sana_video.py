"""What SANA-Video has and Sana has not, on fused ops; the rest is in `test_sana`."""

from typing import Any

import pytest
import torch
from diffusers import SanaVideoTransformer3DModel
from diffusers.models.transformers.transformer_sana_video import GLUMBTempConv
from fuse_checks import adapted, assert_equal, by, fuse_all, values
from torch import nn

from dit_lora.families.sana.attention import keep_linear_attention_fp32
from dit_lora.fuse.patches import get_fusion

WIDTH = 32


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> Any:
    with by("reference", monkeypatch):
        yield


def build() -> Any:
    torch.manual_seed(0)
    model = SanaVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=WIDTH,
        caption_channels=12,
        rope_max_seq_len=16,
    )
    return adapted(model, ["to_q", "to_k", "to_v", "to_out.0", "conv_temp"])


def make_inputs(groups: int) -> dict[str, Any]:
    """Two samples of 3 frames of 3 x 2 tokens, with so many timesteps each."""
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden_states": torch.randn(2, 4, 3, 6, 4, generator=generator).requires_grad_(),
        "encoder_hidden_states": torch.randn(2, 7, 12, generator=generator).requires_grad_(),
        "timestep": torch.randint(0, 1000, (2, groups), generator=generator),
    }


def run(model: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return values(model, lambda m: m(**inputs, return_dict=False), inputs)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("groups", [1, 18])
def test_a_timestep_a_sample_or_a_token(groups: int, trained: bool) -> None:
    model, inputs = build(), make_inputs(groups)
    model.time_embed.requires_grad_(trained)
    model.transformer_blocks.requires_grad_(trained)
    expected = run(model, inputs)
    assert_equal(run(fuse_all(model), inputs), expected, 5e-5)


def test_timesteps_that_the_stock_block_cannot_take_are_refused_too() -> None:
    model, inputs = build(), make_inputs(3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size"):
            run(model, inputs)
        fuse_all(model)


def test_linear_attention_without_positions_is_left_to_the_stock_processor() -> None:
    model = fuse_all(build())
    with pytest.raises(UnboundLocalError, match="query_rotate"):
        model.transformer_blocks[0].attn1(torch.randn(2, 18, WIDTH))


def test_a_processor_that_saturates_is_kept() -> None:
    """No SANA-Video checkpoint was trained in fp16."""
    model, inputs = build(), make_inputs(1)
    keep_linear_attention_fp32(model, should_saturate=True)
    processor = model.transformer_blocks[0].attn1.processor
    expected = run(model, inputs)
    assert_equal(run(fuse_all(model), inputs), expected)
    assert model.transformer_blocks[0].attn1.processor is processor
    expected_kept = ("relu_linear_attention", "transformer_blocks.0.attn1", "its output saturates")
    assert expected_kept in get_fusion(model).skipped_modules


class Host(nn.Module):
    def __init__(self, ff: nn.Module) -> None:
        super().__init__()
        self.ff = ff

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(x)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("options", [{}, {"norm_type": "rms_norm", "residual_connection": False}])
def test_the_feed_forward_alone(options: dict[str, Any], trained: bool) -> None:
    """Its RMSNorm is over the frames, whose number must be its width: as in Diffusers, which uses it nowhere."""
    torch.manual_seed(2)
    host = adapted(Host(GLUMBTempConv(4, 4, 2.5, **options)), ["conv_point"])
    host.requires_grad_(trained)
    video = torch.randn(2, 4, 5, 3, 4, requires_grad=True)

    def found() -> dict[str, torch.Tensor]:
        return values(host, lambda m: m(video), {"video": video})

    expected = found()
    assert_equal(fuse_and(host, found), expected)


def fuse_and(host: nn.Module, found: Any) -> dict[str, torch.Tensor]:
    fuse_all(host)
    assert get_fusion(host).get_active_ops() == ["silu_dwconv_glu"]
    return found()
