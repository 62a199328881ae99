"""What lora_linear takes: masters and their casts, quantized bases; and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_checks import saved_bytes
from lora_checks import DEVICE, compare, eager, projection, qkv, randn
from torch import Tensor
from torch.nn.functional import linear

from dit_lora_kernels.lora_linear import (
    Adapter,
    Projection,
    Quantized,
    cast_all_lora_factors,
    cast_lora_factors,
    compute_dtype,
    lora_linear,
    lora_qkv,
)

LOW = [torch.bfloat16, torch.float16]


def test_lowered_copies_are_used_and_get_no_gradient() -> None:
    """Given once, they are used in place of the masters, which get the gradients."""
    x, p = randn(6, 24, dtype=torch.bfloat16), qkv(24, torch.bfloat16)[0]
    a, b, scaling, _ = p.adapter
    lowered = cast_lora_factors(a, b, scaling, torch.bfloat16)
    assert [t.dtype for t in lowered] == [torch.bfloat16] * 2
    assert torch.equal(lowered[1], (b * scaling).bfloat16())
    plain = lora_linear(x, *p[:3])
    zero_adapter = Adapter(a.detach() * 0, b.detach() * 0, scaling, lowered)
    assert torch.equal(lora_linear(x, p.weight, p.bias, zero_adapter), plain)
    y = lora_linear(x, p.weight, p.bias, p.adapter._replace(lowered=lowered))
    y.sum().backward()
    assert a.grad is not None
    assert lowered[0].grad is None
    factors = torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(5, 3, dtype=torch.bfloat16)
    lowered_factors = cast_lora_factors(*factors, 1.0, torch.bfloat16)
    assert [t.data_ptr() for t in lowered_factors] == [t.data_ptr() for t in factors]  # nothing to cast, no copy


def test_masters_of_any_dtype_get_gradients_of_theirs() -> None:
    p = qkv(24, torch.bfloat16)[1]
    x = randn(6, 24, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        a, b = (t.detach().to(dtype).requires_grad_() for t in p.adapter[:2])
        lora_linear(x, p.weight, p.bias, Adapter(a, b, 0.3)).sum().backward()
        assert (a.grad.dtype, b.grad.dtype) == (dtype, dtype)
        assert a.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_quantized_base(dtype: torch.dtype) -> None:
    """Its product is its library's; its weight is built only for the backward pass and not kept."""
    exact = projection(64, 32, 4, 2.0, torch.float64)
    codes = (exact.weight * 100).round().to(torch.int8)
    calls = []

    def dequantize(to: torch.dtype) -> Tensor:
        calls.append(to)
        return codes.to(to) / 100

    def product(rows: Tensor) -> Tensor:
        calls.append("product")
        return linear(rows, codes.to(rows.dtype) / 100, exact.bias.to(rows.dtype))

    a, b = (t.detach().float().requires_grad_() for t in exact.adapter[:2])
    mine = Projection(None, None, Adapter(a, b, 2.0), Quantized(product, dequantize))
    stock = Projection((codes / 100).to(dtype), exact.bias.to(dtype), mine.adapter)
    x = randn(3, 7, 64, dtype=dtype).requires_grad_()
    with torch.autocast(DEVICE, dtype):
        ours = lora_linear(x, None, None, mine.adapter, quantized=mine.quantized)
        compare(x, [stock], [ours], [eager(x, stock)])
        assert calls == ["product", dtype]
        num_bytes = saved_bytes(lambda: lora_qkv(x, [mine]))
    assert num_bytes == 2 * (21 * 64 + 21 * 4 + 4 * 64 + 32 * 4)
    x.requires_grad_(False)
    assert compute_dtype(x, None) is dtype
    calls.clear()
    lora_qkv(x, [mine])[0].sum().backward()
    assert calls == ["product"]  # no dx, no weight


def _case(**changes: Any) -> Callable[[], object]:
    p = projection(24, 40, 4, 1.0, torch.float32)
    adapter = p.adapter._replace(**{k: changes.pop(k) for k in list(changes) if k in ("a", "b", "lowered")})
    p = p._replace(adapter=adapter, **{k: changes.pop(k) for k in list(changes) if k in p._fields})
    x = changes.pop("x", randn(2, 24, dtype=torch.float32))
    return lambda: lora_qkv(x, [p, *changes.pop("more", [])], **changes)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (_case(dropout=1.0), r"at least 0 and below 1; got 1.0"),
        (_case(dropout=-0.1), "got -0.1"),
        (_case(a=torch.ones(4, 23)), r"a must be \(R, 24\) and b \(O, R\); got \(4, 23\)"),
        (_case(a=torch.ones(5, 24)), r"got \(5, 24\) and \(40, 4\)"),
        (_case(b=torch.ones(4)), r"got \(4, 24\) and \(4,\)"),
        (_case(x=torch.ones(2, 25)), r"a must be \(R, 25\)"),
        (_case(weight=torch.ones(24, 40)), r"the shape \(40, 24\); got \(24, 40\)"),
        (_case(bias=torch.ones(24)), r"the shape \(40,\); got \(24,\)"),
        (_case(weight=torch.ones(40, 24, requires_grad=True)), "base must be frozen"),
        (_case(bias=torch.ones(40, requires_grad=True)), "base must be frozen"),
        (_case(weight=None), "or only `quantized`"),
        (_case(weight=None, bias=None), "or only `quantized`"),
        (_case(quantized=Quantized(torch.abs, torch.ones)), "or only `quantized`"),
        (_case(lowered=(torch.ones(4, 24), torch.ones(40, 4).half())), "lowered a and b must be"),
        (_case(weight=torch.ones(40, 24, dtype=torch.int8)), "compute dtype must be one of"),
        (
            _case(more=[projection(24, 40, 4, 1.0, torch.bfloat16)]),
            "the same dtype; got torch.float32 and torch.bfloat16",
        ),
    ],
)
def test_what_does_not_fit_is_refused(case: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        case()


def test_a_second_derivative_is_refused() -> None:
    """Rather than wrong: the products are saved without their history."""
    x, p = randn(3, 24).requires_grad_(), projection(24, 8, 2, 1.0, torch.float64)
    (dx,) = torch.autograd.grad(lora_linear(x, *p[:3]).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("scalings", [(1.0, 1.0), (0.3, 1.0)])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_adapters_lowered_together_are_the_bits_of_each(
    dtype: torch.dtype, own: torch.dtype, scalings: tuple[float, float]
) -> None:
    torch.manual_seed(3)
    adapters = [
        (torch.randn(r, 5).to(own).requires_grad_(), torch.randn(r, 7).t().to(own), scaling)
        for r, scaling in zip((3, 4), scalings, strict=True)
    ]
    for lowered, adapter in zip(cast_all_lora_factors(adapters, dtype), adapters, strict=True):
        for ours, expected in zip(lowered, cast_lora_factors(*adapter, dtype), strict=True):
            assert ours.dtype is dtype
            assert not ours.requires_grad
            assert ours.stride() == expected.stride()
            assert torch.equal(ours, expected)
