"""Sana and SANA-Video on fused ops are the stock models: values, gradients, memory, and undone without a trace."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from fuse_checks import IMPLEMENTATIONS, assert_equal, assert_no_worse, by, fuse_all
from fuse_sana import ATTENTION, build, make_inputs, run
from kernel_checks import saved_bytes
from torch import nn

from dit_lora.families.sana.attention import keep_linear_attention_fp32
from dit_lora.fuse import attention
from dit_lora.fuse.api import unfuse
from dit_lora.fuse.models import sana, streams
from dit_lora.fuse.patches import get_fusion
from dit_lora.guard.comparison.parity import find_first_difference
from dit_lora.guard.fallbacks import find_fallback, list_model_fallbacks

KINDS = ("sana", "sana-1.5", "sana-video")
OPS = {"lora_linear", "qk_norm_rope", "ada_norm", "relu_linear_attention", "silu_dwconv_glu"}


def taken(kind: str) -> set[str]:
    """The first Sana norms no q and k."""
    return OPS - {"qk_norm_rope"} if kind == "sana" else OPS


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """References, unless a test asks for another: Triton's interpreter takes seconds a model."""
    backend = getattr(request, "param", "reference")
    with by(backend, monkeypatch):
        yield backend


def draws(model: nn.Module, kind: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of four inputs, every value stacked: a gradient of one is too few roundings to compare two ways by."""
    actual = [run(model, make_inputs(kind, dtype, seed)) for seed in range(4)]
    return {name: torch.stack([run_outputs[name] for run_outputs in actual], 1) for name in actual[0]}


def build_active(kind: str, **options: Any) -> nn.Module:
    """With q and k of the linear attention well above zero: which side of it a rounding falls on is chance."""
    model = build(kind, attention_bias=True, **options)
    with torch.no_grad():
        for block in model.transformer_blocks:
            for projection in (block.attn1.to_q, block.attn1.to_k):
                projection.base_layer.bias.add_(2.5)
    return model


def halved(model: nn.Module) -> nn.Module:
    """bf16 base, fp32 adapters: the policy of a run."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return model


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
def test_values_and_gradients_are_the_stock_models(kind: str, implementation: str) -> None:
    blocks = 1 if implementation == "kernel" else 2
    model, inputs = build(kind, num_layers=blocks), make_inputs(kind)
    expected = run(model, inputs)
    fuse_all(model)
    assert set(get_fusion(model).get_active_ops()) == taken(kind)
    assert_equal(run(model, inputs), expected)


def test_every_weight_has_the_stock_models_gradient(kind: str) -> None:
    """With norms that have weights too, as no published checkpoint has, and biases."""
    model = build(kind, norm_elementwise_affine=True).requires_grad_(True)
    inputs = make_inputs(kind)
    expected = run(model, inputs)
    assert "transformer_blocks.1.norm2.weight" in expected
    assert_equal(felt(run(fuse_all(model), inputs)), felt(expected), 5e-5)


@pytest.mark.parametrize("op", sorted(OPS))
def test_each_op_can_be_off_alone(kind: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build(kind), make_inputs(kind)
    expected = run(model, inputs)
    fuse_all(model)
    called = {"ada_norm": (streams, "joint_ada_norm"), "qk_norm_rope": (attention, op)}
    if op != "lora_linear":
        monkeypatch.setattr(*called.get(op, (sana, op)), None)
    with get_fusion(model).disable_op(op):
        assert_equal(run(model, inputs), expected)


@pytest.mark.parametrize("wrapped", [False, True])
def test_bf16_under_autocast_is_no_worse_than_the_stock_model(kind: str, wrapped: bool) -> None:
    """`wrapped`: as our families load it, with the stock attention in fp32 too."""
    model = build_active(kind)
    if wrapped:
        keep_linear_attention_fp32(model, should_saturate=False)
    exact = draws(model, kind, torch.float32)
    halved(model)
    with torch.autocast("cpu", torch.bfloat16):
        stock = draws(model, kind, torch.bfloat16)
        fused = draws(fuse_all(model), kind, torch.bfloat16)
    assert_no_worse(fused, stock, exact)


def test_an_fp32_base_under_autocast_has_the_stock_models_fp32_stream(kind: str) -> None:
    model = build_active(kind).requires_grad_(True)
    exact = draws(model, kind, torch.float32)
    recorded: list[torch.dtype] = []
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda _m, _a, output: recorded.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        stock = draws(model, kind, torch.float32)
        fused = draws(fuse_all(model), kind, torch.float32)
    assert set(recorded) == {torch.float32}
    assert_no_worse(*map(felt, (fused, stock, exact)))


def felt(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without what has no gradient but rounding: softmax does not see what all of a query's keys share."""
    return {name: value for name, value in found.items() if "attn2.to_k.base_layer.bias" not in name}


def test_undone_it_is_the_stock_model_bit_for_bit(kind: str) -> None:
    model, inputs = build(kind), make_inputs(kind)
    keep_linear_attention_fp32(model, should_saturate=False)
    processors = [m.processor for m in model.modules() if isinstance(m, Attention)]
    keys, before = list(model.state_dict()), [dict(vars(m)) for m in model.modules()]
    expected = run(model, inputs)
    fuse_all(model)
    assert list(model.state_dict()) == keys
    with get_fusion(model).use_stock_code():
        assert_equal(run(model, inputs), expected, 0.0)
    unfuse(model)
    assert_equal(run(model, inputs), expected, 0.0)
    patched_attributes = [set(vars(m)) - set(old) for m, old in zip(model.modules(), before, strict=True)]
    assert not any(patched_attributes), patched_attributes
    now = [m.processor for m in model.modules() if isinstance(m, Attention)]
    assert all(new is old for new, old in zip(now, processors, strict=True))


def test_checkpointing_gives_the_same_gradients(kind: str) -> None:
    model, inputs = fuse_all(build(kind)), make_inputs(kind)
    expected = run(model, inputs)
    model.enable_gradient_checkpointing()
    assert_equal(run(model, inputs), expected, 0.0)


def test_a_copy_is_fused_and_its_own(kind: str) -> None:
    model, inputs = fuse_all(build(kind)), make_inputs(kind)
    copied = copy.deepcopy(model)
    expected = run(model, inputs)
    assert_equal(run(copied, inputs), expected, 0.0)
    unfuse(model)
    assert get_fusion(model) is None
    assert set(get_fusion(copied).get_active_ops()) == taken(kind)
    with torch.no_grad():
        next(p for p in copied.parameters() if p.requires_grad).add_(1.0)
    assert_equal(run(model, inputs), expected, 2e-5)


@pytest.mark.parametrize(
    "kind", ["sana-1.5", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS[::2])], indirect=True
)
def test_a_block_compiles_whole(kind: str) -> None:
    model, inputs = fuse_all(build(kind, num_layers=1)), make_inputs(kind)
    expected = run(model, inputs)
    model.transformer_blocks[0].compile(fullgraph=True, backend="aot_eager")
    try:
        assert_equal(run(model, inputs), expected)
    finally:
        torch._dynamo.reset()


def block_units(model: nn.Module, kind: str) -> float:
    """What a block's forward keeps for its backward, in units of one bf16 activation of all tokens.

    Text has 0.1 of the tokens, frozen timesteps; a linear layer's low-rank product is 4/32 of a unit here.
    """
    generator = torch.Generator().manual_seed(5)
    shape = (4, 8, 8) if kind == "sana-video" else (16, 16)
    x = torch.randn(2, 256, 32, generator=generator).bfloat16().requires_grad_()
    text = torch.randn(2, 25, 32, generator=generator).bfloat16()
    mask = torch.zeros(2, 1, 25).bfloat16()
    time = torch.randn(2, 6 * 32, generator=generator).bfloat16()
    excluded = [*model.parameters(), *model.buffers(), text, mask, time]
    new_shape: list[Any] = list(shape)
    if kind == "sana-video":
        time = time[:, None]
        rotary = model.rope(torch.zeros(1, 4, 4, 16, 16))
        new_shape, excluded = [*new_shape, rotary], [*excluded, *rotary]
    with torch.autocast("cpu", torch.bfloat16):
        num_bytes = saved_bytes(lambda: model.transformer_blocks[0](x, None, text, mask, time, *new_shape), excluded)
    return num_bytes / (2 * 256 * 32 * 2)


def test_a_block_keeps_two_fifths_of_what_the_stock_block_keeps(kind: str) -> None:
    model = halved(build(kind, targets=ATTENTION))
    keep_linear_attention_fp32(model, should_saturate=False)
    stock = block_units(model, kind)
    fused = block_units(fuse_all(model), kind)
    assert fused < 0.34 * stock, (fused, stock)
    assert fused < (17.1 if kind == "sana-video" else 16.1), fused


def test_a_wrong_row_is_found_by_the_parity_probe(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = fuse_all(build(kind)), make_inputs(kind)
    joint_ada_norm = streams.joint_ada_norm

    def wrong(streams: Any, *args: Any, **kwargs: Any) -> Any:
        rolled = [s._replace(scale=s.scale.roll(1, 0)) for s in streams]
        return joint_ada_norm(rolled, *args, **kwargs)

    def losses() -> torch.Tensor:
        return model(**inputs, return_dict=False)[0].flatten(1).square().mean(1)

    switch = find_fallback(list_model_fallbacks(model), "ada_norm")
    assert find_first_difference(switch, losses, model) is None
    monkeypatch.setattr(streams, "joint_ada_norm", wrong)
    difference = find_first_difference(switch, losses, model)
    assert difference is not None
    assert "transformer_blocks.0" in difference.module
