"""One digest of many tensors' bits, computed where they are: equal bits in equal order have equal digests."""

from collections.abc import Iterable

import torch

from dit_lora.numerics.frozen import tensor_digest

_BATCH = 1 << 23
"""Bytes that are put together: adapters have hundreds of small tensors, and a GPU waits for each launch."""


@torch.no_grad()
def digest(tensors: Iterable[torch.Tensor]) -> int:
    """The digest of all, a signed integer of 64 bits; one read of each device. Any one altered element changes it."""
    totals: dict[torch.device, torch.Tensor] = {}
    waiting: dict[torch.device, list[torch.Tensor]] = {}

    def count(device: torch.device) -> None:
        parts = waiting.pop(device)
        one = tensor_digest(torch.cat(parts) if len(parts) > 1 else parts[0])
        totals[device] = totals[device] * 3 + one if device in totals else one

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
    for one in totals.values():
        total = total * 3 + int(one.item())
    return (total + 2**63) % 2**64 - 2**63
