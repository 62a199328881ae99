"""Weights in 4 and 8 bits: the product, its gradient, the tensors saved for backward, and the guard's checks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dit_lora.guard.fallbacks import convert_to_fp32
from dit_lora.numerics import quantized_linear
from dit_lora.numerics.finite import describe_nonfinite_tensors
from dit_lora.numerics.quantized_linear import (
    Quantization,
    QuantizedLinear,
    count_quantized_weight_bytes,
    dequantize_weight,
    iterate_weight_values,
)

bnb = pytest.importorskip("bitsandbytes")
KINDS: tuple[Quantization, ...] = ("nf4", "int8", "fp8")
OUT, IN = 33, 70  # no multiple of NF4's blocks of 64


def wide(dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Rows of sizes from 1e-3 to 1e2, and one of zeros; frozen."""
    torch.manual_seed(0)
    layer = nn.Linear(IN, OUT)
    with torch.no_grad():
        layer.weight.normal_().mul_(torch.logspace(-3, 2, OUT)[:, None])
        layer.weight[5] = 0
    return layer.to(dtype).requires_grad_(False)


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 7, IN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_and_its_gradient_are_those_of_the_widened_weight(kind: Quantization, dtype: torch.dtype) -> None:
    layer = QuantizedLinear(wide(dtype), kind)
    assert layer.bias is not None
    layer_input, reference_input = (inputs(dtype).requires_grad_() for _ in range(2))
    y = layer(layer_input)
    expected = nn.functional.linear(reference_input, layer.dequantize(dtype), layer.bias)
    grad_output = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    y.backward(grad_output)
    expected.backward(grad_output)
    assert (y.dtype, y.grad_fn is None) == (dtype, False)
    assert torch.equal(y, expected)
    assert torch.equal(layer_input.grad, reference_input.grad)


# nf4's worst row: one of the largest shares its block with one 1.4 times smaller.
@pytest.mark.parametrize(("kind", "least", "most"), [("nf4", 0.05, 0.15), ("int8", 3e-3, 0.011)])
def test_every_row_is_kept_as_well_as_its_scale_allows(kind: Quantization, least: float, most: float) -> None:
    layer = wide()
    difference = QuantizedLinear(layer, kind).dequantize(torch.float32) - layer.weight
    errors = difference.norm(dim=1) / layer.weight.norm(dim=1)
    assert torch.equal(difference[5], torch.zeros(IN))
    of_rows = torch.cat([errors[:5], errors[6:]])
    assert of_rows.median() > least
    assert of_rows.max() < most


def test_fp8_rounds_each_weight_to_three_bits_of_mantissa() -> None:
    layer = wide()
    error = (QuantizedLinear(layer, "fp8").dequantize(torch.float32) - layer.weight).abs()
    largest = layer.weight.abs().amax(dim=1, keepdim=True)
    # Half a step of 2^-3; where e4m3 is subnormal, of 2^-9 of its 448.
    limit = torch.maximum(layer.weight.abs() / 16, largest / 448 * 2**-10) * 1.001
    assert (error <= limit).all()
    assert error.max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_wide_is_saved_for_the_backward_pass(kind: Quantization) -> None:
    layer, saved_tensors = QuantizedLinear(wide(), kind), list[Tensor]()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved_tensors.append(t) or t, lambda t: t)
    with hooks:
        layer(inputs().requires_grad_())
    assert saved_tensors
    assert {t.data_ptr() for t in saved_tensors} <= {p.data_ptr() for p in layer.parameters()}
    assert sum(t.nbytes for t in saved_tensors) == count_quantized_weight_bytes(torch.Size([OUT, IN]), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_decides_the_dtype(kind: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the widened weight too, which would take twice the memory in fp32."""
    layer, x, dtypes = QuantizedLinear(wide(), kind), inputs().requires_grad_(), set[torch.dtype]()

    def noted(codes: Tensor, scale: Tensor, dtype: torch.dtype, *how: Any) -> Tensor:
        dtypes.add(dtype)
        return dequantize_weight(codes, scale, dtype, *how)

    monkeypatch.setattr(quantized_linear, "dequantize_weight", noted)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    assert dtypes == {torch.bfloat16}


def test_nf4_is_that_of_bitsandbytes() -> None:
    layer = wide()
    bnb_layer = bnb.nn.Linear4bit(IN, OUT, compute_dtype=torch.float32, compress_statistics=False, quant_type="nf4")
    bnb_layer.load_state_dict(layer.state_dict())
    bnb_layer.to("cpu")
    quantized_layer = QuantizedLinear(layer, "nf4")
    assert torch.equal(quantized_layer.weight, bnb_layer.weight)
    assert torch.equal(quantized_layer.scale, bnb_layer.weight.quant_state.absmax)
    torch.testing.assert_close(quantized_layer(inputs()), bnb_layer(inputs()))


@pytest.mark.parametrize(("kind", "name"), [("nf4", "scale"), ("int8", "scale"), ("fp8", "weight")])
def test_what_is_not_finite_is_found(kind: Quantization, name: str) -> None:
    """In fp8 also among the codes: 0x7f is NaN."""
    model = nn.ModuleDict({"q": QuantizedLinear(wide(), kind)})
    assert describe_nonfinite_tensors(iterate_weight_values(model)) == []
    bad = 0x7F if name == "weight" else torch.nan
    model.get_parameter(f"q.{name}").data.view(-1)[3] = bad
    (message,) = describe_nonfinite_tensors(iterate_weight_values(model))
    assert message.startswith(f"q.{name} has 1 NaN among ")


def bitsandbytes_layer(kind: str) -> Any:
    if kind == "int8":
        layer = bnb.nn.Linear8bitLt(IN, OUT, has_fp16_weights=False)
    else:
        layer = bnb.nn.Linear4bit(IN, OUT, compute_dtype=torch.bfloat16, compress_statistics=kind == "double")
    layer.load_state_dict(wide().state_dict())
    return layer.to("cpu")


def test_the_scales_of_bitsandbytes_layers_are_found_too() -> None:
    """bitsandbytes keeps scales next to the parameters; int8 scales move at the first call."""
    nf4_layer, double_quantized, int8_layer = (bitsandbytes_layer(kind) for kind in ("single", "double", "int8"))
    nf4_layer.weight.quant_state.absmax[2] = torch.nan
    double_quantized.weight.quant_state.state2.absmax[0] = torch.inf
    int8_layer(inputs())
    int8_layer.state.SCB[1] = torch.nan
    second_int8_layer = bitsandbytes_layer("int8")
    second_int8_layer.weight.SCB[1] = torch.nan
    model = nn.ModuleList([nf4_layer, double_quantized, int8_layer, second_int8_layer])
    names = [message.partition(" has ")[0] for message in describe_nonfinite_tensors(iterate_weight_values(model))]
    assert names == ["0.absmax", "1.absmax_absmax", "2.SCB", "3.SCB"]


def test_in_fp32_a_layer_of_bitsandbytes_rounds_nothing_to_its_own_dtype() -> None:
    layer = bitsandbytes_layer("single")
    x = inputs()
    rounded = layer(x)
    with convert_to_fp32(layer):
        exact = layer(x)
        assert layer.compute_dtype is torch.float32
    assert layer.compute_dtype is torch.bfloat16
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(rounded, rounded.bfloat16().float())
