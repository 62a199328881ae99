"""A digest changes with any bit, and with nothing else."""

import pytest
import torch

from dit_lora.numerics import digest as module
from dit_lora.numerics.digest import digest

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64]


def values(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(7, 3), (), (0, 4), (5,), (40,)]
    return [(100 * torch.rand(size, generator=generator)).to(dtype) for size in sizes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1 << 23, 32])
def test_any_bit_changes_it(
    dtype: torch.dtype, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first and last element of each tensor, lowest and highest bit, together and apart."""
    monkeypatch.setattr(module, "_BATCH", batch)
    before = digest(values(dtype))
    assert digest(values(dtype)) == before
    for number in (0, 1, 3, 4):
        for byte_index in (0, -1):
            for bit in (0, 7):
                changed = values(dtype)
                changed[number].view(-1).view(torch.uint8)[byte_index] ^= 1 << bit
                assert digest(changed) != before, (number, byte_index, bit)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(256, 64), (1, 298, 64), (1 << 21,), (7, 3)])
def test_signs_and_factors_of_whole_tensors_change_it(
    dtype: torch.dtype, size: tuple[int, ...]
) -> None:
    """Equal changes of very many words, which must not cancel out."""
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = digest([tensor])
    for changed in (
        -tensor,
        tensor.abs(),
        2 * tensor,
        torch.zeros_like(tensor),
        tensor.flip(0),
        -tensor.flip(-1),
    ):
        assert torch.equal(changed, tensor) is (digest([changed]) == before)
    assert digest([torch.full(size, -0.0, dtype=dtype)]) != digest([torch.zeros(size, dtype=dtype)])


def test_order_and_layout() -> None:
    entry, second = values(torch.float32)[:2]
    assert digest([entry, second]) != digest([second, entry])
    assert digest([entry.flatten().flip(0)]) != digest([entry])
    assert digest([entry.T.contiguous().T]) == digest([entry])
    mixed = [entry, torch.arange(3), entry.bfloat16()]
    assert digest(mixed) == digest([t.clone() for t in mixed])
    assert digest([torch.zeros(3), torch.tensor(-0.0)]) != digest([torch.zeros(3), torch.zeros(())])
    assert digest([]) == digest([torch.zeros(0)])
