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


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_further_from_fp64_than_eager(name: str, dtype: torch.dtype) -> None:
    check(LAYERS[name], dtype, train=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_weight_and_bias(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several tokens to a program, and a last one with fewer
    monkeypatch.setattr(qk_norm_rope_kernels, "PARTIALS", 4)
    check(LAYERS[name], dtype, train=True)


def test_a_program_takes_one_token_where_partials_suffice() -> None:
    check(COGVIDEOX, torch.float32, train=True)


@pytest.mark.parametrize("name", ["cogvideox, text first", "wan"])
def test_from_the_input_where_the_weight_cannot_be_divided_by(name: str) -> None:
    layer = LAYERS[name]
    given = operands(layer)
    assert given.weight is not None
    given.weight[::3] = 0.0
    exact = results(lambda *t: stock(layer, *t), given.to(torch.float64))
    mine = results(lambda *t: ours(layer, *t, from_output=False), given.to(torch.float32))
    for key, value in mine.items():
        assert relative_error(value, exact[key]) < 1e-6, key


def test_only_the_weight_is_trained() -> None:
    given = operands(COGVIDEOX).to(torch.float32, train=True)
    wanted = results(lambda *t: stock(COGVIDEOX, *t), given)
    given.x.requires_grad_(False)
    assert given.bias is not None
    given.bias.requires_grad_(False)
    mine = results(lambda *t: ours(COGVIDEOX, *t), given)
    assert mine.keys() == {"out", "dweight"}
    assert relative_error(mine["dweight"], wanted["dweight"]) < 1e-6


def test_operands_of_different_dtypes() -> None:
    given = operands(COGVIDEOX)
    exact = results(lambda *t: stock(COGVIDEOX, *t), given.to(torch.float64))
    mixed = given.to(torch.float32)
    mixed.x = mixed.x.detach().bfloat16().requires_grad_()
    mixed.grad = mixed.grad.bfloat16()
    assert mixed.weight is not None
    mixed.weight = mixed.weight.half()
    mine = results(lambda *t: ours(COGVIDEOX, *t), mixed)
    assert mine["out"].dtype is mine["dx"].dtype is torch.bfloat16
    assert all(relative_error(mine[key], exact[key]) < 2**-7 for key in mine)


@pytest.mark.parametrize(
    ("name", "train"),
    [("layer across heads, halves", True), ("wan", False), ("ltx-2, an angle once", False)],
)
def test_gradcheck_of_the_kernels(name: str, train: bool) -> None:
    layer = replace(LAYERS[name], batch=1, tokens=2, heads=2, width=4, rows=1, first=1, tables=0)
    given = operands(layer).to(torch.float64, train)

    def run(*inputs: Tensor | None) -> Tensor:
        return ours(layer, *inputs)

    assert torch.autograd.gradcheck(run, given.inputs())


@pytest.mark.parametrize(("smallest", "allowed"), [(0.01, 1.7e-3), (0.5, 5e-4)])
def test_gradient_from_a_bf16_output(smallest: float, allowed: float) -> None:
    """Apart from rounding dx itself, which is off by 1.7e-3 in bf16; a bias makes the output's unit coarser."""
    layer = replace(COGVIDEOX, tokens=16, rows=12)
    given = operands(layer).to(torch.float32)
    assert given.weight is not None
    assert given.bias is not None
    given.weight = given.weight.sign() * given.weight.abs().clamp(min=smallest)
    given.weight[9] = smallest
    assert recoverable(given.weight, given.bias)
    exact = results(lambda *t: stock(layer, *t), given)["dx"]
    options = qk_norm_rope_kernels.Options(**layer.options)
    x, weight, bias, cos, sin = given.inputs()
    out = qk_norm_rope_reference(x.detach(), weight, bias, cos, sin, **layer.options)
    rstd = module._normalized(x.detach(), options)[1].squeeze(-1)
    saved = qk_norm_rope_kernels.BackwardOperands(
        given.grad, out.bfloat16(), rstd, weight, bias, cos, sin
    )
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
@pytest.mark.parametrize(
    "name", ["cogvideox, text first", "layer across heads, halves", "ltx, tables of each sample"]
)
def test_nothing_is_left_unwritten(name: str, train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]
    monkeypatch.setattr(qk_norm_rope_kernels, "PARTIALS", 4)
    given = operands(layer).to(torch.float32, train)
    clean = results(lambda *t: ours(layer, *t), given)
    with poisoned_memory(monkeypatch):
        alike(clean, results(lambda *t: ours(layer, *t), given))


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
def test_nothing_is_read_outside_the_operands(
    name: str, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LAYERS[name]
    monkeypatch.setattr(qk_norm_rope_kernels, "PARTIALS", 4)
    given = operands(layer).to(torch.float32, train)
    clean = results(lambda *t: ours(layer, *t), given)

    def surrounded(tensor: Tensor | None) -> Tensor | None:
        """Contiguous, NaN before and after: a copy would not keep what lies around it."""
        if tensor is None:
            return None
        arena = torch.full((tensor.numel() + 512,), float("nan"), device=DEVICE, dtype=tensor.dtype)
        window = arena[256 : 256 + tensor.numel()].view(tensor.shape)
        return window.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    x, weight, bias, cos, sin = given.inputs()
    assert x is not None
    shared = [surrounded(t) for t in (weight, bias, cos, sin)]
    apart = Operands(in_nan_arena(x), *shared, in_nan_arena(given.grad))
    alike(clean, results(lambda *t: ours(layer, *t), apart))


@pytest.mark.parametrize("train", [False, True])
def test_views_of_a_joint_buffer(train: bool) -> None:
    given = operands(SMALL).to(torch.float32, train)
    clean = results(lambda *t: ours(SMALL, *t), given)
    batch, tokens, heads, width = given.x.shape
    qkv = torch.full((batch, tokens, 3, heads, width), float("nan"), device=DEVICE)
    qkv[:, :, 1] = given.x.detach()
    heads_first = given.x.detach().transpose(1, 2).contiguous().transpose(1, 2)
    every_second = torch.stack([given.x.detach()] * 2, -1).flatten(-2)[..., ::2]
    for view in (qkv[:, :, 1], heads_first, every_second):
        given.x = view.requires_grad_()
        alike(clean, results(lambda *t: ours(SMALL, *t), given))


def test_gradients_of_any_strides() -> None:
    given = operands(SMALL).to(torch.float32)
    views = {
        "of a sum": torch.ones((), device=DEVICE).expand(given.x.shape),
        "of a row": given.grad[:1, :1].expand(given.x.shape),
        "heads first": given.grad.transpose(1, 2).contiguous().transpose(1, 2),
    }
    for name, view in views.items():
        given.grad = view.contiguous()
        clean = results(lambda *t: ours(SMALL, *t), given)
        given.grad = view
        assert torch.equal(results(lambda *t: ours(SMALL, *t), given)["dx"], clean["dx"]), name


@pytest.mark.parametrize("far", [0, 1, 2])
def test_offsets_beyond_32_bits(far: int) -> None:
    """Samples, tokens or heads 2^30 elements apart, in memory that is not touched between them."""
    shape = [1, 1, 1, 8]
    shape[far] = 3
    strides = [8, 8, 8, 1]
    strides[far] = 2**30
    layer = Layer("layer", *shape, bias=True, rows=1)
    given = operands(layer).to(torch.float32)
    clean = results(lambda *t: ours(layer, *t), given)
    for kind in ("x", "grad", "source"):
        buffer = torch.empty(2**31 + 64, dtype=torch.float32, device=DEVICE)
        spread = operands(layer).to(torch.float32)
        value = spread.grad if kind == "grad" else spread.x.detach()
        view = buffer.as_strided(shape, strides).copy_(value)
        if kind == "grad":
            spread.grad = view
        else:
            spread.x = view.requires_grad_()
        mine = results(lambda *t, kind=kind: ours(layer, *t, from_output=kind != "source"), spread)
        assert torch.equal(mine["out"], clean["out"])
        assert relative_error(mine["dx"], clean["dx"]) < 1e-5


def test_the_same_bits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qk_norm_rope_kernels, "PARTIALS", 4)
    given = operands(COGVIDEOX).to(torch.bfloat16, train=True)
    first, second = (results(lambda *t: ours(COGVIDEOX, *t), given) for _ in range(2))
    alike(first, second)


# Hard values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cogvideox, text first", "layer across heads, halves", "wan"])
def test_a_mean_far_from_zero(name: str) -> None:
    layer = LAYERS[name]
    given = operands(layer)
    given.x = given.x.clamp(-3, 3) + 100
    exact = results(lambda *t: stock(layer, *t), given.to(torch.float64))
    mine = results(lambda *t: ours(layer, *t), given.to(torch.float32))
    assert all(relative_error(mine[key], exact[key]) < 2e-5 for key in mine)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("value", [0.0, 3.0, 1e-20, 1e4])
def test_rows_that_are_constant_or_extreme(norm: str, value: float) -> None:
    layer = replace(COGVIDEOX, batch=1, heads=2, norm=norm, bias=norm == "layer")
    given = operands(layer)
    given.x[:, ::2] = value
    given.x[0, 1] *= max(value, 1e-30)  # not constant, as large or as small
    for dtype in (torch.float32, torch.float16):
        low = given.to(dtype)
        exact = results(lambda *t: stock(layer, *t), low.to(torch.float64))
        for from_output in (True, False):
            mine = results(lambda *t, f=from_output: ours(layer, *t, from_output=f), low)
            assert all(torch.isfinite(v).all() for v in mine.values() if dtype is torch.float32)
            assert relative_error(mine["out"], exact["out"]) < (
                2e-6 if dtype is torch.float32 else 2e-3
            )


@pytest.mark.parametrize("name", ["cogvideox, text first", "ltx, tables of each sample"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(name: str, bad: float) -> None:
    layer = LAYERS[name]
    given = operands(layer).to(torch.float32)
    clean = results(lambda *t: ours(layer, *t), given)
    spoiled = given.x.detach().clone()
    spoiled[1, 4, 2, 5] = bad
    given.x = spoiled.requires_grad_()
    mine = results(lambda *t: ours(layer, *t), given)
    head = slice(None) if layer.across else slice(2, 3)
    others = torch.ones_like(spoiled, dtype=torch.bool)
    others[1, 4, head] = False
    for key, value in mine.items():
        assert torch.equal(value[others], clean[key][others]), key
        assert not torch.isfinite(value[1, 4, 2]).all(), key
