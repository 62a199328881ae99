"""lora_linear and lora_qkv against fp64 and against the lines of PEFT's own layer."""

import pytest
import torch
from kernel_checks import assert_as_good_as_eager, saved_bytes
from lora_checks import DEVICE, Products, compare, eager, gradients, in_fp64, projection, qkv, randn
from torch import Tensor
from torch.nn.functional import dropout as torch_dropout
from torch.nn.functional import linear

from dit_lora_kernels.lora_linear import (
    Adapter,
    cast_lora_factors,
    compute_dtype,
    lora_linear,
    lora_qkv,
)

LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("shape", [(1, 7, 72), (2, 33, 64), (3, 5, 112), (9, 24), (40,)], ids=str)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As good as PEFT's under autocast, which is how half-precision models are trained."""
    x = randn(*shape, dtype=dtype).requires_grad_()
    p = projection(shape[-1], 56, 6, 0.7, dtype)
    with torch.autocast(DEVICE, dtype, enabled=dtype in LOW):
        ours = lora_linear(x, p.weight, p.bias, p.adapter)
        theirs = eager(x, p)
    compare(x, [p], [ours], [theirs])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW], ids=str)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_projections_of_one_input(batch: int, dtype: torch.dtype) -> None:
    x = randn(batch, 11, 72, dtype=dtype).requires_grad_()
    projections = qkv(72, dtype)
    with torch.autocast(DEVICE, dtype, enabled=dtype in LOW):
        ours = lora_qkv(x, projections)
        theirs = [eager(x, p) for p in projections]
    compare(x, projections, ours, theirs)
    separate = [lora_linear(x, *p[:3]) for p in projections]
    for mine, single in zip(ours, separate, strict=True):
        torch.testing.assert_close(mine, single)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradcheck(dropout: float) -> None:
    x = randn(2, 3, 7).requires_grad_()
    projections = [
        projection(7, output, rank, scaling, torch.float64, seed=output)
        for output, rank, scaling in ((5, 3, 0.5), (4, 2, 2.0), (6, 3, 1.0))
    ]

    def op(x: Tensor, *matrices: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        inputs = [
            p._replace(adapter=Adapter(a, b, p.adapter.scaling))
            for p, a, b in zip(projections, matrices[::2], matrices[1::2], strict=True)
        ]
        return lora_qkv(x, inputs, dropout=dropout)

    assert torch.autograd.gradcheck(op, (x, *(t for p in projections for t in p.adapter[:2])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_draws_what_peft_draws(dtype: torch.dtype) -> None:
    """q's mask, then k's, then v's, from torch's generator; which is left where PEFT leaves it."""
    x = randn(2, 9, 72, dtype=dtype).requires_grad_()
    projections = qkv(72, dtype)
    for p in projections:  # masks depend on the dtype on a GPU: in PEFT that of A
        p.adapter.a.data, p.adapter.b.data = p.adapter.a.to(dtype), p.adapter.b.to(dtype)
    torch.manual_seed(5)
    ours = lora_qkv(x, projections, dropout=0.4)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    theirs = [eager(x, p, 0.4) for p in projections]
    assert torch.equal(state, torch.get_rng_state())

    torch.manual_seed(5)
    masks = [torch_dropout(torch.ones_like(x), 0.4) for _ in projections]
    exact_x, exact = x.detach().double().requires_grad_(), in_fp64(projections)
    outputs = [
        linear(exact_x, p.weight, p.bias)
        + linear(linear(exact_x * (mask != 0) / 0.6, p.adapter.a), p.adapter.b) * p.adapter.scaling
        for p, mask in zip(exact, masks, strict=True)
    ]
    for y, stock, true in zip(ours, theirs, outputs, strict=True):
        assert_as_good_as_eager("y", y, stock, true)
    grads = (gradients(y, x, projections) for y in (ours, theirs))
    for mine, stock, true in zip(*grads, gradients(outputs, exact_x, exact), strict=True):
        assert_as_good_as_eager("gradient", mine, stock, true)


def test_dropout_leaves_the_base_alone_and_scales_what_it_keeps() -> None:
    x, p = torch.ones(400, 64, device=DEVICE), projection(64, 8, 4, 1.0, torch.float32)
    ours = lora_linear(x, p.weight, p.bias, p.adapter, dropout=0.5)
    base = linear(x, p.weight, p.bias)
    torch.testing.assert_close((ours - base).mean(0), (eager(x, p) - base)[0], atol=0.1, rtol=0.1)
    assert (ours[0] - ours[1]).abs().max() > 0.01  # rows have masks of their own


def test_masks_are_replayed_from_the_generator() -> None:
    """Which is what gradient checkpointing does."""
    from torch.utils.checkpoint import checkpoint

    x, p = randn(5, 24, dtype=torch.float32).requires_grad_(), qkv(24, torch.float32)[0]

    def op(x: Tensor) -> Tensor:
        return lora_linear(x, p.weight, p.bias, p.adapter, dropout=0.5)

    torch.manual_seed(1)
    expected = gradients([op(x)], x, [p])
    torch.manual_seed(1)
    recomputed = gradients([checkpoint(op, x, use_reentrant=False)], x, [p])
    assert all(torch.equal(a, b) for a, b in zip(expected, recomputed, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_strided_inputs_and_gradients(dropout: float) -> None:
    """A slice of a joint sequence, a permuted one, an expanded one; gradients expanded, sliced, permuted."""
    p = projection(24, 40, 4, 0.5, torch.float32)

    def op(x: Tensor) -> Tensor:
        torch.manual_seed(2)
        return lora_linear(x, p.weight, p.bias, p.adapter, dropout=dropout)

    def both(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = op(x)
        return y, *torch.autograd.grad(y, [x, *p.adapter[:2]], dy)

    inputs = [
        randn(3, 8, 24, dtype=torch.float32)[:, 2:],
        randn(3, 24, 6, dtype=torch.float32).transpose(1, 2),
        randn(3, 1, 24, dtype=torch.float32).expand(3, 6, 24),
        randn(3, 6, 48, dtype=torch.float32)[..., ::2],
    ]
    outer = [
        randn(1, dtype=torch.float32).expand(3, 6, 40),
        randn(1, 6, 1, dtype=torch.float32).expand(3, 6, 40),
        randn(3, 6, 60, dtype=torch.float32)[..., 20:],
        randn(3, 40, 6, dtype=torch.float32).transpose(1, 2),
    ]
    for x, dy in zip(inputs, outer, strict=True):
        plain = both(x.contiguous(), dy.contiguous())
        for strided, contiguous in zip(both(x, dy), plain, strict=True):
            torch.testing.assert_close(strided, contiguous)


@pytest.mark.parametrize("shape", [(0, 24), (0, 5, 24), (3, 0, 24)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_no_rows(shape: tuple[int, ...], dropout: float) -> None:
    x, projections = randn(*shape, dtype=torch.bfloat16).requires_grad_(), qkv(24, torch.bfloat16)
    outputs = lora_qkv(x, projections, dropout=dropout)
    assert [y.shape for y in outputs] == [(*shape[:-1], num_outputs) for num_outputs in (24, 40, 24)]
    dx, *other_grads = gradients(outputs, x, projections)
    assert dx.shape == shape
    assert all(torch.count_nonzero(g) == 0 and g.dtype is torch.float32 for g in other_grads)


def test_b_starts_at_zero() -> None:
    """The output is the base's, to the bit; A gets no gradient and B gets one."""
    x, p = randn(9, 72, dtype=torch.bfloat16).requires_grad_(), qkv(72, torch.bfloat16)[0]
    p.adapter.b.data.zero_()
    y = lora_linear(x, p.weight, p.bias, p.adapter)
    assert torch.equal(y, linear(x, p.weight, p.bias))
    _, d_a, d_b = gradients([y], x, [p])
    assert torch.count_nonzero(d_a) == 0
    assert torch.count_nonzero(d_b) == d_b.numel()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_stays_in_its_row(bad: float) -> None:
    projections = qkv(24, torch.bfloat16)
    x = randn(5, 24, dtype=torch.bfloat16)
    clean = lora_qkv(x, projections)
    x[2, 3] = bad
    x.requires_grad_()
    outputs = lora_qkv(x, projections)
    rows = torch.arange(5) != 2
    for y, before in zip(outputs, clean, strict=True):
        assert torch.equal(y[rows], before[rows])
        assert not torch.isfinite(y[2]).any()
    grads = [torch.ones_like(y) for y in outputs]
    grads[1][4, 0] = bad
    (dx,) = torch.autograd.grad(outputs, x, grads)
    assert torch.isfinite(dx[:4]).all()
    assert not torch.isfinite(dx[4]).any()


def test_hard_values_stay_finite() -> None:
    """1e4 in fp16 with a small adapter, next to rows of zeros, where PEFT's own path is finite too."""
    p = projection(64, 32, 4, 16.0, torch.float16)
    p.weight.mul_(0.1)
    p.adapter.a.data.mul_(0.1)
    x = torch.full((4, 64), 1e4, device=DEVICE, dtype=torch.float16)
    x[1:] = 0
    x.requires_grad_()
    with torch.autocast(DEVICE, torch.float16):
        compare(x, [p], [lora_linear(x, p.weight, p.bias, p.adapter)], [eager(x, p)])


def test_repeatable() -> None:
    x, projections = randn(70, 72, dtype=torch.bfloat16).requires_grad_(), qkv(72, torch.bfloat16)
    first_grads, second = (
        [*(outputs := lora_qkv(x, projections)), *gradients(outputs, x, projections)] for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first_grads, second, strict=True))


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_autocast_changes_nothing_where_the_base_is_bf16(given: torch.dtype, dropout: float) -> None:
    """Forward, backward, or both under it: x in bf16, or in fp32 as a norm under autocast leaves it."""
    x, projections = randn(6, 72, dtype=given).requires_grad_(), qkv(72, torch.bfloat16)
    runs = []
    for forward, backward in ((False, False), (True, False), (True, True), (False, True)):
        torch.manual_seed(4)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=forward):
            outputs = lora_qkv(x, projections, dropout=dropout)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=backward):
            runs.append([*outputs, *gradients(outputs, x, projections)])
    for repeated in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], repeated, strict=True))
    assert {y.dtype for y in runs[0][:3]} == {torch.bfloat16}
    assert runs[0][3].dtype == given
    assert {g.dtype for g in runs[0][4:]} == {torch.float32}


def test_a_backward_pass_under_autocast_stays_in_the_dtype_of_its_forward() -> None:
    x, projections = randn(6, 72, dtype=torch.float32).requires_grad_(), qkv(72, torch.float32)
    outputs = lora_qkv(x, projections)
    with torch.autocast(DEVICE, torch.bfloat16):
        inside = gradients(outputs, x, projections)
    outside = gradients(lora_qkv(x, projections), x, projections)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_autocast_over_an_fp32_base_computes_in_its_dtype() -> None:
    """As `F.linear` does; the weight is not kept in bf16 for the backward pass."""
    x, p = randn(64, 72, dtype=torch.float32).requires_grad_(), qkv(72, torch.float32)[0]

    def op() -> Tensor:
        return lora_linear(x, p.weight, p.bias, p.adapter)

    with torch.autocast(DEVICE, torch.bfloat16):
        compare(x, [p], [op()], [eager(x, p)])
        assert op().dtype is compute_dtype(x, p.weight) is torch.bfloat16
        rows, adapter = 64 * 2 * (72 + 4), 2 * (4 * 72 + 24 * 4)
        assert saved_bytes(op, besides=[p.weight]) == rows + adapter
    assert op().dtype is compute_dtype(x, p.weight) is torch.float32


def test_saved_bytes() -> None:
    """x once for all three, what A makes of it, with dropout a byte a number for each mask; about half of PEFT's."""
    projections = [projection(64, 64, 4, 2.0, torch.bfloat16, seed=s) for s in range(3)]
    lowered = [cast_lora_factors(*p.adapter[:3], torch.bfloat16) for p in projections]
    ours = [p._replace(adapter=p.adapter._replace(lowered=low)) for p, low in zip(projections, lowered, strict=True)]
    x = randn(2, 50, 64, dtype=torch.bfloat16).requires_grad_()
    saved_inputs = [p.weight for p in projections] + [t for pair in lowered for t in pair]
    rows, e = 100, 2
    with torch.autocast(DEVICE, torch.bfloat16):
        products = rows * 3 * 4 * e
        assert saved_bytes(lambda: lora_qkv(x, ours), saved_inputs) == rows * 64 * e + products
        assert saved_bytes(lambda: lora_linear(x, *ours[0][:3]), saved_inputs) == rows * (64 + 4) * e
        dropped = saved_bytes(lambda: lora_qkv(x, ours, dropout=0.1), saved_inputs)
        assert dropped == rows * 64 * e + products + 3 * rows * 64
        stock = [p.weight for p in projections] + [t for p in projections for t in p.adapter[:2]]
        peft = saved_bytes(lambda: [eager(x, p) for p in projections], stock)
        peft_dropped = saved_bytes(lambda: [eager(x, p, 0.1) for p in projections], stock)
    assert rows * 64 * e + products < 0.45 * peft, peft
    # On CUDA PEFT's masks take a byte a number too, on a CPU two.
    assert dropped < 0.6 * peft_dropped, peft_dropped


def test_a_strided_input_is_kept_as_it_is() -> None:
    """Not as the copy that a GEMM may need."""
    joint, p = randn(2, 60, 64, dtype=torch.float32), projection(64, 8, 4, 1.0, torch.float32)
    x = joint[:, 10:].requires_grad_()
    excluded = [joint, p.weight, *p.adapter[:2]]
    num_bytes = saved_bytes(lambda: lora_linear(x, *p[:3]), excluded)
    assert num_bytes == 100 * 4 * 4


def test_only_asked_gradients_are_computed_and_saved_for() -> None:
    """An adapter whose A is frozen keeps no x."""
    p, x = projection(64, 32, 4, 2.0, torch.float32), randn(50, 64, dtype=torch.float32)
    a, b = p.adapter[:2]
    x.requires_grad_()

    def op() -> Tensor:
        return lora_linear(x, *p[:3])

    full_grads = torch.autograd.grad(op().sum(), [x, a, b])
    products = 50 * 4 * 4 + 32 * 4 * 4  # x A^T and the scaled B
    for needed in ([x], [a], [b], [x, b], [a, b]):
        for tensor in (x, a, b):
            tensor.requires_grad_(any(tensor is t for t in needed))
        x_bytes = 50 * 64 * 4 if any(a is t for t in needed) else 0
        assert saved_bytes(op, [p.weight, a]) == products + x_bytes
        actual = torch.autograd.grad(op().sum(), needed)
        for tensor, gradient in zip(needed, actual, strict=True):
            (expected,) = [w for t, w in zip((x, a, b), full_grads, strict=True) if t is tensor]
            torch.testing.assert_close(gradient, expected)


def test_products_are_few() -> None:
    """All A's in one GEMM, forward and backward; no product for a gradient that nobody needs."""
    projections = [projection(64, 32, r, 2.0, torch.float32) for r in (3, 4, 5)]
    x = randn(50, 64, dtype=torch.float32)
    with Products() as forward:
        outputs = lora_qkv(x, projections)
    assert sorted(forward.shapes) == sorted([(50, 64, 12), *[(50, 64, 32)] * 3, *[(50, r, 32) for r in (3, 4, 5)]])
    with Products() as backward:
        torch.stack(outputs).sum().backward()
    inner, d_b = [(50, 32, r) for r in (3, 4, 5)], [(32, 50, r) for r in (3, 4, 5)]
    assert sorted(backward.shapes) == sorted([(12, 50, 64), *inner, *d_b])
    for p in projections:
        p.adapter.b.requires_grad_(False)
    outputs = lora_qkv(x.requires_grad_(), projections)
    with Products() as backward:
        torch.autograd.grad(torch.stack(outputs).sum(), x)
    assert sorted(backward.shapes) == sorted([(50, 12, 64), (12, 50, 64), *[(50, 32, 64)] * 3, *inner])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_graph_break(dropout: float, autocast: bool) -> None:
    x, projections = randn(2, 9, 72, dtype=torch.bfloat16).requires_grad_(), qkv(72, torch.bfloat16)

    def op(x: Tensor) -> tuple[Tensor, ...]:
        return lora_qkv(x, projections, dropout=dropout)

    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    runs = []
    for run in (op, compiled):
        torch.manual_seed(6)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            outputs = run(x)
        runs.append([*outputs, *gradients(outputs, x, projections)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_of_the_adapter_are_fp32_sums() -> None:
    """Not rounded to bf16: two sums that differ by less than one bf16 step stay apart."""
    x = torch.ones(1025, 64, device=DEVICE, dtype=torch.bfloat16)
    p = projection(64, 8, 4, 1.0, torch.bfloat16)
    p.adapter.b.data.fill_(1.0)
    (d_a,) = torch.autograd.grad(lora_linear(x, *p[:3]).sum(), p.adapter.a)
    assert torch.equal(d_a, torch.full_like(d_a, 1025.0 * 8))
