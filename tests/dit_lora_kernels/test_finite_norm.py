"""finite_norms against fp64 and torch's own norms: any sizes and dtypes, any magnitude, and not one NaN lost."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kernel_checks import poisoned_memory
from torch import Tensor

import dit_lora_kernels.finite_norm as module
from dit_lora_kernels.finite_norm import (
    CHUNK,
    finite_norms,
    finite_norms_op,
    finite_norms_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [(3, 5), (1,), (CHUNK,), (CHUNK + 1,), (0,), (2, CHUNK - 8), (16, 2), (), (7, 1)]
GROUPS = [2, 0, 2, 0, 0, 2, 4, 4, 2]
COUNT = 6


@pytest.fixture(params=[True, False], ids=["kernel", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(module, "launches", lambda tensor: False)
    return bool(request.param)


def random(size: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers in the middle of a NaN arena: any out-of-bounds read shows."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(size)
    arena = torch.full((count + 64,), float("nan"), dtype=dtype)
    arena[32 : 32 + count] = torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return arena.to(DEVICE)[32 : 32 + count].view(tuple(size))


def tensors(dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    return [random(size, dtypes[i % len(dtypes)], i) for i, size in enumerate(SIZES)]


def exact(given: Sequence[Tensor], groups: Sequence[int], count: int) -> Tensor:
    """In fp64, a group's elements side by side."""
    norms = []
    for group in range(count):
        group_tensors = [t.double().flatten() for t, g in zip(given, groups, strict=True) if g == group]
        joined = torch.cat(group_tensors) if group_tensors else torch.zeros(0, dtype=torch.float64, device=DEVICE)
        norms.append((joined / 2.0**60).square().sum().sqrt() * 2.0**60)
    return torch.stack(norms)


def close(ours: Tensor, true: Tensor) -> None:
    assert ours.dtype is torch.float64
    torch.testing.assert_close(ours, true, rtol=5e-7, atol=0)


@pytest.mark.parametrize("dtypes", [[dtype] for dtype in FLOATS] + [FLOATS], ids=str)
def test_values(dtypes: list[torch.dtype], kernel: bool) -> None:
    inputs = tensors(dtypes)
    close(finite_norms(inputs, GROUPS, COUNT), exact(inputs, GROUPS, COUNT))


def test_the_reference_is_that_of_torch() -> None:
    inputs = tensors([torch.float32])
    norms = finite_norms_reference(inputs, GROUPS, COUNT)
    for group, norm in enumerate(norms):
        group_tensors = [t for t, g in zip(inputs, GROUPS, strict=True) if g == group]
        expected = torch.nn.utils.get_total_norm(group_tensors).to(DEVICE)
        torch.testing.assert_close(norm.float(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bad_element_anywhere_shows_in_its_group_alone(dtype: torch.dtype, bad: float, kernel: bool) -> None:
    inputs = tensors([dtype])
    clean = finite_norms(inputs, GROUPS, COUNT)
    positions = [(1, 0), (3, CHUNK), (5, 2 * CHUNK - 17), (6, 31)]
    for index, at in positions:
        flat = inputs[index].view(-1)
        good = flat[at].clone()
        flat[at] = bad
        norms = finite_norms(inputs, GROUPS, COUNT)
        flat[at] = good
        assert not torch.isfinite(norms[GROUPS[index]])
        norms[GROUPS[index]] = clean[GROUPS[index]]
        assert torch.equal(norms, clean)


def test_nothing_but_nan(kernel: bool) -> None:
    inputs = [torch.full((CHUNK + 3,), float("nan"), device=DEVICE)]
    assert torch.isnan(finite_norms(inputs, [0], 1)).all()


EXPONENTS = [-149, -127, -110, -64, -41, -40, -39, -20, 0, 55, 56, 57, 64, 100, 121]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_magnitude_overflows_or_vanishes(dtype: torch.dtype, kernel: bool) -> None:
    """A full chunk of one number has a norm of 64 times it: powers of two, and negatives just short of them."""
    # Triton's interpreter, not a GPU, takes a subnormal bf16 for zero.
    exponents = [e for e in EXPONENTS if dtype is torch.float32 or e >= -126]
    values = [2.0**e for e in exponents] + [-(2.0**e) * 0.9921875 for e in exponents if e > -120]
    inputs = [torch.full((CHUNK,), v, dtype=dtype, device=DEVICE) for v in values]
    norms = finite_norms(inputs, range(len(inputs)), len(inputs))
    close(norms, torch.tensor([64 * abs(v) for v in values], dtype=torch.float64, device=DEVICE))


def test_the_ends_of_fp32(kernel: bool) -> None:
    largest = torch.finfo(torch.float32).max
    inputs = [
        torch.tensor(values, dtype=torch.float32, device=DEVICE)
        for values in (
            [largest],
            [largest, largest],
            [1e30, 1e-30],
            [0.0, -0.0],
            [-1e-45],
            [largest],
        )
    ]
    norms = finite_norms([*inputs, inputs[-1]], [0, 1, 2, 3, 4, 5, 5], 6)
    pair = largest * 2**0.5  # no fp32 number
    expected = [largest, pair, 1e30, 0.0, float(inputs[4].abs()), pair]
    close(norms, torch.tensor(expected, dtype=torch.float64, device=DEVICE))


def test_doubles_beyond_fp32(kernel: bool) -> None:
    inputs = [torch.tensor([v], dtype=torch.float64, device=DEVICE) for v in (1e60, 1e-60, 1e300)]
    norms = finite_norms(inputs, [0, 1, 2], 3)
    expected = torch.tensor([1e60, 1e-60, math.inf], dtype=torch.float64, device=DEVICE)
    torch.testing.assert_close(norms, expected)


def test_strides_and_alignment(kernel: bool) -> None:
    base = random((40, 34), torch.float32, 0)
    inputs = [
        base.t(),
        base[:, ::2],
        base.flatten()[1:],
        base[:, 2:],
        base[:1].expand(5, 34),
        base.flatten()[:-8],
        base[:4, :32].contiguous().flatten()[4:],
    ]
    groups = [0, 1, 2, 3, 4, 5, 6]
    close(finite_norms(inputs, groups, 7), exact(inputs, groups, 7))


def test_many_tensors_of_few_groups(kernel: bool) -> None:
    """Groups interleaved over launches of both alignments."""
    sizes = [(16 * (i % 3) + i % 2,) for i in range(24)]
    inputs = [random(size, FLOATS[i % 3], i) for i, size in enumerate(sizes)]
    groups = [(i * 7) % 4 for i in range(24)]
    close(finite_norms(inputs, groups, 5), exact(inputs, groups, 5))


def test_repeats_bit_for_bit_in_poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(FLOATS)
    plain = finite_norms(inputs, GROUPS, COUNT)
    with poisoned_memory(monkeypatch):
        assert torch.equal(finite_norms(inputs, GROUPS, COUNT), plain)


def test_not_differentiable_and_the_same_under_autocast(kernel: bool) -> None:
    inputs = [t.requires_grad_() for t in tensors([torch.float32])]
    inputs[2].data.mul_(1e30)
    plain = finite_norms(inputs, GROUPS, COUNT)
    assert not plain.requires_grad
    with torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(finite_norms(inputs, GROUPS, COUNT), plain)


def test_tables_are_made_once_and_never_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address, size, dtype, group and count are all compared, and values are read again."""
    tables_built: list[Any] = []
    build_table = module._build_chunk_table
    monkeypatch.setattr(module, "_build_chunk_table", lambda *args: tables_built.append(args) or build_table(*args))
    module._get_cached_tables.cache_clear()
    inputs = tensors([torch.float32])
    finite_norms(inputs, GROUPS, COUNT)
    before = len(tables_built)
    for tensor in inputs:
        tensor.mul_(3)
    close(finite_norms(inputs, GROUPS, COUNT), exact(inputs, GROUPS, COUNT))
    assert len(tables_built) == before
    shorter = [inputs[0], *inputs[2:3], *inputs[2:]]
    shorter[1] = inputs[2].view(-1)[:100]
    elsewhere = [t.clone() * 2 for t in inputs]
    halves = [t.view(torch.float16) if i == 2 else t for i, t in enumerate(inputs)]
    inputs[2].fill_(1.5)  # finite as fp16 too
    transposed = [torch.stack([t, t]).t() if t.ndim == 1 else t for t in inputs]
    for bad_tensors, groups, count in (
        (shorter, GROUPS, COUNT),
        (elsewhere, GROUPS, COUNT),
        (halves, GROUPS, COUNT),
        (inputs, GROUPS[::-1], COUNT),
        (inputs, GROUPS, COUNT + 2),
        (transposed, GROUPS, COUNT),
        (inputs, GROUPS, COUNT),
    ):
        close(finite_norms(bad_tensors, groups, count), exact(bad_tensors, groups, count))


def test_no_synchronisation_with_the_host() -> None:
    """On a GPU a copy that waits raises; on a CPU the same lines run unwatched."""
    inputs = tensors(FLOATS)
    plain = finite_norms(inputs, GROUPS, COUNT)
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        norms = finite_norms(inputs, GROUPS, COUNT)
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(norms, plain)


def test_addresses_beyond_two_to_the_31() -> None:
    """Of memory that nothing touches: 2^31 elements and a few, 4 GiB."""
    tensor = torch.empty(2**31 + 5, dtype=torch.bfloat16)
    rows = [(tensor.data_ptr(), 9, 3), (tensor.data_ptr(), tensor.numel(), 5)]
    address, elements, output_index = module._build_chunk_table(rows, 2).unbind(1)
    chunks = 2**31 // CHUNK + 1
    assert [len(address), elements[0], output_index[0]] == [chunks + 1, 9, 3]
    assert torch.equal(output_index[1:], 5 + torch.arange(chunks))
    assert (elements[1:-1] == CHUNK).all()
    assert elements[-1] == 5
    offsets = torch.arange(chunks) * CHUNK * 2
    assert torch.equal(address[1:] - tensor.data_ptr(), offsets)


def test_nothing(kernel: bool) -> None:
    empty = torch.zeros(0, 3, device=DEVICE)
    assert torch.equal(finite_norms([empty, empty], [0, 2], 3), torch.zeros(3, device=DEVICE))
    assert torch.equal(finite_norms([], [], 2), torch.zeros(2))


def test_opcheck() -> None:
    torch.library.opcheck(finite_norms_op.library, (tensors(FLOATS), GROUPS, COUNT))


def test_compiles_without_a_graph_break(kernel: bool) -> None:
    inputs = tensors([torch.float32])[:4]
    compiled: Any = torch.compile(lambda *t: finite_norms(t, GROUPS[:4], 3) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), finite_norms(inputs, GROUPS[:4], 3) * 2)


@pytest.mark.parametrize(
    ("given", "groups", "count", "error", "message"),
    [
        ([torch.ones(2)], [0, 0], 1, ValueError, "a group for each of 1 tensors; got 2"),
        ([torch.ones(2)], [1], 1, ValueError, r"groups\[0\] must be from 0 to 0; got 1"),
        ([torch.ones(2)], [-1], 1, ValueError, r"groups\[0\] must be .* got -1"),
        (
            [torch.ones(2), torch.ones(2).int()],
            [0, 0],
            1,
            TypeError,
            r"tensors\[1\] must be float16, .* got torch.int32",
        ),
        (
            [torch.ones(2), torch.ones(2, device="meta")],
            [0, 0],
            1,
            ValueError,
            r"tensors\[0\] is on cpu, and tensors\[1\] on meta",
        ),
    ],
)
def test_refused(given: list[Tensor], groups: list[int], count: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        finite_norms(given, groups, count)


def test_compiled_for_sm90(sm90: Callable[[str], list[dict[str, Any]]]) -> None:
    for case in sm90("finite_norm"):
        assert case["spills"] == 0, case
        assert case["registers"] <= 128, case
        elements = case["loads"][2:-1]  # after address and size, before the place
        assert set(elements) == {4 if "unaligned" in case["case"] else 16}, case
