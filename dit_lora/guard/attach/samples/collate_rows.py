"""Find out which row of a collated batch is which dataset item, inside `collate_fn`, where the items still exist.

torch's `default_collate` keeps the order. Any other function may sort, drop, replace or pack items, so each row is
compared with the items by content. A row that does not match exactly one item stays unknown.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from dit_lora.guard.attach.containment import try_call
from dit_lora.guard.attach.samples.tensors import iter_tensors

Rows = tuple[int | None, ...]
"""For each row of a tensor, the position of its item in the batch, or None."""

_MAX_COMPARED = 4096
"""Maximum number of elements compared per row; evenly spaced in longer rows."""
_MAX_VECTORS = 16


@dataclass
class TaggedBatch:
    """Wrapper of a batch that records which row is which dataset item, between `collate_fn` and the loop.

    It is unwrapped before the loop receives the batch.
    """

    batch: Any
    rows: tuple[Rows | None, ...] | None
    """Items of the rows of each tensor, in the order of `iter_tensors`; None if unknown."""
    is_prebatched: bool = False
    """True if the dataset returns ready batches, so that its single item is the batch."""
    files: tuple[tuple[str, ...], ...] = ()
    """Files that the dataset opened for each item."""

    def pin_memory(self, device: Any = None) -> "TaggedBatch":
        """Pin the wrapped batch.

        The DataLoader's pinning thread calls this instead of the batch's own `pin_memory`.
        """
        return replace(self, batch=pin_memory(self.batch, device))


class TaggingCollate:
    """Replacement for a loader's `collate_fn` that also records which row of the batch is which dataset item.

    It can be pickled for spawned workers.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        self.collate_fn = collate_fn
        self.is_batched = is_batched

    def __call__(self, items: Any) -> TaggedBatch:
        # A collate function may sort or empty its argument, so copy the list first.
        original_items = list(items) if isinstance(items, list) else items
        batch = self.collate_fn(items)
        is_ready = isinstance(original_items, list) and len(original_items) == 1 and batch is original_items[0]
        return TaggedBatch(batch, try_call(lambda: self._match_batch_rows(original_items, batch)), is_ready)

    def _match_batch_rows(self, items: Any, batch: Any) -> tuple[Rows | None, ...] | None:
        if not isinstance(items, list) or not self.is_batched or not items:
            return None
        tensors = [tensor for _, tensor in iter_tensors(batch)]
        if len(items) == 1 and batch is items[0]:
            # The dataset returns ready batches: each row is a part of the single item.
            return tuple((0,) * len(tensor) if tensor.ndim else None for tensor in tensors)
        if self.collate_fn is default_collate:
            # default_collate stacks item i into row i.
            order = tuple(range(len(items)))
            return tuple(order if tensor.ndim and len(tensor) == len(items) else None for tensor in tensors)
        return match_rows_to_items(items, tensors)


def match_rows_to_items(items: Sequence[Any], tensors: Sequence[torch.Tensor]) -> tuple[Rows | None, ...]:
    """Match rows of tensors with items by content; rows may be padded at the start or end of each dimension.

    Returns for each tensor the positions of the rows' items, or None if no row matches exactly one item.
    """
    vectors: list[list[torch.Tensor]] = []
    for item in items:
        item_vectors: list[torch.Tensor] = []
        _collect_vectors(item, item_vectors, 0)
        vectors.append(item_vectors[:_MAX_VECTORS])
    # A collate function may pass on an item's tensor itself.
    owners = {id(t): n for n, item in enumerate(items) for _, t in iter_tensors(item)}
    return tuple(
        (owners[id(tensor)],) * len(tensor)
        if id(tensor) in owners and tensor.ndim
        else _match_tensor_rows(tensor, vectors)
        for tensor in tensors
    )


def _match_tensor_rows(tensor: torch.Tensor, vectors: Sequence[Sequence[torch.Tensor]]) -> Rows | None:
    if tensor.ndim == 0 or tensor.layout is not torch.strided or not len(tensor):
        return None
    rows = tensor.detach().cpu()
    # Each item's vectors with the same number; None for an item that has fewer.
    columns = list(zip_longest(*vectors))
    # They may have been concatenated, or padded and stacked.
    for match in (_match_concatenated_items, _match_rows_to_vectors):
        for column in columns:
            matched = match(rows, column)
            if matched is not None:
                return matched
    return None


def _match_concatenated_items(rows: torch.Tensor, vectors: Sequence[torch.Tensor | None]) -> Rows | None:
    """Match a tensor that concatenates one vector of each item, as patches, tokens and graphs are concatenated."""
    matched: list[int] = []
    for position, vector in enumerate(vectors):
        if vector is None or vector.ndim != rows.ndim or vector.shape[1:] != rows.shape[1:]:
            return None
        part = rows[len(matched) : len(matched) + len(vector)]
        if len(part) != len(vector) or _compute_digest(part) != _compute_digest(vector.to(rows.dtype)):
            return None
        matched += [position] * len(vector)
    return tuple(matched) if len(matched) == len(rows) else None


def _match_rows_to_vectors(rows: torch.Tensor, vectors: Sequence[torch.Tensor | None]) -> Rows | None:
    """Match each row with the only vector that has its content, in any order; None if no row matches."""
    # With many more rows than items, rows are something other than samples.
    if len(rows) > 4 * len(vectors):
        return None
    by_digest: dict[tuple[torch.Size, bytes], list[int]] = {}
    for position, vector in enumerate(vectors):
        if vector is not None and _can_match_vector_to_rows(vector, rows):
            key = (vector.shape, _compute_digest(vector.to(rows.dtype)))
            by_digest.setdefault(key, []).append(position)
    # Try the longest first: a short item may be a prefix of a longer one.
    shapes = sorted({shape for shape, _ in by_digest}, key=lambda shape: shape.numel(), reverse=True)
    matched = [_match_row_to_vector(row, shapes, by_digest) for row in rows]
    return tuple(matched) if any(position is not None for position in matched) else None


def _match_row_to_vector(
    row: torch.Tensor, shapes: Sequence[torch.Size], by_digest: Mapping[tuple[torch.Size, bytes], list[int]]
) -> int | None:
    for shape in shapes:
        # The row without its padding, which may be at the end or at the start of each dimension.
        start_part = row[tuple(slice(0, size) for size in shape)]
        end_part = row[tuple(slice(row.shape[d] - size, None) for d, size in enumerate(shape))]
        for part in (start_part, end_part) if shape != row.shape else (row,):
            positions = by_digest.get((shape, _compute_digest(part)))
            if positions is not None:
                # Equal items cannot be told apart.
                return positions[0] if len(positions) == 1 else None
    return None


def _can_match_vector_to_rows(vector: torch.Tensor, rows: torch.Tensor) -> bool:
    if vector.ndim != rows.ndim - 1 or vector.numel() == 0:
        return False
    # A single integer is too little to match on: labels repeat.
    if vector.numel() == 1 and not vector.is_floating_point():
        return False
    return all(size <= limit for size, limit in zip(vector.shape, rows.shape[1:], strict=True))


def _compute_digest(values: torch.Tensor) -> bytes:
    flat = values.reshape(-1)
    if flat.numel() > _MAX_COMPARED:
        # The step is rounded up, so that at most this many evenly spaced elements remain.
        flat = flat[:: -(-flat.numel() // _MAX_COMPARED)]
    # Compare bytes, so that NaN equals NaN.
    content = flat.contiguous().view(torch.uint8)
    # Without NumPy, which torch does not need, this is slower.
    return bytes(content.numpy()) if "numpy" in sys.modules else bytes(content.tolist())


def _collect_vectors(value: Any, vectors: list[torch.Tensor], depth: int) -> None:
    """Append the tensors, arrays and lists of numbers in an item to `vectors`."""
    if len(vectors) >= _MAX_VECTORS or depth > 4:
        return
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            vectors.append(value.detach().cpu())
    elif numpy is not None and isinstance(value, numpy.ndarray):
        # Floats, integers and booleans in the machine's byte order, as torch needs them.
        if value.dtype.kind in "fiub" and value.dtype.isnative:
            vectors.append(torch.from_numpy(value.copy()))
    elif isinstance(value, Mapping):
        for child in value.values():
            _collect_vectors(child, vectors, depth + 1)
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(number, (int, float)) for number in value):
            vectors.append(torch.tensor(value))
            return
        for child in value:
            _collect_vectors(child, vectors, depth + 1)
