"""DiT, Latte and PixArt on fused ops are the stock models; what their block cannot take stays as it is."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import DiTTransformer2DModel, LatteTransformer3DModel, PixArtTransformer2DModel
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from fuse_checks import adapted, assert_equal, fuse_all
from fuse_contract import Contract, Inputs, draw
from torch import nn

from dit_lora.families import get_family
from dit_lora.fuse.api import fuse
from dit_lora.fuse.attention import SharedInputProcessor
from dit_lora.fuse.models import streams
from dit_lora.fuse.patches import FusedModelState, get_fusion

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


class TestDiT(Contract):
    ops = ("lora_linear", "ada_norm")
    targets: ClassVar = [*ATTENTION, "ff.net.2", "norm1.linear"]
    module = streams
    without_gradient = ("to_k.base_layer.bias",)
    kept = (12.2, 0.82)

    def stock(self) -> nn.Module:
        model = DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=6,
            patch_size=2,
            num_embeds_ada_norm=10,
            norm_eps=0.1,
        )
        for block in model.transformer_blocks:
            block.norm1.emb.class_embedder.dropout_prob = 0.5
        return model

    def inputs(self, variant: str) -> Inputs:
        return {
            "hidden_states": draw(2, 4, 6, 6).requires_grad_(),
            "timestep": torch.tensor([17, 803]),
            "class_labels": torch.tensor([1, 7]),
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        tokens = torch.randn(2, 192, 32, generator=generator).bfloat16().requires_grad_()
        model_inputs = {"timestep": torch.tensor([3, 900]), "class_labels": torch.tensor([1, 7])}
        block = model.transformer_blocks[0]
        return lambda: block(tokens, **model_inputs), [*model_inputs.values()], tokens.numel()

    def test_bf16_autocast_is_no_worse_where_every_weight_trains(self) -> None:
        self.check_bf16_autocast(trains_every_weight=True)


class TestLatte(Contract):
    ops = ("lora_linear", "ada_norm")
    targets: ClassVar = [*ATTENTION, "ff.net.2", "adaln_single.linear"]
    module = streams
    without_gradient = ("to_k.base_layer.bias",)
    kept = (15.8, 0.82)

    def stock(self) -> nn.Module:
        return LatteTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=1,
            cross_attention_dim=32,
            attention_bias=True,
            sample_size=6,
            patch_size=2,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=True,
            norm_eps=0.1,  # large, so that it is seen where it is
            caption_channels=12,
            video_length=3,
        )

    def inputs(self, variant: str) -> Inputs:
        return {
            "hidden_states": draw(2, 4, 3, 4, 6).requires_grad_(),
            "encoder_hidden_states": draw(2, 5, 12, seed=4).requires_grad_(),
            "timestep": torch.tensor([17, 803]),
        }

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        tokens = torch.randn(2, 192, 32, generator=generator).bfloat16().requires_grad_()
        text = torch.randn(2, 5, 32, generator=generator).bfloat16()
        rows = torch.randn(2, 6 * 32, generator=generator).bfloat16()
        block = model.transformer_blocks[0]
        return lambda: block(tokens, None, text, None, rows), [text, rows], tokens.numel()


class TestPixArt(Contract):
    ops = ("lora_linear", "ada_norm")
    targets: ClassVar = [*ATTENTION, "ff.net.2", "adaln_single.linear"]
    module = streams
    without_gradient = ("to_k.base_layer.bias",)
    variants = ("masked", "whole")
    kept = (15.8, 0.82)

    def stock(self) -> nn.Module:
        return PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            cross_attention_dim=32,
            sample_size=6,
            patch_size=2,
            caption_channels=12,
            use_additional_conditions=False,
        )

    def inputs(self, variant: str) -> Inputs:
        model_inputs = {
            "hidden_states": draw(2, 4, 4, 6).requires_grad_(),
            "encoder_hidden_states": draw(2, 5, 12, seed=4).requires_grad_(),
            "timestep": torch.tensor([17, 803]),
        }
        if variant == "masked":
            model_inputs["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
            model_inputs["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
        return model_inputs

    def block_run(self, model: Any, generator: torch.Generator) -> tuple[Any, list[Any], int]:
        tokens = torch.randn(2, 192, 32, generator=generator).bfloat16().requires_grad_()
        text = torch.randn(2, 5, 32, generator=generator).bfloat16()
        rows = torch.randn(2, 6 * 32, generator=generator).bfloat16()
        block = model.transformer_blocks[0]
        return lambda: block(tokens, None, text, None, rows), [text, rows], tokens.numel()


@pytest.mark.parametrize(("family", "variant"), [("dit", "dit-tiny"), ("latte", "latte")])
def test_a_tiny_checkpoint(family: str, variant: str, tmp_path: Path) -> None:
    get_family(family).build_tiny_checkpoint(variant, tmp_path, 0)
    inputs: Inputs = {"timestep": torch.tensor([17, 803])}
    if family == "dit":
        model = DiTTransformer2DModel.from_pretrained(tmp_path, subfolder="transformer")
        inputs["hidden_states"] = draw(2, 4, 4, 4).requires_grad_()
        inputs["class_labels"] = torch.tensor([1, 700])
    else:
        model = LatteTransformer3DModel.from_pretrained(tmp_path, subfolder="transformer")
        inputs["hidden_states"] = draw(2, 4, 4, 4, 4).requires_grad_()
        inputs["encoder_hidden_states"] = draw(2, 5, 32, seed=4)
    model = adapted(model, ATTENTION)
    expected = TestDiT().run(model, inputs)
    fuse_all(model)
    assert set(get_fusion(model).get_active_ops()) == {"lora_linear", "ada_norm"}
    assert_equal(TestDiT().run(model, inputs), expected)


def test_a_latte_of_one_frame_or_without_temporal_blocks() -> None:
    latte = TestLatte()
    # One frame attends to itself alone: its q and k have no gradient.
    model = latte.build(["to_v", "to_out.0"])
    image = {**latte.inputs(""), "hidden_states": draw(2, 4, 1, 4, 6).requires_grad_()}
    still = {**latte.inputs(""), "enable_temporal_attentions": False}
    expected = [latte.run(model, inputs) for inputs in (image, still)]
    fuse_all(model)
    for model_inputs, values in zip((image, still), expected, strict=True):
        assert_equal(latte.run(model, model_inputs), values)


def block_of(**config: Any) -> BasicTransformerBlock:
    norm_config = {"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 10, **config}
    return BasicTransformerBlock(32, 2, 16, **norm_config)


def with_another(name: str) -> BasicTransformerBlock:
    block = block_of()
    setattr(block, name, nn.Identity())
    return block


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: block_of(norm_type="layer_norm"), "its norm is layer_norm"),
        (lambda: block_of(norm_type="ada_norm"), "its norm is ada_norm"),
        (
            lambda: block_of(positional_embeddings="sinusoidal", num_positional_embeddings=8),
            "it adds positions of its own",
        ),
        (
            lambda: block_of(only_cross_attention=True, cross_attention_dim=32),
            "its first attention is to the text",
        ),
        (lambda: block_of(cross_attention_dim=32), "it has a second attention"),
        (lambda: with_another("norm3"), "one of its norms is a Identity"),
        (lambda: with_another("norm1"), "its norm1 is a Identity"),
    ],
)
def test_what_a_block_cannot_be(make: Any, reason: str) -> None:
    model = nn.ModuleList([block_of(), make()])
    report = fuse(model, {"ada_norm": "on"}, check=False)
    assert report.fusion.skipped_modules == [("ada_norm", "1", reason)]


@pytest.mark.parametrize("how", ["chunked", "with arguments"])
def test_calls_that_run_the_stock_block(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of().eval()
    tokens = draw(2, 4, 32)
    inputs: Inputs = {"timestep": torch.tensor([3, 900]), "class_labels": torch.tensor([1, 7])}
    if how == "chunked":
        block.set_chunk_feed_forward(2, dim=1)
    else:
        inputs["cross_attention_kwargs"] = {"temb": draw(2, 32)}
    expected = block(tokens, **inputs)
    fuse(nn.ModuleList([block]), {"ada_norm": "on"}, check=False)
    monkeypatch.delattr(streams, "joint_ada_norm")
    assert torch.allclose(block(tokens, **inputs), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("text", [True, False])
def test_fp32_tables_make_the_residual_stream_fp32(text: bool) -> None:
    """As in the stock block, small values added to large tokens are not rounded away."""
    block = block_of(norm_type="ada_norm_single", cross_attention_dim=32 if text else None)
    tokens, source = (100 * draw(2, 6, 32)).bfloat16(), draw(2, 5, 32).bfloat16()
    rows = draw(2, 6 * 32, seed=4).bfloat16()

    def added() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            output = block(tokens, None, source if text else None, None, rows)
        assert output.dtype is torch.float32
        return output - tokens.float()

    expected = added()
    fuse(nn.ModuleList([block]), {"ada_norm": "on"}, check=False)
    assert (added() - expected).square().mean() < 2e-4 * expected.square().mean()


class Spy:
    """The stock processor, counting its calls."""

    def __init__(self, stock: Any) -> None:
        self.stock, self.calls = stock, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.stock(*args, **kwargs)


def attention(**config: Any) -> tuple[Attention, Spy]:
    """An attention layer of width 32 with the fused processor, and the stock one in it."""
    torch.manual_seed(0)
    layer = Attention(32, heads=2, dim_head=16, **config).requires_grad_(False)
    spy = Spy(layer.processor)
    layer.processor = SharedInputProcessor(spy, FusedModelState({"attention": True}), layer)
    return layer, spy


@pytest.mark.parametrize("text", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("mask", ["none", "rows", "bias", "of every head", "short"])
def test_attention_is_the_stock_processors(text: bool, mask: str) -> None:
    layer, stock = attention(rescale_output_factor=1.5)
    tokens, source = draw(2, 6, 32), draw(2, 6, 32, seed=4) if text else None
    masks = {
        "none": None,
        "rows": draw(2, 6, seed=5),
        "bias": draw(2, 1, 6, seed=5),
        "of every head": draw(4, 6, 6, seed=5),
        "short": draw(2, 1, 0, seed=5),  # padded with zeros by as many as there are tokens
    }
    inputs = {"encoder_hidden_states": source, "attention_mask": masks[mask]}
    expected = stock.stock(layer, tokens, **inputs)
    actual = layer(tokens, **inputs, temb=draw(2, 32, seed=6))
    assert torch.allclose(actual, expected, rtol=0, atol=1e-6)
    assert stock.calls == 0


@pytest.mark.parametrize("how", ["four dimensions", "one text for two", "arguments"])
def test_attention_that_the_stock_processor_computes(how: str) -> None:
    layer, stock = attention()
    tokens, text = draw(2, 6, 32), draw(2, 7, 32, seed=4)
    args: tuple[Any, ...] = (tokens, text)
    if how == "four dimensions":
        args = (draw(2, 32, 2, 3), None)
    elif how == "one text for two":  # both samples' queries become one's
        args = (tokens, text[:1])
    extra = {"scale": None} if how == "arguments" else {}
    expected = stock.stock(layer, *args)
    assert torch.equal(layer.processor(layer, *args, **extra), expected)
    assert stock.calls == 1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"norm_num_groups": 4}, "its input has a norm of its own"),
        ({"residual_connection": True}, "it adds its input itself"),
        ({"qk_norm": "rms_norm"}, "it norms q and k"),
    ],
)
def test_attention_that_is_kept(config: dict[str, Any], reason: str) -> None:
    model = nn.ModuleList([block_of(), Attention(32, heads=2, dim_head=16, **config)])
    report = fuse(model, {"ada_norm": "on"}, check=False)
    assert report.fusion.skipped_modules == [("attention", "1", reason)]
