"""qk_norm_rope against stock lines and fp64: every norm, rotation and table, memory and hard values."""

from dataclasses import replace

import pytest
import torch
from kernel_checks import (
    in_nan_arena,
    poisoned_memory,
    relative_error,
)
from qk_norm_rope_cases import (
    COGVIDEOX,
    DEVICE,
    FLOATS,
    LAYERS,
    SMALL,
    TRAINED,
    Layer,
    Operands,
    alike,
    check,
    operands,
    ours,
    results,
    stock,
)
from torch import Tensor

from dit_lora_kernels import qk_norm_rope as module
from dit_lora_kernels import qk_norm_rope_kernels
from dit_lora_kernels.qk_norm_rope import qk_norm_rope_reference, recoverable


# In fp16 kernels run the same lines; hard values of fp16 have tests of their own.
@pytest.mark.parametrize("dtype", [*FLOATS[:2], pytest.param(torch.float16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", LAYERS)
def test_no_further_from_fp64_than_eager(name: str, dtype: torch.dtype) -> None:
    check(LAYERS[name], dtype, train=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_weight_and_bias(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # several tokens to a program, and a last one with fewer
    monkeypatch.setattr(qk_norm_rope_kernels, "MAX_PARTIALS", 4)
    check(LAYERS[name], dtype, train=True)


def test_a_program_takes_one_token_where_partials_suffice() -> None:
    check(COGVIDEOX, torch.float32, train=True)


@pytest.mark.parametrize("name", ["cogvideox, text first", "wan"])
def test_from_the_input_where_the_weight_cannot_be_divided_by(name: str) -> None:
    layer = LAYERS[name]
    inputs = operands(layer)
    assert inputs.weight is not None
    inputs.weight[::3] = 0.0
    exact = results(lambda *t: stock(layer, *t), inputs.to(torch.float64))
    actual = results(lambda *t: ours(layer, *t, from_output=False), inputs.to(torch.float32))
    for key, value in actual.items():
        assert relative_error(value, exact[key]) < 1e-6, key


def test_only_the_weight_is_trained() -> None:
    inputs = operands(COGVIDEOX).to(torch.float32, train=True)
    expected = results(lambda *t: stock(COGVIDEOX, *t), inputs)
    inputs.x.requires_grad_(False)
    assert inputs.bias is not None
    inputs.bias.requires_grad_(False)
    actual = results(lambda *t: ours(COGVIDEOX, *t), inputs)
    assert actual.keys() == {"out", "dweight"}
    assert relative_error(actual["dweight"], expected["dweight"]) < 1e-6


def test_operands_of_different_dtypes() -> None:
    inputs = operands(COGVIDEOX)
    exact = results(lambda *t: stock(COGVIDEOX, *t), inputs.to(torch.float64))
    mixed = inputs.to(torch.float32)
    mixed.x = mixed.x.detach().bfloat16().requires_grad_()
    mixed.grad = mixed.grad.bfloat16()
    assert mixed.weight is not None
    mixed.weight = mixed.weight.half()
    actual = results(lambda *t: ours(COGVIDEOX, *t), mixed)
    assert actual["out"].dtype is actual["dx"].dtype is torch.bfloat16
    assert all(relative_error(actual[key], exact[key]) < 2**-7 for key in actual)


@pytest.mark.parametrize(
    ("name", "train"),
    [("layer across heads, halves", True), ("wan", False), ("ltx-2, an angle once", False)],
)
def test_gradcheck_of_the_kernels(name: str, train: bool) -> None:
    layer = replace(LAYERS[name], batch=1, tokens=2, heads=2, width=4, rows=1, first=1, tables=0)
    layer_inputs = operands(layer).to(torch.float64, train)

    def run(*inputs: Tensor | None) -> Tensor:
        return ours(layer, *inputs)

    assert torch.autograd.gradcheck(run, layer_inputs.inputs(), fast_mode=True)


@pytest.mark.parametrize(("smallest", "allowed"), [(0.01, 1.7e-3), (0.5, 5e-4)])
def test_gradient_from_a_bf16_output(smallest: float, allowed: float) -> None:
    """Apart from rounding dx itself, which is off by 1.7e-3 in bf16; a bias makes the output's unit coarser."""
    layer = replace(COGVIDEOX, tokens=16, rows=12)
    inputs = operands(layer).to(torch.float32)
    assert inputs.weight is not None
    assert inputs.bias is not None
    inputs.weight = inputs.weight.sign() * inputs.weight.abs().clamp(min=smallest)
    inputs.weight[9] = smallest
    assert recoverable(inputs.weight, inputs.bias)
    exact = results(lambda *t: stock(layer, *t), inputs)["dx"]
    options = qk_norm_rope_kernels.NormRopeOptions(**layer.options)
    x, weight, bias, cos, sin = inputs.inputs()
    output = qk_norm_rope_reference(x.detach(), weight, bias, cos, sin, **layer.options)
    rstd = module._normalize(x.detach(), options)[1].squeeze(-1)
    saved = qk_norm_rope_kernels.BackwardOperands(inputs.grad, output.bfloat16(), rstd, weight, bias, cos, sin)
    dx, _, _ = qk_norm_rope_kernels.launch_backward(saved, options, (True, False, False))
    assert relative_error(dx, exact) < allowed


def test_recoverable() -> None:
    weight = torch.linspace(0.01, 2, 64)
    assert recoverable(None)
    assert recoverable(weight)
    assert recoverable(-weight, torch.full((64,), 0.25))
    assert not recoverable(weight, torch.full((64,), 50.0))
    assert not recoverable(torch.cat([weight, torch.zeros(1)]))
    assert not recoverable(torch.cat([weight, torch.full((1,), 0.002)]))
    assert not recoverable(torch.full((64,), 1e-4))
    assert not recoverable(torch.full((64,), float("nan")))


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["cogvideox, text first", "layer across heads, halves", "ltx, tables of each sample"])
def test_nothing_is_left_unwritten(name: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]
    monkeypatch.setattr(qk_norm_rope_kernels, "MAX_PARTIALS", 4)
    inputs = operands(layer).to(torch.float32, train)
    clean = results(lambda *t: ours(layer, *t), inputs)
    with poisoned_memory(monkeypatch):
        alike(clean, results(lambda *t: ours(layer, *t), inputs))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "text on both sides, halves",
        "ltx, tables of each sample",
        "text last",
        "ltx-2, an angle once",
        "an angle once for all heads",
    ],
)
def test_nothing_is_read_outside_the_operands(name: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]
    monkeypatch.setattr(qk_norm_rope_kernels, "MAX_PARTIALS", 4)
    inputs = operands(layer).to(torch.float32, train)
    clean = results(lambda *t: ours(layer, *t), inputs)

    def surrounded(tensor: Tensor | None) -> Tensor | None:
        """Contiguous, NaN before and after: a copy would not keep what lies around it."""
        if tensor is None:
            return None
        arena = torch.full((tensor.numel() + 512,), float("nan"), device=DEVICE, dtype=tensor.dtype)
        window = arena[256 : 256 + tensor.numel()].view(tensor.shape)
        return window.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    x, weight, bias, cos, sin = inputs.inputs()
    assert x is not None
    shared = [surrounded(t) for t in (weight, bias, cos, sin)]
    apart = Operands(in_nan_arena(x), *shared, in_nan_arena(inputs.grad))
    alike(clean, results(lambda *t: ours(layer, *t), apart))


@pytest.mark.parametrize("train", [False, True])
def test_views_of_a_joint_buffer(train: bool) -> None:
    inputs = operands(SMALL).to(torch.float32, train)
    clean = results(lambda *t: ours(SMALL, *t), inputs)
    batch, tokens, heads, width = inputs.x.shape
    qkv = torch.full((batch, tokens, 3, heads, width), float("nan"), device=DEVICE)
    qkv[:, :, 1] = inputs.x.detach()
    heads_first = inputs.x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    every_second = torch.stack([inputs.x.detach()] * 2, -1).flatten(-2)[..., ::2]
    for view in (qkv[:, :, 1], heads_first, every_second):
        inputs.x = view.requires_grad_()
        alike(clean, results(lambda *t: ours(SMALL, *t), inputs))


def test_gradients_of_any_strides() -> None:
    inputs = operands(SMALL).to(torch.float32)
    views = {
        "of a sum": torch.ones((), device=DEVICE).expand(inputs.x.shape),
        "of a row": inputs.grad[:1, :1].expand(inputs.x.shape),
        "heads first": inputs.grad.transpose(1, 2).contiguous().transpose(1, 2),
    }
    for name, view in views.items():
        inputs.grad = view.contiguous()
        clean = results(lambda *t: ours(SMALL, *t), inputs)
        inputs.grad = view
        assert torch.equal(results(lambda *t: ours(SMALL, *t), inputs)["dx"], clean["dx"]), name


@pytest.mark.parametrize("far", [0, 1, 2])
def test_offsets_beyond_32_bits(far: int) -> None:
    """Samples, tokens or heads 2^30 elements apart, in memory that is not touched between them."""
    shape = [1, 1, 1, 8]
    shape[far] = 3
    strides = [8, 8, 8, 1]
    strides[far] = 2**30
    layer = Layer("layer", *shape, bias=True, rows=1)
    inputs = operands(layer).to(torch.float32)
    clean = results(lambda *t: ours(layer, *t), inputs)
    for kind in ("x", "grad", "source"):
        buffer = torch.empty(2**31 + 64, dtype=torch.float32, device=DEVICE)
        spread = operands(layer).to(torch.float32)
        value = spread.grad if kind == "grad" else spread.x.detach()
        view = buffer.as_strided(shape, strides).copy_(value)
        if kind == "grad":
            spread.grad = view
        else:
            spread.x = view.requires_grad_()
        actual = results(lambda *t, kind=kind: ours(layer, *t, from_output=kind != "source"), spread)
        assert torch.equal(actual["out"], clean["out"])
        assert relative_error(actual["dx"], clean["dx"]) < 1e-5


def test_the_same_bits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_norm_rope_kernels, "MAX_PARTIALS", 4)
    inputs = operands(COGVIDEOX).to(torch.bfloat16, train=True)
    first_run, second = (results(lambda *t: ours(COGVIDEOX, *t), inputs) for _ in range(2))
    alike(first_run, second)


# Hard values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cogvideox, text first", "layer across heads, halves", "wan"])
def test_a_mean_far_from_zero(name: str) -> None:
    layer = LAYERS[name]
    inputs = operands(layer)
    inputs.x = inputs.x.clamp(-3, 3) + 100
    exact = results(lambda *t: stock(layer, *t), inputs.to(torch.float64))
    actual = results(lambda *t: ours(layer, *t), inputs.to(torch.float32))
    assert all(relative_error(actual[key], exact[key]) < 2e-5 for key in actual)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("value", [0.0, 3.0, 1e-20, 1e4])
def test_rows_that_are_constant_or_extreme(norm: str, value: float) -> None:
    layer = replace(COGVIDEOX, batch=1, heads=2, norm=norm, bias=norm == "layer")
    inputs = operands(layer)
    inputs.x[:, ::2] = value
    inputs.x[0, 1] *= max(value, 1e-30)  # not constant, as large or as small
    for dtype in (torch.float32, torch.float16):
        low = inputs.to(dtype)
        exact = results(lambda *t: stock(layer, *t), low.to(torch.float64))
        for from_output in (True, False):
            actual = results(lambda *t, f=from_output: ours(layer, *t, from_output=f), low)
            assert all(torch.isfinite(v).all() for v in actual.values() if dtype is torch.float32)
            assert relative_error(actual["out"], exact["out"]) < (2e-6 if dtype is torch.float32 else 2e-3)


@pytest.mark.parametrize("name", ["cogvideox, text first", "ltx, tables of each sample"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(name: str, bad: float) -> None:
    layer = LAYERS[name]
    inputs = operands(layer).to(torch.float32)
    clean = results(lambda *t: ours(layer, *t), inputs)
    spoiled = inputs.x.detach().clone()
    spoiled[1, 4, 2, 5] = bad
    inputs.x = spoiled.requires_grad_()
    actual = results(lambda *t: ours(layer, *t), inputs)
    head = slice(None) if layer.across else slice(2, 3)
    is_unchanged = torch.ones_like(spoiled, dtype=torch.bool)
    is_unchanged[1, 4, head] = False
    for key, value in actual.items():
        assert torch.equal(value[is_unchanged], clean[key][is_unchanged]), key
        assert not torch.isfinite(value[1, 4, 2]).all(), key
