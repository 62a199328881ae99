"""silu_dwconv_glu against stock lines and fp64: edges, odd sizes, strides, gradients of the filters or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import (
    assert_as_good_as_eager,
    in_nan_arena,
    poisoned_memory,
    relative_error,
    saved_bytes,
)
from torch import Tensor

import dit_lora_kernels.silu_dwconv_glu as module
from dit_lora_kernels.silu_dwconv_glu import (
    launch_filter,
    silu_dwconv_glu,
    silu_dwconv_glu_backward,
    silu_dwconv_glu_forward,
    silu_dwconv_glu_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
Operands = tuple[Tensor, Tensor, Tensor | None]

# (B, H, W, C): several blocks of columns, of rows, of channels; a single row, column or pixel.
SHAPES = {
    "odd": (2, 3, 7, 3),
    "two blocks of rows and of columns": (1, 17, 9, 2),
    "two blocks of channels": (1, 1, 2, 130),
    "one row": (3, 1, 5, 8),
    "one column": (2, 3, 1, 8),
    "one pixel": (1, 1, 1, 1),
}


def operands(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    biased: bool = True,
    seed: int = 0,
) -> Operands:
    """h, weight and bias that all want a gradient; the samples differ in scale."""
    B, H, W, C = shape
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    h = random(B, H, W, 2 * C) * torch.arange(1, B + 1)[:, None, None, None]
    weight, bias = random(2 * C, 1, 3, 3) * 0.4, random(2 * C)
    h, weight, bias = (t.to(dtype).to(DEVICE).detach().requires_grad_() for t in (h, weight, bias))
    return h, weight, bias if biased else None


def eager(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x = F.silu(h.permute(0, 3, 1, 2))
    a, g = F.conv2d(x, weight, bias, padding=1, groups=len(weight)).chunk(2, dim=1)
    return (a * F.silu(g)).permute(0, 2, 3, 1)


def wide(of: Operands) -> Operands:
    h, weight, bias = (None if t is None else t.detach().double().requires_grad_() for t in of)
    assert h is not None
    assert weight is not None
    return h, weight, bias


def run(function: Callable[..., Tensor], of: Operands, upstream: Tensor | None = None) -> list[Tensor]:
    """The output and every operand's gradient."""
    output = function(*of)
    if upstream is None:
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(output.shape, generator=generator).to(output)
    trained = [t for t in of if t is not None and t.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, trained, upstream.to(output.dtype))]


def check(of: Operands, upstream: Tensor | None = None) -> None:
    names = ("out", "dh", "dweight", "dbias")
    ours, theirs = run(silu_dwconv_glu, of, upstream), run(eager, of, upstream)
    exact = run(eager, wide(of), upstream)
    for name, our, their, true in zip(names, ours, theirs, exact, strict=False):
        assert our.dtype is of[0].dtype
        assert_as_good_as_eager(name, our, their, true)


def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "launches", lambda tensor: False)


# In fp16 kernels run the same lines; hard values of fp16 have tests of their own.
@pytest.mark.parametrize("dtype", [*FLOATS[:2], pytest.param(torch.float16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check(operands(shape, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_without_the_kernel(
    shape: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernel(monkeypatch)
    check(operands(shape, dtype))


def test_without_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = operands((2, 3, 3, 4), biased=False)
    check(inputs)
    without_kernel(monkeypatch)
    check(inputs)


def test_the_reference_is_differentiable() -> None:
    inputs = operands((2, 3, 2, 3), torch.float64)
    for ours, exact in zip(run(silu_dwconv_glu_reference, inputs), run(eager, inputs), strict=True):
        assert relative_error(ours, exact) < 1e-13


def test_a_sum_over_more_pixels_than_a_program_takes() -> None:
    """450 of them in two samples; a program takes 256. NaN after them."""
    h, _, _ = operands((2, 5, 45, 1))
    dc = torch.full((3, 5, 45, 2), float("nan"), device=DEVICE)[:2].normal_()
    sums = launch_filter(dc, h.detach(), 0, 10)
    s = F.pad(F.silu(h.detach()), (0, 0, 1, 1, 1, 1))
    for tap in range(9):
        expected = (dc * s[:, tap // 3 :, tap % 3 :][:, :5, :45]).sum((0, 1, 2))
        torch.testing.assert_close(sums[tap], expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sums[9], dc.sum((0, 1, 2)), rtol=1e-5, atol=1e-4)


def test_gradcheck() -> None:
    h, weight, bias = operands((1, 2, 2, 1), torch.float64)
    assert bias is not None
    assert torch.autograd.gradcheck(silu_dwconv_glu, (h, weight, bias), fast_mode=True)


def test_operands_may_differ_in_dtype() -> None:
    h, weight, bias = operands((1, 2, 3, 4))
    assert bias is not None
    low = h.detach().bfloat16().requires_grad_()
    inputs = (low, weight, bias.detach().double().requires_grad_())
    ours, exact = run(silu_dwconv_glu, inputs), run(eager, wide(inputs))
    assert [t.dtype for t in ours] == [low.dtype, low.dtype, weight.dtype, torch.float64]
    for our, true in zip(ours, exact, strict=True):
        assert relative_error(our, true) < 2e-2


WANTED = [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("wanted", WANTED)
def test_only_wanted_gradients_are_computed(
    wanted: tuple[bool, ...], kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = operands((2, 2, 3, 3))
    expected_grads = run(silu_dwconv_glu, inputs)[1:]
    partial_inputs = [
        t.detach().requires_grad_(needs_grad) for t, needs_grad in zip(inputs, wanted, strict=True) if t is not None
    ]
    if not kernel:
        without_kernel(monkeypatch)
    for name, needed in (("launch_input", wanted[0]), ("launch_filter", any(wanted[1:]))):
        if not needed:
            monkeypatch.setattr(module, name, None)
    actual = run(silu_dwconv_glu, (partial_inputs[0], partial_inputs[1], partial_inputs[2]))[1:]
    expected = [grad for grad, needs_grad in zip(expected_grads, wanted, strict=True) if needs_grad]
    for grad, expected_value in zip(actual, expected, strict=True):
        torch.testing.assert_close(grad, expected_value, rtol=1e-5, atol=1e-5)


def test_everything_is_written_and_nothing_beyond_the_edges_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h, weight, bias = operands((2, 3, 3, 5))
    plain = run(silu_dwconv_glu, (h, weight, bias))
    dout = torch.randn(plain[0].shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with poisoned_memory(monkeypatch):
        actual = run(silu_dwconv_glu, (in_nan_arena(h), weight, bias), in_nan_arena(dout))
    for ours, expected_value in zip(actual, plain, strict=True):
        assert torch.equal(ours, expected_value)


def test_strides() -> None:
    """A view of wider channels, (B, 2C, H, W) permuted, and gradients that are expanded, permuted, or a slice."""
    h, weight, bias = operands((2, 3, 2, 4))
    plain = silu_dwconv_glu(h, weight, bias)
    wider = torch.cat([h, h], dim=-1).detach()[..., 8:]
    permuted = h.detach().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    gradients = (
        torch.ones((), device=DEVICE).expand(plain.shape),
        torch.randn(4, device=DEVICE).expand(plain.shape),
        torch.randn(2, 4, 3, 2, device=DEVICE).permute(0, 2, 3, 1),
        torch.randn(2, 3, 2, 9, device=DEVICE)[..., 2:6],
    )
    for view, gradient in zip((wider, permuted, wider, permuted), gradients, strict=True):
        inputs = (view.requires_grad_(), weight, bias)
        expected = run(silu_dwconv_glu, (h, weight, bias), gradient.contiguous())
        for ours, expected_value in zip(run(silu_dwconv_glu, inputs, gradient), expected, strict=True):
            assert torch.equal(ours, expected_value)


@pytest.mark.parametrize("kernel", [True, False])
def test_hard_values(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of four kinds: far from zero, tiny, zero, and far below zero, where SiLU vanishes."""
    if not kernel:
        without_kernel(monkeypatch)
    h, weight, bias = operands((4, 2, 2, 3))
    with torch.no_grad():
        h[0] = 100 + h[0]
        h[1] *= 1e-20
        h[2] = 0
        h[3] = -1e4
    check((h, weight, bias))
    nothing = torch.zeros_like(h, requires_grad=True)
    zeros = run(silu_dwconv_glu, (nothing, weight, torch.zeros_like(weight[:, 0, 0, 0])))[0]
    assert torch.equal(zeros, torch.zeros_like(zeros))


def test_half_precision_near_its_end() -> None:
    """1e4 in fp16: the products pass 65504 inside, and only the result need fit."""
    h, weight, bias = operands((1, 2, 2, 2), torch.float16)
    assert bias is not None
    with torch.no_grad():
        h.fill_(1e4)
        weight.fill_(1.0)
        weight[2:] = -1.0  # gates far below zero
        bias.zero_()
    output = silu_dwconv_glu(h, weight, bias)
    assert torch.equal(output, torch.zeros_like(output))
    with torch.no_grad():
        weight[2:] = 0
        weight[:2] = 0.1
        bias[2:] = 3.0
    check((h, weight, bias), torch.full((1, 2, 2, 2), 1e-4, device=DEVICE))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_pixel_stays_among_its_neighbours(bad: float) -> None:
    inputs = operands((2, 4, 5, 3))
    plain = run(silu_dwconv_glu, inputs)[:2]
    h = inputs[0].detach().clone()
    h[1, 3, 4, 2] = bad
    actual = run(silu_dwconv_glu, (h.requires_grad_(), *inputs[1:]))[:2]
    reach = torch.zeros(2, 4, 5, 6, dtype=torch.bool, device=DEVICE)
    reach[1, 2:, 3:, 2] = True
    assert torch.equal(~torch.isfinite(actual[0]), reach[..., :3])
    assert torch.equal(actual[0][~reach[..., :3]], plain[0][~reach[..., :3]])
    reach[1, 1:, 2:, 2::3] = True
    assert torch.equal(actual[1][~reach], plain[1][~reach])


def test_repeats_bit_for_bit() -> None:
    inputs = operands((2, 3, 4, 3), torch.bfloat16)
    for first_value, second in zip(run(silu_dwconv_glu, inputs), run(silu_dwconv_glu, inputs), strict=True):
        assert torch.equal(first_value, second)


def test_offsets_beyond_two_to_the_31() -> None:
    """Samples 1.2e9 elements apart; an offset that wrapped would land in the NaN before them."""
    stride, before = 1_200_000_000, 2**32 - 2_400_000_000
    arena = torch.empty(before + 2 * stride + 64, dtype=torch.float16, device=DEVICE)
    arena[:64] = float("nan")
    h, weight, bias = operands((3, 1, 2, 2), torch.float16)
    apart = arena[before:].as_strided(h.shape, (stride, 8, 4, 1))
    apart.copy_(h.detach())
    expected = run(silu_dwconv_glu, (h, weight, bias))
    for ours, expected_value in zip(
        run(silu_dwconv_glu, (apart.requires_grad_(), weight, bias)), expected, strict=True
    ):
        assert torch.equal(ours, expected_value)


@pytest.mark.parametrize("kernel", [True, False])
def test_autocast_changes_nothing(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        without_kernel(monkeypatch)
    inputs = operands((1, 2, 3, 4))
    plain = run(silu_dwconv_glu, inputs)
    with torch.autocast(DEVICE, torch.bfloat16):
        cast = run(silu_dwconv_glu, inputs)
    for ours, expected_value in zip(cast, plain, strict=True):
        assert torch.equal(ours, expected_value)


@pytest.mark.parametrize("kernel", [True, False])
def test_opcheck(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        without_kernel(monkeypatch)
    h, weight, bias = operands((1, 2, 3, 2))
    permuted = h.detach().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    torch.library.opcheck(silu_dwconv_glu_forward.library, (h, weight, bias))
    torch.library.opcheck(silu_dwconv_glu_forward.library, (permuted.requires_grad_(), weight, None))
    operator_args = (
        torch.randn(1, 2, 3, 2, device=DEVICE),
        permuted.detach(),
        weight.detach(),
        None,
    )
    for needs_grad in ([True, True, False], [True, False, False]):
        torch.library.opcheck(silu_dwconv_glu_backward.library, (*operator_args, needs_grad))


def test_only_h_is_saved() -> None:
    h, weight, bias = operands((2, 3, 4, 8), torch.bfloat16)
    assert bias is not None
    ours = saved_bytes(lambda: silu_dwconv_glu(h, weight, bias), besides=[weight, bias])
    assert ours == 2 * 3 * 4 * 16 * 2
    theirs = saved_bytes(lambda: eager(h, weight, bias), besides=[weight, bias])
    assert theirs == 7 * 2 * 3 * 4 * 8 * 2


def test_compiles_without_a_graph_break() -> None:
    inputs = operands((1, 2, 3, 2))
    compiled: Any = torch.compile(silu_dwconv_glu, fullgraph=True, backend="aot_eager")
    for ours, expected_value in zip(run(compiled, inputs), run(silu_dwconv_glu, inputs), strict=True):
        assert torch.equal(ours, expected_value)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_do(shape: tuple[int, int, int, int], kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        without_kernel(monkeypatch)
    h, weight, bias = operands(shape)
    output, dh, dweight, dbias = run(silu_dwconv_glu, (h, weight, bias))
    assert output.shape == shape
    assert dh.shape == h.shape
    for grad, tensor in ((dweight, weight), (dbias, bias)):
        assert tensor is not None
        assert torch.equal(grad, torch.zeros_like(tensor))


@pytest.mark.parametrize(
    ("h", "weight", "bias", "message"),
    [
        ((2, 3, 8), (8, 1, 3, 3), None, r"h must be \(B, H, W, 2C\), .* got \(2, 3, 8\)"),
        ((1, 2, 3, 7), (7, 1, 3, 3), None, r"h must be .* got \(1, 2, 3, 7\)"),
        (
            (1, 2, 3, 8),
            (4, 1, 3, 3),
            None,
            r"weight must be \(8, 1, 3, 3\) .* got \(4, 1, 3, 3\)",
        ),
        ((1, 2, 3, 8), (8, 1, 5, 5), None, r"weight must be .* got \(8, 1, 5, 5\)"),
        ((1, 2, 3, 8), (8, 1, 3, 3), (4,), r"bias must be \(8,\) .* got \(4,\)"),
    ],
)
def test_refused_shapes(
    h: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None, message: str
) -> None:
    sizes = (h, weight, bias)
    with pytest.raises(ValueError, match=message):
        silu_dwconv_glu(*(None if size is None else torch.zeros(size) for size in sizes))  # type: ignore[arg-type]


@pytest.mark.thorough
def test_compiled_for_sm90(sm90: Callable[[str], list[dict[str, Any]]]) -> None:
    """No spills; whole 128-byte lines forward, 4 bytes a thread in bf16, 8 in fp32; 16 bytes a thread for dh."""
    cases = sm90("silu_dwconv_glu")
    assert len(cases) == 8
    for case in cases:
        assert case["spills"] == 0, case
        if case["kernel"] == "_convolution_kernel":
            assert case["blocks"] >= 2, case
            assert min(case["loads"] + case["stores"]) == (8 if "fp32" in case["case"] else 4), case
        elif case["kernel"] == "_input_gradient_kernel":
            assert min(case["stores"]) == 16, case
        # Rows to come are on their way while one is computed.
        assert case["in_flight"] >= 64, case
