"""A digest changes with any bit, and with nothing else."""

import pytest
import torch

from dit_lora.numerics import digest as module
from dit_lora.numerics.digest import compute_digest

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64]


def values(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(7, 3), (), (0, 4), (5,), (40,)]
    return [(100 * torch.rand(size, generator=generator)).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1 << 23, 32])
def test_any_bit_changes_it(dtype: torch.dtype, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first and last element of each tensor, lowest and highest bit, together and apart."""
    monkeypatch.setattr(module, "_BATCH_BYTES", batch)
    before = compute_digest(values(dtype))
    assert compute_digest(values(dtype)) == before
    for number in (0, 1, 3, 4):
        for byte_index in (0, -1):
            for bit in (0, 7):
                changed_values = values(dtype)
                changed_values[number].view(-1).view(torch.uint8)[byte_index] ^= 1 << bit
                assert compute_digest(changed_values) != before, (number, byte_index, bit)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(256, 64), (1, 298, 64), (1 << 21,), (7, 3)])
def test_signs_and_factors_of_whole_tensors_change_it(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """Equal changes of very many words, which must not cancel out."""
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = compute_digest([tensor])
    for changed_tensor in (
        -tensor,
        tensor.abs(),
        2 * tensor,
        torch.zeros_like(tensor),
        tensor.flip(0),
        -tensor.flip(-1),
    ):
        assert torch.equal(changed_tensor, tensor) is (compute_digest([changed_tensor]) == before)
    assert compute_digest([torch.full(size, -0.0, dtype=dtype)]) != compute_digest([torch.zeros(size, dtype=dtype)])


def test_order_and_layout() -> None:
    entry, second = values(torch.float32)[:2]
    assert compute_digest([entry, second]) != compute_digest([second, entry])
    assert compute_digest([entry.flatten().flip(0)]) != compute_digest([entry])
    assert compute_digest([entry.T.contiguous().T]) == compute_digest([entry])
    mixed = [entry, torch.arange(3), entry.bfloat16()]
    assert compute_digest(mixed) == compute_digest([t.clone() for t in mixed])
    assert compute_digest([torch.zeros(3), torch.tensor(-0.0)]) != compute_digest([torch.zeros(3), torch.zeros(())])
    assert compute_digest([]) == compute_digest([torch.zeros(0)])
