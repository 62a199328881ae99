"""Pieces of Sana on fused ops: fp16's limit, what the patches leave to the stock code, the feed-forward by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.sana_transformer import GLUMBConv
from fuse_checks import adapted, assert_equal, by, fuse_all, values
from fuse_sana import ATTENTION, TEXT, build, make_inputs, run
from torch import nn

from dit_lora.config.recipe import ModelConfig
from dit_lora.families import get_family
from dit_lora.families.sana.attention import SaturatingLinearAttention, keep_linear_attention_fp32
from dit_lora.fuse.api import unfuse
from dit_lora.fuse.models import sana
from dit_lora.fuse.patches import get_fusion
from dit_lora.numerics.saturation import FP16_MAX, has_fp16_saturation


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with by("reference", monkeypatch):
        yield


def tokens(dtype: torch.dtype = torch.float32, *, seed: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 30, 32, generator=generator).to(dtype).requires_grad_()


def loud(dtype: torch.dtype) -> nn.Module:
    """A model whose linear attention gives values far beyond fp16's."""
    model = build("sana", targets=ATTENTION)
    with torch.no_grad():
        for block in model.transformer_blocks:
            block.attn1.to_v.base_layer.weight *= 300
            block.attn1.to_out[0].base_layer.weight *= 6000
    return model.to(dtype)


def of_layer(attention: Any, x: torch.Tensor, **given: Any) -> dict[str, torch.Tensor]:
    return values(attention, lambda m: m(x, **given), {"x": x})


def test_a_saturating_model_saturates_and_says_so() -> None:
    model = loud(torch.float32)
    keep_linear_attention_fp32(model, should_saturate=True)
    attention = model.transformer_blocks[0].attn1
    expected = of_layer(attention, tokens())
    fuse_all(model)
    assert isinstance(attention.processor, sana.SaturatingSanaLinearProcessor)
    assert isinstance(attention.processor.stock, SaturatingLinearAttention)
    assert has_fp16_saturation(model)
    actual = of_layer(attention, tokens())
    assert_equal(actual, expected)
    limited = (actual["output 0"].abs() == FP16_MAX).float().mean()
    assert 0.05 < limited < 0.95
    unfuse(model)
    assert has_fp16_saturation(model)


def test_fp16_is_clipped_as_by_the_stock_processor() -> None:
    model = loud(torch.float16)
    attention, x = model.transformer_blocks[0].attn1, tokens(torch.float16)
    expected = of_layer(attention, x)["output 0"]
    fuse_all(model)
    assert not has_fp16_saturation(model)
    actual = of_layer(attention, x)["output 0"]
    assert actual.isfinite().all()
    assert actual.abs().max() == FP16_MAX
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=300)


def test_attention_between_two_sequences_is_the_stock_processors() -> None:
    model = build("sana-1.5")
    attention, text = model.transformer_blocks[0].attn1, tokens(seed=9).detach()[:, :11]
    expected = of_layer(attention, tokens(), encoder_hidden_states=text)
    fuse_all(model)
    assert_equal(of_layer(attention, tokens(), encoder_hidden_states=text), expected)


def test_norms_of_another_kind_are_called() -> None:
    """Sana's layers take any `qk_norm` of Diffusers'."""
    model = build("sana", qk_norm="layer_norm_across_heads")
    inputs = make_inputs("sana")
    expected = run(model, inputs)
    assert_equal(run(fuse_all(model), inputs), expected)


def test_blocks_without_captions_mask_or_cross_attention() -> None:
    model, inputs = build("sana"), make_inputs("sana")
    del inputs["encoder_attention_mask"]
    model.transformer_blocks[0].attn2 = None
    expected = run(model, inputs)
    assert_equal(run(fuse_all(model), inputs), expected)


def test_what_is_wrapped_keeps_its_own_forward() -> None:
    model, inputs = build("sana"), make_inputs("sana")
    first_block, second = model.transformer_blocks
    first_block.ff.conv_depth.register_forward_hook(lambda *_: None)
    second.norm1 = nn.Sequential(second.norm1)
    expected = run(model, inputs)
    fuse_all(model)
    assert_equal(run(model, inputs), expected)
    assert set(get_fusion(model).skipped_modules) == {
        (
            "silu_dwconv_glu",
            "transformer_blocks.0.ff",
            "its depthwise convolution has an adapter or hooks",
        ),
        ("ada_norm", "transformer_blocks.1", "its norms are not LayerNorm"),
    }


class Host(nn.Module):
    def __init__(self, ff: nn.Module) -> None:
        super().__init__()
        self.ff = ff

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(x)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("options", [{}, {"norm_type": "rms_norm", "residual_connection": False}])
def test_the_feed_forward_alone(options: dict[str, Any], trained: bool) -> None:
    """In the layout of images, with what Sana's blocks leave out; convolutions with hooks and adapters are called."""
    torch.manual_seed(2)
    host = adapted(Host(GLUMBConv(12, 12, 2.5, **options)), ["conv_point"])
    host.requires_grad_(trained)
    image = torch.randn(2, 12, 5, 7, requires_grad=True)

    def found() -> dict[str, torch.Tensor]:
        return values(host, lambda m: m(image), {"image": image})

    expected, calls = found(), []
    fuse_all(host)
    host.ff.conv_inverted.register_forward_hook(lambda _m, _a, output: calls.append(output.shape))
    assert_equal(found(), expected)
    assert calls == [(2, 60, 5, 7)]


@pytest.mark.parametrize("variant", ["sana-fp16", "sana-video"])
def test_a_familys_transformer_is_fused_as_it_is_loaded(variant: str, tmp_path: Path) -> None:
    family = get_family("sana_video" if variant == "sana-video" else "sana")
    family.build_tiny_checkpoint(variant, tmp_path / variant, 0)
    opened: Any = family.open(ModelConfig(family=family.name, path=str(tmp_path / variant)))
    model = adapted(opened.denoiser.load_transformer(torch.float32), list(family.lora_targets))
    inputs = make_inputs("sana-video" if variant == "sana-video" else "sana")
    text = torch.randn(2, TEXT, 32, generator=torch.Generator().manual_seed(7))
    inputs["encoder_hidden_states"] = text.requires_grad_()
    expected = run(model, inputs)
    emulated = has_fp16_saturation(model)
    assert_equal(run(fuse_all(model), inputs), expected, 1e-4)
    assert has_fp16_saturation(model) is emulated is (variant == "sana-fp16")
