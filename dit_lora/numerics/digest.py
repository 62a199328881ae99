"""A 64-bit digest of many tensors' bits, computed on their devices. Equal bits in equal order have equal digests."""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

_BATCH_BYTES = 1 << 23
"""Bytes of small tensors that are concatenated first: adapters have hundreds, and each kernel launch costs time."""


_CHUNK_WORDS = 1 << 20  # words of 8 bytes at a time: 16 MiB of temporary memory


@cache
def _get_multipliers(device: torch.device) -> Tensor:
    """Random odd int64 numbers, the same in every process, cached on the device (8 MiB).

    Consecutive numbers would not do: if the sign bit flips in every element of a tensor whose size is a power of two,
    the changes cancel out.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    # Explicitly on the CPU, also if another default device is set.
    numbers = torch.empty(_CHUNK_WORDS, dtype=torch.int64, device="cpu")
    numbers.random_(-(2**63), 2**63 - 1, generator=generator)
    return (numbers | 1).to(device)


def compute_tensor_digest(tensor: Tensor) -> Tensor:
    """Digest of one tensor's bits and their order: an int64 scalar on the tensor's device.

    Each word of 8 bytes is multiplied by its own odd number, the upper half of the product is folded into the lower,
    and the results are summed modulo 2^64. Different tensors have the same digest only by chance. Without the fold,
    top bits that flip in an even number of words would cancel out.
    """
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    # Zero bytes up to the next multiple of 8.
    num_padding = -len(raw) % 8
    # Viewing as int64 needs 8-byte alignment; a copy has it.
    if num_padding or raw.data_ptr() % 8 or raw.storage_offset() % 8:
        raw = torch.cat([raw, raw.new_zeros(num_padding)])
    values = raw.view(torch.int64)
    # Odd numbers are invertible modulo 2^64: no change of a word is lost in the product.
    odd = _get_multipliers(values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for chunk in values.split(_CHUNK_WORDS):
        mixed = chunk * odd[: len(chunk)]
        # Times 3, so that chunks in a different order have a different sum.
        total = total * 3 + mixed.bitwise_xor_(mixed >> 32).sum()
    return total


@torch.no_grad()
def compute_digest(tensors: Iterable[torch.Tensor]) -> int:
    """Digest of all tensors in order: a signed 64-bit integer. Changing any one element changes it.

    Reads each device once.
    """
    totals: dict[torch.device, torch.Tensor] = {}
    pending: dict[torch.device, list[torch.Tensor]] = {}

    # Adds the collected tensors of one device to its total.
    def add_to_total(device: torch.device) -> None:
        parts = pending.pop(device)
        value = compute_tensor_digest(torch.cat(parts) if len(parts) > 1 else parts[0])
        totals[device] = totals[device] * 3 + value if device in totals else value

    for tensor in tensors:
        # An empty tensor has no bits.
        if not tensor.numel():
            continue
        raw = tensor.detach().contiguous().flatten().view(torch.uint8)
        parts = pending.get(raw.device, [])
        # The batch is full: digest it before this tensor starts the next one.
        if parts and sum(map(len, parts)) + len(raw) > _BATCH_BYTES:
            add_to_total(raw.device)
        pending.setdefault(raw.device, []).append(raw)
    # The last batch of each device.
    for device in list(pending):
        add_to_total(device)
    total = 0
    # Devices are combined in the order in which they first occurred.
    for device_total in totals.values():
        total = total * 3 + int(device_total.item())
    # Python's integers do not wrap around as the device's do.
    return (total + 2**63) % 2**64 - 2**63
