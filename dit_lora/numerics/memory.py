"""Bytes that are free on a device, and whether a pass in fp32 fits into them."""

import os

import torch
from torch import nn

from dit_lora.numerics.finite import HALVES
from dit_lora.numerics.ranks import gather_object, process_count


def available_bytes(device: torch.device, processes: int) -> int:
    """Return the bytes that this process finds free on its device; of host memory, its share among so many."""
    if device.type != "cuda":
        return _host_bytes() // processes
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device)
    # Blocks that PyTorch's allocator holds without a tensor in them are used again.
    return free + cached - torch.cuda.memory_allocated(device)


def _host_bytes() -> int:
    try:
        import psutil
    except (
        ImportError
    ):  # the guard alone needs it not: pages that are free, without those that caches would give up
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available: int = psutil.virtual_memory().available
    return available


def room_for_fp32(model: nn.Module) -> bool:
    """Return True if a pass in fp32 surely fits into the memory of every rank. Collective.

    It needs fp32 copies of all weights in half precision, as if none were let go before the backward pass, and on
    a GPU twice what steps have taken so far.
    """
    needed = 4 * sum(p.numel() for p in model.parameters() if p.dtype in HALVES)
    device = next(model.parameters()).device
    if device.type == "cuda":
        in_steps = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        needed += 2 * in_steps
    available = available_bytes(device, process_count())
    fits: list[bool] = gather_object([needed <= available])
    return all(fits)
