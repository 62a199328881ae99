"""A digest of tensors' bits in 64 bits, computed where they are: equal bits have equal digests.

A single element that differs always changes it; of several, one in 2^64 sets goes unseen. What adds up is exact, so
that neither the device nor the order of sums shows in it.
"""

from collections.abc import Iterable

import torch

_CHUNK = 2**20
"""Elements that are widened at a time: 32 MiB beside the tensors, whatever their size."""
_MIX = -7046029254386353131  # 2^64 over the golden ratio, as a signed number
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensors: Iterable[torch.Tensor]) -> int:
    """The digest of these tensors in this order, a signed integer of 64 bits; one read of each device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
        kinds.setdefault((bits.device, bits.dtype), []).append(bits)
    sums = [_sum(parts) for parts in kinds.values()]
    total = sum(int(one.item()) * (2 * place + 1) for place, one in enumerate(sums))
    return (total + 2**63) % 2**64 - 2**63


def _sum(flat: list[torch.Tensor]) -> torch.Tensor:
    """Of each element's bits times an odd number of its place, modulo 2^64."""
    total = torch.zeros((), dtype=torch.int64, device=flat[0].device)
    place, batch = 0, _Batch()
    for tensor in flat:
        for part in tensor.split(_CHUNK):
            if batch.count + len(part) > _CHUNK:
                total += batch.sum(place)
                place, batch = place + batch.count, _Batch()
            batch.add(part)
    return total + batch.sum(place) if batch.count else total


class _Batch:
    """Parts of tensors that are summed in one go: adapters have hundreds of small ones."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []
        self.count = 0

    def add(self, part: torch.Tensor) -> None:
        self.parts.append(part)
        self.count += len(part)

    def sum(self, first: int) -> torch.Tensor:
        values = torch.cat(self.parts).long()
        places = torch.arange(first, first + self.count, device=values.device)
        return (values * (places * _MIX | 1)).sum()
