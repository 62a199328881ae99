"""Free memory of a device, whether an fp32 pass fits into it, and out-of-memory errors."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dit_lora.numerics.finite import HALF_DTYPES
from dit_lora.numerics.ranks import get_num_processes, is_true_on_all_ranks


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if this error, or one that caused it, says that device or host memory ran out."""
    while error is not None:
        # PyTorch has no error class for host memory (c10/core/impl/alloc_cpu.cpp).
        is_host_memory = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
        if is_host_memory or isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        # Libraries wrap the error in one of their own with `raise ... from`.
        error = error.__cause__
    return False


@contextmanager
def convert_to_out_of_memory_error() -> Iterator[None]:
    """Raise `torch.OutOfMemoryError` for host memory too, where PyTorch and Python raise other classes."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise torch.OutOfMemoryError(str(error) or "out of host memory") from error


def get_available_bytes(device: torch.device, num_processes: int) -> int:
    """Bytes that this process can still allocate on its device; of host memory, an equal share per process."""
    # Every process of this machine sees the same free host memory.
    if device.type != "cuda":
        try:
            import psutil
        # psutil is optional for the guard. Free pages do not count caches that the kernel could reclaim.
        except ImportError:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_processes
        available: int = psutil.virtual_memory().available
        return available // num_processes
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device)
    # Blocks that PyTorch's caching allocator holds without a tensor in them can be reused.
    return free + cached - torch.cuda.memory_allocated(device)


def has_memory_for_fp32(model: nn.Module, extra_bytes: int = 0) -> bool:
    """True if a forward and backward pass in fp32 surely fits into the memory of every rank. Collective.

    The estimate is an fp32 copy of all half-precision weights, all held until the backward pass, plus, on a GPU, twice
    the memory that steps have used so far, plus `extra_bytes`.
    """
    # 4 bytes per element of the fp32 copies.
    needed = extra_bytes + 4 * sum(p.numel() for p in model.parameters() if p.dtype in HALF_DTYPES)
    device = next(model.parameters()).device
    if device.type == "cuda":
        in_steps = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        needed += 2 * in_steps
    available = get_available_bytes(device, get_num_processes())
    # All ranks must take the same branch: a rank by itself would wait in a collective forward pass.
    return is_true_on_all_ranks(needed <= available)
