"""Free bytes of a device, whether a pass in fp32 fits into them, and errors of memory that ran out."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dit_lora.numerics.finite import HALVES
from dit_lora.numerics.ranks import gather_object, process_count


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if memory of the device or the host ran out, in this error or in the one that caused it."""
    while error is not None:
        # PyTorch has no class of its own for host memory (c10/core/impl/alloc_cpu.cpp).
        of_host = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        if of_host or isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        error = error.__cause__
    return False


@contextmanager
def one_out_of_memory_error() -> Iterator[None]:
    """Raise `torch.OutOfMemoryError` within also for host memory, where PyTorch and Python raise other classes."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise torch.OutOfMemoryError(str(error) or "out of host memory") from error


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
