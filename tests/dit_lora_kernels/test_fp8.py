"""Products in fp8 and adapted layers on them: within the stated bounds of fp64, and no NaN or Inf is lost.

On a CPU the codes are multiplied in fp32, as a GPU's sums are; the rounding is the same.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dit_lora_kernels import fp8
from dit_lora_kernels.lora_linear import Adapter, Projection, Quantized, lora_qkv

BF16 = torch.bfloat16


def operand(rows: int, columns: int, seed: int) -> Tensor:
    """Rows of very different sizes, one of zeros; a few outliers, a thousandfold; not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(columns, rows, generator=generator)
    values *= 10 ** torch.empty(rows).uniform_(-3, 3, generator=generator)
    outliers = torch.rand(columns, rows, generator=generator) < 0.01
    values = torch.where(outliers, 1000 * values, values)
    if rows > 3:
        values[:, 3] = 0
    return values.to(BF16).t()


def bound(x: Tensor, w: Tensor) -> Tensor:
    """The stated bound on x w^T, (N, M)."""
    sizes, weight_sizes = x.double().abs(), w.double().abs()
    scales = [t.amax(1, keepdim=True) / 448 for t in (sizes, weight_sizes)]
    far_below = scales[0] * weight_sizes.sum(1) + (scales[1] * sizes.sum(1)).t()
    return fp8.ERROR * (sizes @ weight_sizes.t()) + fp8.FLOOR * far_below


@pytest.mark.parametrize(("N", "K", "M"), [(1, 16, 16), (37, 48, 80), (129, 272, 32)])
def test_a_product_is_within_its_bounds(N: int, K: int, M: int) -> None:
    x, w = operand(N, K, 1), operand(M, K, 2)
    y = fp8.multiply_fp8(fp8.quantize_rows(x), fp8.quantize_rows(w))
    assert (y.dtype, y.shape) == (BF16, (N, M))
    assert ((y.double() - x.double() @ w.double().t()).abs() <= bound(x, w)).all()
    if N > 3:
        assert not y[3].any()
    # The bounds are no wider than they need be by much: half of one would not do.
    code = fp8.quantize_rows(x)
    value = code.codes.double() * code.scale.double()
    off = (value - x.double()).abs() / x.double().abs().clamp(min=1e-30)
    assert N == 1 or off.max() > 2**-5


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e30, 3e38])
def test_a_row_may_have_any_size(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(8, 64, generator=generator).clamp(-1, 1) * scale).to(BF16)
    codes, scales = fp8.quantize_rows(x)
    value = codes.double() * scales.double()
    assert torch.isfinite(value).all()
    largest = x.double().abs().amax(1, keepdim=True)
    min_error = 2**-10 * (largest / 448).clamp(min=torch.finfo(torch.float32).tiny)
    assert ((value - x.double()).abs() <= 2**-4 * x.double().abs() + 1.001 * min_error).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_comes_out_so_in_its_row_alone(bad: float) -> None:
    """Also where the weight has zeros, and where a cast to fp8 would have saturated it."""
    x, w = operand(20, 32, 4), operand(48, 32, 5)
    w = w.clone()
    w[:, 7] = 0
    clean = fp8.multiply_fp8(fp8.quantize_rows(x), fp8.quantize_rows(w))
    x = x.clone()
    x[11, 7] = bad
    y = fp8.multiply_fp8(fp8.quantize_rows(x), fp8.quantize_rows(w))
    assert not torch.isfinite(y[11]).any()
    unaffected_rows = torch.arange(20) != 11
    assert torch.equal(y[unaffected_rows], clean[unaffected_rows])


def layer(inputs: int, outputs: int, seed: int, *, bias: bool) -> Projection:
    """A frozen bf16 layer with an fp32 adapter that is not neutral, and its weight in fp8."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(BF16)
    bias_tensor = torch.randn(outputs, generator=generator).to(BF16) if bias else None
    a = (torch.randn(5, inputs, generator=generator) / inputs**0.5).requires_grad_()
    b = torch.randn(outputs, 5, generator=generator).requires_grad_()
    return Projection(weight, bias_tensor, Adapter(a, b, 1.5), None, fp8.quantize_weight(weight))


def run(x: Tensor, projections: list[Projection], dys: list[Tensor], dropout: float) -> Any:
    """Outputs, gradient of x, gradients of every A and B."""
    x = x.detach().requires_grad_()
    torch.manual_seed(0)
    outputs = lora_qkv(x, projections, dropout=dropout)
    leaves = [t for p in projections for t in (p.adapter.a, p.adapter.b)]
    return outputs, *torch.autograd.grad(outputs, [x, *leaves], dys)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("widths", [(48,), (48, 80, 16)])
def test_an_adapted_layer_is_within_its_bounds(widths: tuple[int, ...], dropout: float) -> None:
    """Adapters' gradients have the bits that they have without fp8: no frozen product is in them."""
    x = operand(26, 64, 6).reshape(2, 13, 64)
    projections = [layer(64, o, 7 + i, bias=i != 1) for i, o in enumerate(widths)]
    dys = [operand(26, o, 9).reshape(2, 13, o) for o in widths]
    plain = [p._replace(fp8=None) for p in projections]
    outputs, dx, *adapters = run(x, projections, dys, dropout)
    expected, plain_dx, *exact = run(x, plain, dys, dropout)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(adapters, exact, strict=True))
    rows = x.flatten(0, 1)
    share, allowed = 2**-6, torch.zeros(26, 64, dtype=torch.float64)
    for p, y, e, dy in zip(projections, outputs, expected, dys, strict=True):
        assert p.weight is not None
        off = (y.double() - e.double()).abs().flatten(0, 1)
        # The plain product is rounded to bf16 too, as are both sums with the adapter's.
        assert (off <= bound(rows, p.weight) + share * e.double().abs().flatten(0, 1) + 1e-6).all()
        assert not torch.equal(y, e)
        allowed += bound(dy.flatten(0, 1), p.weight.t())
    off = (dx.double() - plain_dx.double()).abs().flatten(0, 1)
    assert (off <= allowed * (1 + 2 * share) + share * plain_dx.double().abs().flatten(0, 1) + 1e-6).all()
    assert not torch.equal(dx, plain_dx)


def test_layers_with_and_without_it_share_an_input() -> None:
    x = operand(9, 32, 10)
    projections = [layer(32, 16, 11, bias=True), layer(32, 48, 12, bias=False)]
    projections[0] = projections[0]._replace(fp8=None)
    dys = [operand(9, 16, 13), operand(9, 48, 14)]
    outputs, dx, *_ = run(x, projections, dys, 0.0)
    (first_run, second), both, *_ = run(x, [p._replace(fp8=None) for p in projections], dys, 0.0)
    assert torch.equal(outputs[0], first_run)
    assert not torch.equal(outputs[1], second)
    assert not torch.equal(dx, both)
    error = (dx.double() - both.double()).norm() / both.double().norm()
    assert 1e-3 < error < 0.06


def test_the_typical_error_is_the_one_that_is_stated() -> None:
    """docs/kernels.md and tolerances.FP8: root mean square, of values as a network has them."""
    generator = torch.Generator().manual_seed(15)
    x, w = (torch.randn(n, 512, generator=generator).to(BF16) for n in (256, 384))
    y = fp8.multiply_fp8(fp8.quantize_rows(x), fp8.quantize_rows(w)).double()
    exact = x.double() @ w.double().t()
    assert 0.03 < (y - exact).norm() / exact.norm() < 0.04
    # e5m2 would be twice as far.
    scale = x.float().abs().amax(1, keepdim=True) / 57344
    coarse = (x / scale).to(torch.float8_e5m2).double() * scale.double()
    fine = fp8.quantize_rows(x)
    ours = (fine.codes.double() * fine.scale.double() - x.double()).norm()
    assert (coarse - x.double()).norm() > 1.9 * ours


def test_what_fits() -> None:
    assert fp8.can_multiply_in_fp8(torch.zeros(32, 48, dtype=BF16))
    assert not fp8.can_multiply_in_fp8(torch.zeros(32, 40, dtype=BF16))
    assert not fp8.can_multiply_in_fp8(torch.zeros(24, 32, dtype=BF16))
    assert not fp8.can_multiply_in_fp8(torch.zeros(32, 32))


def test_it_is_refused_where_products_are_not_in_bf16() -> None:
    p = layer(32, 16, 16, bias=False)
    with pytest.raises(ValueError, match=r"compute dtype bfloat16; got torch\.float32"):
        lora_qkv(torch.randn(4, 32), [p._replace(weight=p.weight.float())])  # type: ignore[union-attr]
    of_another = Quantized(lambda rows: rows, lambda dtype: torch.zeros(1, dtype=dtype))
    with pytest.raises(ValueError, match="fp8 needs an unquantised weight"):
        lora_qkv(torch.randn(4, 32).to(BF16), [p._replace(weight=None, bias=None, quantized=of_another)])


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5)])
def test_a_gpu_without_fp8_is_named(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    reason = fp8.find_unavailable_reason()
    assert reason is not None
    assert f"8.9 or more; A100 has {capability[0]}.{capability[1]}" in reason


def test_a_gpu_is_asked_for_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with none, or a wrong one, gives a reason and not an error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)
    assert fp8.find_unavailable_reason() is None
    product = fp8.multiply_fp8

    def lacking(*_: Any) -> Tensor:
        raise RuntimeError("no rowwise kernel\nin this build")

    for wrong_product in (
        lambda rows, weight, _bias: product(rows, weight),
        lambda *args: 1.3 * product(*args),
    ):
        monkeypatch.setattr(fp8, "multiply_fp8", wrong_product)
        assert "larger than fp8's rounding" in str(fp8.find_unavailable_reason())
    monkeypatch.setattr(fp8, "multiply_fp8", lacking)
    assert str(fp8.find_unavailable_reason()).endswith("with one scale per row: no rowwise kernel")


def test_compiles_without_a_graph_break() -> None:
    projections = [layer(32, 16, 17, bias=True), layer(32, 48, 18, bias=False)]
    x, dys = operand(9, 32, 19), [operand(9, 16, 20), operand(9, 48, 21)]
    expected = run(x, projections, dys, 0.0)
    compiled = torch.compile(lora_qkv, fullgraph=True, backend="aot_eager")
    leaf = x.detach().requires_grad_()
    outputs = compiled(leaf, projections)
    leaves = [leaf, *(t for p in projections for t in (p.adapter.a, p.adapter.b))]
    actual = outputs, *torch.autograd.grad(outputs, leaves, dys)
    torch._dynamo.reset()
    for mine, theirs in zip(actual[0] + actual[1:], expected[0] + expected[1:], strict=True):
        assert torch.equal(mine, theirs)
