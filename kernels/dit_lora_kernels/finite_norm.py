"""L2 norms of groups of tensors in one pass, each finite exactly if its elements are; for a check of gradients.

    norm[g] = sqrt(sum of x^2 over the elements x of the tensors of group g)

The caller assigns each tensor to a group, such as the gradients of one module. A finite norm here means a norm that is
NaN or Inf only if an element is. Plain norms are not: squares in fp32 overflow from 1.8e19 and vanish below 1e-23, and
norms in bf16 have 8 bits.

A chunk is up to CHUNK consecutive elements of one tensor, which one program reads. The program converts them to fp32
and multiplies them by a power of two, which rounds nothing: by 2^-72 if the chunk's largest magnitude is 2^56 or more,
by 2^88 if it is below 2^-40, else by 1. The sum of their squares then stays in range. The program stores the chunk's
norm in fp64, which holds every norm of fp32 elements. The norms of a group's chunks are combined in fp64 too, in a
fixed order. A NaN or Inf passes through every step. fp64 tensors are computed in fp64, with the same three factors.

A chunk table tells the programs of a launch what to read: it has one row per chunk, with the address of its first
element, its number of elements, and where to store its norm.

Memory traffic: every element is read once. A chunk reads 24 bytes of table and writes 8. The host waits for nothing.
Source: scaling as in J. L. Blue 1978, https://doi.org/10.1145/355769.355771; chunks as in torch._foreach_norm.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dit_lora_kernels.support import accumulation_triton_dtype, cdiv, launch, launches, op, tl, triton

# Elements that a program takes: 32 for each thread of its 4 warps.
CHUNK = 4096
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# 1. reference


def finite_norms_reference(tensors: Sequence[Tensor], groups: Sequence[int], count: int) -> Tensor:
    """Compute the L2 norm of each group's elements in plain torch and fp64, (count,), as the reference for the kernel.

    `groups[i]` is the group of `tensors[i]`, from 0 to count - 1. It needs at least one tensor.
    """
    squares = torch.zeros(count, dtype=torch.float64, device=tensors[0].device)
    for tensor, group in zip(tensors, groups, strict=True):
        squares[group] += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
    return squares.sqrt()


# 2. kernel


@triton.jit
def _chunk_norm_kernel(
    table_ptr, norms_ptr,
    CHUNK: tl.constexpr, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Store the L2 norm of one chunk, a run of up to CHUNK elements of one tensor, in fp64.

    A row (3,) of the table holds the address of the chunk's first element, its number of elements, and the index in
    `norms_ptr` at which its norm is stored.
    """
    # Addresses come from a table, so that one launch covers tensors of any number and size: gradients are many and
    # small.
    row = table_ptr + tl.program_id(0).to(tl.int64) * 3
    data = tl.load(row).to(tl.pointer_type(ELEMENT))
    elements = tl.load(row + 1)
    # Triton cannot know whether a loaded address allows 16-byte loads, so it is told.
    if ALIGNED:
        data = tl.multiple_of(data, 16)
        elements = tl.multiple_of(elements, 16)
    i = tl.arange(0, CHUNK)
    x = tl.load(data + i, mask=i < elements, other=0).to(ACC)
    # Powers of two change only the exponent. With a NaN, the sum is NaN whatever the largest element is.
    largest = tl.max(tl.abs(x), axis=0)
    tiny, huge = largest < 2.0**-40, largest >= 2.0**56
    x = x * tl.where(tiny, 2.0**88, tl.where(huge, 2.0**-72, 1.0))
    norm = tl.sqrt(tl.sum(x * x, axis=0)).to(tl.float64)
    norm = norm * tl.where(tiny, 2.0**-88, tl.where(huge, 2.0**72, 1.0)).to(tl.float64)
    tl.store(norms_ptr + tl.load(row + 2), norm)


# 3. launcher


FlatTensor = tuple[int, int, torch.dtype]
"""The address, the number of elements and the dtype of a contiguous tensor."""


def _build_chunk_table(rows: Sequence[tuple[int, int, int]], element_size: int) -> Tensor:
    """Build the table (chunks, 3) that the kernel reads, in int64 on the host.

    A chunk is a run of up to CHUNK elements of one tensor. Its row holds its address, its number of elements, and the
    index at which its norm is stored. `rows` has the address and number of elements of each tensor, and the index for
    its first chunk; its other chunks take the next indices.
    """
    address, size, norm_index = torch.tensor(rows, dtype=torch.int64).unbind(1)
    chunks = (size + CHUNK - 1) // CHUNK
    # Vectorised, because a model's gradients are thousands of chunks. `tensor_of_chunk` is the number of each chunk's
    # tensor, `index` the chunk's number within it.
    tensor_of_chunk = torch.repeat_interleave(chunks)
    index = torch.arange(len(tensor_of_chunk)) - (chunks.cumsum(0) - chunks)[tensor_of_chunk]
    remaining = size[tensor_of_chunk] - index * CHUNK
    start = address[tensor_of_chunk] + index * (CHUNK * element_size)
    return torch.stack([start, remaining.clamp(max=CHUNK), norm_index[tensor_of_chunk] + index], dim=1)


class _ChunkTables(NamedTuple):
    """The chunk tables of one call: `chunks` has one table for each launch, with its dtype and whether it is aligned.

    A chunk is a run of elements of one tensor, and a table has a row for each. Aligned chunks allow 16-byte loads.
    `longest` is the number of chunks of the group that has most, and so the width of the buffer of norms (groups,
    longest).
    """

    longest: int
    chunks: list[tuple[torch.dtype, bool, Tensor]]


def _build_tables(
    device: torch.device, groups: tuple[int, ...], count: int, flat: tuple[FlatTensor, ...]
) -> _ChunkTables:
    """Build the chunk tables of contiguous tensors and copy them to the device; see `_ChunkTables`.

    `flat` has each tensor's address, number of elements and dtype, and `groups` its group, from 0 to count - 1.
    """
    # The buffer of norms has one row per group, padded with zeros. A norm's index in it does not depend on the launch.
    used = [0] * count
    starts = []
    for (_, elements, _), group in zip(flat, groups, strict=True):
        starts.append(used[group])
        used[group] += cdiv(elements, CHUNK)
    longest = max(used)
    launched = defaultdict(list)
    for (address, elements, dtype), group, start in zip(flat, groups, starts, strict=True):
        if elements:
            aligned = address % 16 == 0 and elements % 16 == 0
            launched[dtype, aligned].append((address, elements, group * longest + start))
    chunks = []
    for (dtype, aligned), rows in launched.items():
        table = _build_chunk_table(rows, dtype.itemsize)
        if device.type == "cuda":  # pinned, so that the host does not wait for the copy
            table = table.pin_memory().to(device, non_blocking=True)
        chunks.append((dtype, aligned, table))
    return _ChunkTables(longest, chunks)


@functools.lru_cache(maxsize=4)
def _get_cached_tables(_stream: int, *args: Any) -> _ChunkTables:
    # Never stale: a table contains only these numbers, whatever tensors are at the addresses now. A table copied on
    # another stream might not have arrived yet, so the stream is part of the key.
    return _build_tables(*args)


def _launch(tensors: Sequence[Tensor], groups: Sequence[int], count: int) -> Tensor:
    """Compute the L2 norm of each group's elements, (count,) in fp64, with one kernel launch per dtype and alignment.

    `groups[i]` is the group of `tensors[i]`. The tensors are on the current device.
    """
    device = tensors[0].device
    # Held until everything is launched: the memory of a freed copy could be reused before.
    flat = [tensor.contiguous() for tensor in tensors]
    key = (device, tuple(groups), count, tuple((t.data_ptr(), t.numel(), t.dtype) for t in flat))
    on_gpu = device.type == "cuda"
    # During graph capture memory belongs to the graph, and copies exist only when it is replayed.
    if on_gpu and torch.cuda.is_current_stream_capturing():
        tables = _build_tables(*key)
    else:
        tables = _get_cached_tables(torch.cuda.current_stream().cuda_stream if on_gpu else 0, *key)
    norms = torch.zeros((count, tables.longest), dtype=torch.float64, device=device)
    for dtype, aligned, table in tables.chunks:
        # Triton's dtypes, of the elements at a loaded address, have the names of torch's.
        element = getattr(tl, str(dtype).removeprefix("torch."))
        launch(
            _chunk_norm_kernel, (len(table),), table, norms, CHUNK=CHUNK, ELEMENT=element, ALIGNED=aligned,
            ACC=accumulation_triton_dtype(dtype), num_warps=4,
        )  # fmt: skip
    # In fp64, where the squares of all norms of fp32 elements are in range.
    return norms.square().sum(1).sqrt()


# 4. op


@op("finite_norms")
def finite_norms_op(tensors: list[Tensor], groups: list[int], count: int) -> Tensor:
    """Compute the L2 norm of each group's elements, (count,) in fp64; this is the op that `finite_norms` calls.

    The op does not check its operands: `finite_norms` has done so. It needs at least one tensor.
    """
    if launches(tensors[0]):
        # The launcher asks for the current stream: it must be that of the tensors' GPU.
        with torch.cuda.device_of(tensors[0]):
            return _launch(tensors, groups, count)
    return finite_norms_reference(tensors, groups, count)


@finite_norms_op.register_fake
def _fake_finite_norms(tensors: list[Tensor], groups: list[int], count: int) -> Tensor:
    return tensors[0].new_empty(count, dtype=torch.float64)


def finite_norms(tensors: Sequence[Tensor], groups: Sequence[int], count: int) -> Tensor:
    """Compute the L2 norm of each group's elements, so that it is finite exactly if every element is.

    The result is not differentiable.

    Args:
        tensors: Tensors of any shapes and strides, in fp16, bf16, fp32 or fp64, on one device. Non-contiguous ones are
            copied.
        groups: The group of each tensor, from 0 to count - 1.
        count: The number of groups.

    Returns:
        Norms (count,) in fp64, on the tensors' device; without any tensor, zeros on the CPU. A norm is NaN or Inf
        exactly if an element is, and zero exactly if every element is; fp64 elements beyond fp32's range are an
        exception. Empty tensors and groups have the norm 0.

    Raises:
        ValueError: `groups` does not match the tensors, or the devices differ.
        TypeError: a tensor has another dtype.
    """
    if len(groups) != len(tensors):
        raise ValueError(f"groups must name a group for each of {len(tensors)} tensors; got {len(groups)}")
    for index, (tensor, group) in enumerate(zip(tensors, groups, strict=True)):
        if not 0 <= group < count:
            raise ValueError(f"groups[{index}] must be from 0 to {count - 1}; got {group}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"tensors[{index}] must be float16, bfloat16, float32 or float64; got {tensor.dtype}")
        if tensor.device != tensors[0].device:
            raise ValueError(
                f"all tensors must be on one device; tensors[0] is on {tensors[0].device}, and "
                f"tensors[{index}] on {tensor.device}"
            )
    if not tensors:  # an op of torch.library takes its device from a tensor
        return torch.zeros(count, dtype=torch.float64)
    # The op has no backward: its result must not ask for one, even of tensors that require gradients.
    with torch.no_grad():
        return finite_norms_op(list(tensors), list(groups), count)
