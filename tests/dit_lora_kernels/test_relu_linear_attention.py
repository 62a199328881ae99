"""relu_linear_attention: as good as diffusers' two processors, and finite where they are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_checks import assert_as_good_as_eager, in_nan_arena, poisoned_memory, saved_bytes
from torch import Tensor

from dit_lora_kernels import relu_linear_attention as op
from dit_lora_kernels.relu_linear_attention import relu_linear_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tables = tuple[Tensor, Tensor] | tuple[None, None]
# Not bitwise: a GPU may compile other strides or arguments to sums in another order.
assert_close = torch.testing.assert_close
Patch = pytest.MonkeyPatch
Table = tuple[int, ...] | None
Shape = tuple[int, int, int, int]
NO_TABLES: Tables = (None, None)
SHAPES = [
    ((3, 37, 2, 32), None),
    ((2, 45, 1, 72), (45, 72)),
    ((1, 33, 2, 112), (1, 33, 112)),
    ((2, 21, 3, 12), (2, 21, 12)),
]


def inputs(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(4))
    return q, k, v + 0.5, grad


def tables(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """cos and sin of an angle a pair, as diffusers repeats them."""
    generator = torch.Generator().manual_seed(1)
    angle = torch.rand(*shape[:-1], shape[-1] // 2, generator=generator).to(DEVICE) * 6
    angle = angle.repeat_interleave(2, -1)
    return angle.cos(), angle.sin()


def run(function: Callable[..., Tensor], *args: Any) -> list[Tensor]:
    """The output and the gradients of q, k and v; `args` are q, k, v, the output's gradient, the tables."""
    q, k, v, grad, *remaining = args
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    output = function(*leaves, *remaining)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def stock(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """SanaLinearAttnProcessor2_0, or 3_0 with tables: its rotation and its normaliser are in the inputs' dtype."""
    accumulation_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    q, k = q.relu(), k.relu()

    def rotated(x: Tensor) -> Tensor:
        if cos is None or sin is None:
            return x
        c, s = (t.expand(x.shape[0], -1, -1)[:, :, None] for t in (cos, sin))
        output = torch.empty_like(x)
        output[..., 0::2] = x[..., 0::2] * c[..., 0::2] - x[..., 1::2] * s[..., 1::2]
        output[..., 1::2] = x[..., 0::2] * s[..., 1::2] + x[..., 1::2] * c[..., 0::2]
        return output

    state = torch.einsum("bshd,bshe->bhde", rotated(k).to(accumulation_dtype), v.to(accumulation_dtype))
    result = torch.einsum("bshd,bhde->bshe", rotated(q).to(accumulation_dtype), state)
    if cos is None:
        q, k = q.to(accumulation_dtype), k.to(accumulation_dtype)
    den = torch.einsum("bshd,bhd->bsh", q, k.sum(1)) + 1e-15
    return (result * (1 / den[..., None])).to(v.dtype)


def assert_good(args: list[Tensor], cos_sin: Tables) -> None:
    ours = run(relu_linear_attention, *args, *cos_sin)
    eager = run(stock, *args, *cos_sin)
    exact_tables = tuple(None if t is None else t.double() for t in cos_sin)
    exact = run(stock, *(x.double() for x in args), *exact_tables)
    for name, *values in zip(("out", "dq", "dk", "dv"), ours, eager, exact, strict=True):
        assert_as_good_as_eager(name, *values)
    assert ours[0].dtype == args[0].dtype
    assert ours[0].is_contiguous()


def assert_same(ours: list[Tensor], others: list[Tensor]) -> None:
    for name, value, expected_value in zip(("out", "dq", "dk", "dv"), ours, others, strict=True):
        assert value.dtype == expected_value.dtype
        assert torch.equal(value, expected_value), name


@pytest.fixture
def short_chunks(monkeypatch: Patch) -> None:
    """Chunks of one block: a few dozen tokens are as many programs and partials as thousands would be."""
    monkeypatch.setattr(op, "tokens_per_program", lambda s, d: 32)


# In fp16 kernels run the same lines; hard values of fp16 have tests of their own.
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize(("shape", "table"), SHAPES)
def test_values_and_gradients(shape: Shape, table: Table, dtype: torch.dtype) -> None:
    cos_sin = NO_TABLES if table is None else tables(table)
    assert_good(list(inputs(shape, dtype)), cos_sin)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("table", [None, (2, 70, 16)])
def test_partials_of_every_chunk_are_added(table: Table) -> None:
    assert_good(list(inputs((2, 70, 3, 16))), NO_TABLES if table is None else tables(table))


def test_chunks_as_they_are() -> None:
    """520 tokens: two chunks of several blocks, the second one nearly empty."""
    for dtype in (torch.float32, torch.bfloat16):
        assert_good(list(inputs((1, 520, 1, 16), dtype)), NO_TABLES)


@pytest.mark.parametrize("table", [None, (3, 2)])
def test_gradcheck(table: Table) -> None:
    leaves = [x.double() for x in inputs((1, 3, 2, 2))[:3]]
    leaves = [torch.where(x.abs() < 0.1, x.sign() * 0.1, x).requires_grad_() for x in leaves]
    cos_sin = [None, None] if table is None else [t.double() for t in tables(table)]
    assert torch.autograd.gradcheck(relu_linear_attention, (*leaves, *cos_sin), fast_mode=True)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("table", [None, (40, 24)])
def test_nothing_is_left_unwritten_and_bits_repeat(table: Table, monkeypatch: Patch) -> None:
    args = [*inputs((2, 40, 2, 24)), *(NO_TABLES if table is None else tables(table))]
    clean = run(relu_linear_attention, *args)
    assert_same(run(relu_linear_attention, *args), clean)
    with poisoned_memory(monkeypatch):
        assert_same(run(relu_linear_attention, *args), clean)


def test_reads_nothing_beside_its_operands() -> None:
    args = [*inputs((2, 40, 2, 24)), *tables((2, 40, 24))]
    inside = [in_nan_arena(x) for x in args]
    assert_close(run(relu_linear_attention, *inside), run(relu_linear_attention, *args))


def test_strided_inputs_and_gradients() -> None:
    q, k, v, grad = inputs((2, 34, 2, 8))
    plain = run(relu_linear_attention, q, k, v, grad)
    fused = torch.stack([q, k, v, grad], 2).unbind(2)
    assert fused[0].stride(1) == 4 * 2 * 8
    assert_close(run(relu_linear_attention, *fused), plain)
    headed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, grad)]
    assert_close(run(relu_linear_attention, *headed), plain)
    spread = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v, grad)]
    assert spread[0].stride(3) != 1
    assert_close(run(relu_linear_attention, *spread), plain)


def test_expanded_inputs_and_gradients() -> None:
    q, k, v, grad = inputs((2, 40, 2, 24))
    q, k = (x[:1].expand(2, -1, -1, -1) for x in (q, k))
    v, grad = v[:, :1].expand(-1, 40, -1, -1), grad[:1, :, :1].expand(2, -1, 2, -1)
    copies = [x.contiguous() for x in (q, k, v, grad)]
    strided = run(relu_linear_attention, q, k, v, grad)
    assert_close(strided, run(relu_linear_attention, *copies))
    ones = torch.ones((), device=DEVICE).expand(2, 40, 2, 24)  # what .sum() hands back
    copies = [q, k, v, ones.contiguous()]
    assert_close(run(relu_linear_attention, q, k, v, ones), run(relu_linear_attention, *copies))


def test_operands_of_different_dtypes() -> None:
    q, k, v, grad = inputs((2, 40, 2, 24))
    q, v = q.bfloat16(), v.half()
    ours = run(relu_linear_attention, q, k, v, grad.bfloat16())
    assert [x.dtype for x in ours] == [q.dtype, q.dtype, k.dtype, v.dtype]
    fp32_results = run(relu_linear_attention, q.float(), k, v.float(), grad.bfloat16().float())
    for value, expected_value in zip(ours, fp32_results, strict=True):
        assert_close(value.float(), expected_value, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
    ("mean", "std", "dtype"),
    [(100, 1, torch.float32), (100, 1, torch.bfloat16), (0, 1e4, torch.float16)],
)
def test_far_from_zero(mean: float, std: float, dtype: torch.dtype) -> None:
    q, k, v, grad = inputs((2, 34, 1, 32))
    if dtype is torch.float32:  # constant rows
        assert_good([*(x[..., :1].abs().expand_as(x) for x in (q, k, v)), grad], NO_TABLES)
    q, k, v = ((x * std + mean).to(dtype) for x in (q, k, v))
    assert_good([q, k, v, grad.to(dtype)], NO_TABLES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", [None, (40, 16)])
def test_dead_queries_attend_to_nothing(table: Table, dtype: torch.dtype) -> None:
    """relu(q) = 0; a query whose keys are all 0 though the rotated ones are not; a query of 1e-20 (0 in fp16)."""
    q, k, v, grad = inputs((1, 40, 2, 16), dtype)
    k[..., 0] = -1
    q[:, 3] = -q[:, 3].abs()
    q[:, 5, :, 0], q[:, 5, :, 1:] = 1, -1
    q[:, 38] = 1e-20
    dead = [3, 5, 38]
    cos_sin = NO_TABLES if table is None else tables(table)
    output, dq, dk, dv = run(relu_linear_attention, q, k, v, grad, *cos_sin)
    assert output[:, dead].eq(0).all()
    assert dq[:, dead].eq(0).all()
    changed_grad = grad.clone()
    changed_grad[:, dead] = 0
    assert_same([output, dq, dk, dv], run(relu_linear_attention, q, k, v, changed_grad, *cos_sin))
    assert all(x.isfinite().all() for x in (output, dq, dk, dv))
    assert output[:, [2, 4, 6, 39]].ne(0).all()


@pytest.mark.parametrize("dead", ["q", "k", "v"])
def test_all_zero_inputs(dead: str) -> None:
    q, k, v, grad = inputs((2, 40, 2, 16))
    zero = {"q": q, "k": k, "v": v}[dead]
    zero[:, :, 1] = 0
    ours = run(relu_linear_attention, q, k, v, grad)
    assert all(x.isfinite().all() for x in ours)
    assert all(x[:, :, 1].eq(0).all() for x in ours[:2])
    assert ours[0][:, :, 0].ne(0).all()
    if dead == "k":
        k[:, :, 1] = 1e-20
        assert all(x[:, :, 1].eq(0).all() for x in run(relu_linear_attention, q, k, v, grad))


@pytest.mark.parametrize("which", ["q", "k"])
def test_the_bound_of_a_dead_row(which: str) -> None:
    """Just below eps a row is dead; just above it, it is what stock makes of it."""
    q, k, v, grad = inputs((1, 34, 1, 16))
    q, k = q.abs() + 1, k.abs() + 1
    z = k.sum(1, keepdim=True)
    size = (q * z).sum(-1, keepdim=True) / (z if which == "q" else q).sum(-1, keepdim=True)
    for factor in (0.99, 1.01):
        if which == "q":
            args = [q / size * 1e-6 * factor, k, v, grad]
        else:
            args = [q, k / size[:, :1] * 1e-6 * factor, v, grad]
        output = relu_linear_attention(*args[:3])[:, :1]
        expected = stock(*args[:3], None, None)[:, :1] if factor > 1 else torch.zeros_like(output)
        assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert relu_linear_attention(q, k, v, eps=1e4).eq(0).all()


def test_channels_apart_do_not_decide() -> None:
    """A query's only channel meets one key of 0.05 among large keys elsewhere: stock attends to it, and so do we."""
    q, k, v, grad = inputs((1, 40, 1, 16))
    k = k.abs() * 1e5
    k[..., 0] = -1
    k[:, 7, :, 0] = 0.05
    q = -q.abs()
    q[..., 0] = 0.01
    output, dq, dk, dv = run(relu_linear_attention, q, k, v, grad)
    assert_close(output, v[:, 7:8].expand_as(output), rtol=1e-5, atol=1e-6)
    assert dq.abs().max() < 1e-2
    assert_close(dv[:, 7], grad.sum(1), rtol=1e-5, atol=1e-5)
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("exponent", range(-24, 1, 4))
def test_gradient_of_small_queries_is_bounded(exponent: int) -> None:
    q, k, v, grad = inputs((1, 40, 2, 16))
    q = q * 10.0**exponent
    bound = 2 * grad.norm(dim=-1).max() * v.norm(dim=-1).max() / 1e-6
    output, dq, dk, dv = run(relu_linear_attention, q, k, v, grad)
    assert dq.abs().max() <= bound
    assert all(x.isfinite().all() for x in (output, dk, dv))
    if exponent == -20:
        assert run(stock, q, k, v, grad, None, None)[1].abs().max() > 1e12


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_query_stays_in_its_row(bad: float) -> None:
    q, k, v, _ = inputs((2, 40, 2, 16))
    clean = relu_linear_attention(q, k, v)
    q[1, 33, 0, 5] = bad
    output = relu_linear_attention(q, k, v)
    assert not output[1, 33, 0].isfinite().any()
    output[1, 33, 0] = clean[1, 33, 0]
    assert torch.equal(output, clean)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_bad_value_stays_in_its_head(name: str) -> None:
    q, k, v, grad = inputs((2, 40, 2, 16))
    clean = run(relu_linear_attention, q, k, v, grad)
    {"q": q, "k": k, "v": v}[name][1, 33, 0, 5] = float("nan")
    ours = run(relu_linear_attention, q, k, v, grad)
    assert not ours[1][1, 33, 0].isfinite().all()
    assert not ours[0][1, :, 0].isfinite().all()
    for value, expected_value in zip(ours, clean, strict=True):
        value[1, :, 0] = expected_value[1, :, 0]
        assert torch.equal(value, expected_value)


def test_offsets_beyond_int32() -> None:
    """Rows 2^30 elements apart; three are touched. A wrapped offset would land in the first half."""
    memory = torch.empty(2**32 + 256, dtype=torch.float16, device=DEVICE)
    q, k, v, grad = inputs((1, 3, 1, 16), torch.float16)
    far = []
    for i, x in enumerate((q, k, v, grad)):
        view = memory.as_strided(x.shape, (2**31, 2**30, 16, 1), 2**31 + 64 * i)
        memory[64 * i : 64 * i + 16] = float("nan")
        far.append(view.copy_(x))
    assert_close(run(relu_linear_attention, *far), run(relu_linear_attention, q, k, v, grad))


@pytest.mark.parametrize("kernel", [True, False])
def test_autocast_changes_nothing(kernel: bool, monkeypatch: Patch) -> None:
    if not kernel:
        monkeypatch.setattr(op, "launches", lambda tensor: False)
    args = [*inputs((2, 40, 2, 16)), *tables((40, 16))]
    plain = run(relu_linear_attention, *args)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert_same(run(relu_linear_attention, *args), plain)
        reference = op.relu_linear_attention_reference(*args[:3], *args[4:])
    assert_close(reference, plain[0], rtol=1e-5, atol=1e-6)


def test_opcheck() -> None:
    leaves = [x.requires_grad_() for x in inputs((2, 7, 2, 8))[:3]]
    for cos_sin in (tables((7, 8)), (None, None)):
        torch.library.opcheck(op.relu_linear_attention_forward.library, (*leaves, *cos_sin, 1e-6))


def test_keeps_its_inputs_and_the_state() -> None:
    q, k, v = (x.requires_grad_() for x in inputs((2, 40, 2, 16), torch.bfloat16)[:3])
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    ours = saved_bytes(lambda: relu_linear_attention(*views), views)
    assert ours == 2 * 2 * (16 * 16 + 16) * 4
    eager = saved_bytes(lambda: stock(*views, None, None), views)
    assert eager > 3 * 4 * q.numel()


def test_gradients_that_nobody_wants_are_not_computed(monkeypatch: Patch) -> None:
    q, k, v, grad = inputs((1, 40, 2, 16))
    _, dq, dk, dv = run(relu_linear_attention, q, k, v, grad)
    for name, expected_grad in (("q", dq), ("k", dk), ("v", dv)):
        leaves = {"q": q, "k": k, "v": v}
        leaves[name] = leaves[name].detach().requires_grad_()
        (actual_grad,) = torch.autograd.grad(relu_linear_attention(**leaves), leaves[name], grad)
        assert_close(actual_grad, expected_grad)
    monkeypatch.setattr(op, "key_grad_kernel", None)
    leaf = q.detach().requires_grad_()
    relu_linear_attention(leaf, k, v).backward(grad)
    assert_close(leaf.grad, dq)


def test_compiles_as_one_graph() -> None:
    args = [*inputs((2, 40, 2, 16)), *tables((40, 16))]
    compiled = torch.compile(relu_linear_attention, fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, *args), run(relu_linear_attention, *args))


@pytest.mark.parametrize("table", [None, (2, 37, 24)])
def test_reference_agrees(table: Table, monkeypatch: Patch) -> None:
    args = [*inputs((2, 37, 2, 24)), *(NO_TABLES if table is None else tables(table))]
    args[0][:, 3] = -1
    kernel = run(relu_linear_attention, *args)
    by_autograd = run(op.relu_linear_attention_reference, *args)
    monkeypatch.setattr(op, "launches", lambda tensor: False)
    expected = run(relu_linear_attention, *args)
    forward = op.relu_linear_attention_forward(*args[:3], *args[4:], 1e-6)
    assert all(x.is_contiguous() for x in forward)  # as register_fake says
    assert_close(kernel, expected, rtol=1e-4, atol=1e-5)
    assert_close(by_autograd, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 2, 16), (2, 0, 2, 16), (2, 5, 0, 16)])
def test_empty(shape: Shape) -> None:
    assert all(x.shape == shape for x in run(relu_linear_attention, *inputs(shape)))


def test_refuses_what_does_not_fit() -> None:
    q, k, v, _ = inputs((2, 5, 2, 16))
    cos, sin = tables((5, 16))
    wide_head = torch.zeros(1, 2, 1, 144, device=DEVICE)
    odd = (q[..., :15], k[..., :15], v[..., :15])
    table = r"\(5, 16\), \(1, 5, 16\) or \(2, 5, 16\).*"
    for args, message in (
        ((q, k[:, :4], v), r"the same shape \(B, S, H, D\); got .*\(2, 4, 2, 16\)"),
        ((q[0], k[0], v[0]), r"the same shape \(B, S, H, D\)"),
        ((q, k, v, cos), "both or neither"),
        ((q, k, v, cos[:4], sin[:4]), table + r"\(4, 16\)"),
        ((q, k, v, cos, sin[None]), r"\(5, 16\) and \(1, 5, 16\)"),
        ((*odd, cos[:, :15], sin[:, :15]), "even last dimension"),
        ((wide_head, wide_head, wide_head), "at most 128 channels; got 144"),
    ):
        with pytest.raises(ValueError, match=message):
            relu_linear_attention(*args)
    with pytest.raises(ValueError, match="eps must be positive; got 0"):
        relu_linear_attention(q, k, v, eps=0)


@pytest.mark.thorough
def test_sm90(sm90: Callable[[str], list[dict[str, Any]]]) -> None:
    """Rows are stored 16 bytes a thread (the other stores are z and dz, a few bytes a program); fp64 fits on an SM."""
    for case in sm90("relu_linear_attention"):
        if "fp64" in case["case"]:
            assert case["blocks"] > 0, case
        elif "video" not in case["case"]:
            assert case["stores"].count(16) >= len(case["stores"]) - 1, case
