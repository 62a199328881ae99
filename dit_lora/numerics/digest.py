"""One digest of many tensors' bits, computed where they are: equal bits in equal order have equal digests."""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

_BATCH = 1 << 23
"""Bytes that are put together: adapters have hundreds of small tensors, and a GPU waits for each launch."""


_CHUNK = 1 << 20  # words of 8 bytes at a time: 16 MiB of memory beside the tensor


@cache
def _multipliers(device: torch.device) -> Tensor:
    """Return odd numbers of 64 bits by chance, always the same, on the device: 8 MiB that stay there.

    Numbers in a row would not do: sign bits that flip in all of a tensor whose size is a power of two cancel out.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.empty(_CHUNK, dtype=torch.int64, device="cpu")  # whatever device is the default
    drawn.random_(-(2**63), 2**63 - 1, generator=generator)
    return (drawn | 1).to(device)


def tensor_digest(tensor: Tensor) -> Tensor:
    """Return an int64 scalar, on the tensor's device, of its bits and their places.

    The sum, modulo 2^64, of each 8 bytes times an odd number of their own, its upper half folded into the lower: two
    tensors have the same by chance alone. Without the fold, top bits that flip in an even number of words cancel out.
    """
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    rest = -len(raw) % 8
    # Words of 8 bytes need their alignment, which a copy has.
    if rest or raw.data_ptr() % 8 or raw.storage_offset() % 8:
        raw = torch.cat([raw, raw.new_zeros(rest)])
    words = raw.view(torch.int64)
    odd = _multipliers(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):
        mixed = chunk * odd[: len(chunk)]
        # Times 3, so that chunks in another order have another sum.
        total = total * 3 + mixed.bitwise_xor_(mixed >> 32).sum()
    return total


@torch.no_grad()
def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return the digest of all, a signed integer of 64 bits; one read of each device. Any one altered element
    changes it.
    """
    totals: dict[torch.device, torch.Tensor] = {}
    waiting: dict[torch.device, list[torch.Tensor]] = {}

    def count(device: torch.device) -> None:
        parts = waiting.pop(device)
        value = tensor_digest(torch.cat(parts) if len(parts) > 1 else parts[0])
        totals[device] = totals[device] * 3 + value if device in totals else value

    for tensor in tensors:
        if not tensor.numel():
            continue
        raw = tensor.detach().contiguous().flatten().view(torch.uint8)
        parts = waiting.get(raw.device, [])
        if parts and sum(map(len, parts)) + len(raw) > _BATCH:
            count(raw.device)
        waiting.setdefault(raw.device, []).append(raw)
    for device in list(waiting):
        count(device)
    total = 0
    for device_total in totals.values():
        total = total * 3 + int(device_total.item())
    # Python's integers do not wrap around as the device's do.
    return (total + 2**63) % 2**64 - 2**63
