"""Find out which row of a collated batch is which dataset item, where the items are still there: in `collate_fn`.

torch's own `default_collate` keeps the order. Any other may sort, drop, replace or pack items, so each row is compared
with the items by content. What is not matched by exactly one item stays unknown.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data._utils.collate import default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from dit_lora.guard.attach.containment import contain
from dit_lora.guard.attach.samples.tensors import iter_tensors

Rows = tuple[int | None, ...]
"""For each row of a tensor the position of its item in the batch, or None."""

_MAX_COMPARED = 4096
"""Elements of a row that are compared; of a longer row so many, evenly spread."""
_MAX_VECTORS = 16


@dataclass
class TaggedBatch:
    """A batch on its way from `collate_fn`, perhaps in a worker process, to the loop; the loop never sees this."""

    batch: Any
    rows: tuple[Rows | None, ...] | None
    """For each tensor of the batch, in the order of `iter_tensors`, its rows' items; None where nothing is known."""
    is_ready: bool = False
    """True if the dataset's one item is the batch."""
    files: tuple[tuple[str, ...], ...] = ()
    """Files that the dataset opened for each item."""

    def pin_memory(self, device: Any = None) -> "TaggedBatch":
        """Called by DataLoader's pinning thread in place of the batch's own."""
        return replace(self, batch=pin_memory(self.batch, device))


class TaggingCollate:
    """Calls a loader's `collate_fn` and notes which row is which item. Pickled for workers that are spawned."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        self.collate_fn = collate_fn
        self.is_batched = is_batched

    def __call__(self, items: Any) -> TaggedBatch:
        # A collate function may sort or empty its argument, so keep a list of one's own.
        kept = list(items) if isinstance(items, list) else items
        batch = self.collate_fn(items)
        is_ready = isinstance(kept, list) and len(kept) == 1 and batch is kept[0]
        return TaggedBatch(batch, contain(lambda: self._match(kept, batch)), is_ready)

    def _match(self, items: Any, batch: Any) -> tuple[Rows | None, ...] | None:
        if not isinstance(items, list):
            return None
        tensors = [tensor for _, tensor in iter_tensors(batch)]
        if not self.is_batched:
            return None
        if not items:
            return None
        if len(items) == 1 and (batch is items[0]):
            # A dataset of ready batches: each row is a part of the item.
            return tuple((0,) * len(tensor) if tensor.ndim else None for tensor in tensors)
        if self.collate_fn is default_collate:
            order = tuple(range(len(items)))
            return tuple(
                order if tensor.ndim and len(tensor) == len(items) else None for tensor in tensors
            )
        return match_rows(items, tensors)


def match_rows(items: Sequence[Any], tensors: Sequence[torch.Tensor]) -> tuple[Rows | None, ...]:
    """Match rows of tensors with items by content; rows may be padded at the end of each dimension, or in front.

    Returns for each tensor the items' positions, or None where no row is matched by exactly one item.
    """
    vectors = [_vectors(item) for item in items]
    owners = {id(t): n for n, item in enumerate(items) for _, t in iter_tensors(item)}
    return tuple(
        (owners[id(tensor)],) * len(tensor)
        if id(tensor) in owners and tensor.ndim
        else _match_tensor(tensor, vectors)
        for tensor in tensors
    )


def _match_tensor(tensor: torch.Tensor, vectors: Sequence[Sequence[torch.Tensor]]) -> Rows | None:
    if tensor.ndim == 0 or tensor.layout is not torch.strided or not len(tensor):
        return None
    rows = tensor.detach().cpu()
    for number in range(max(map(len, vectors), default=0)):
        joined = [held[number] if number < len(held) else None for held in vectors]
        matched = _match_joined(rows, joined)
        if matched is not None:
            return matched
    for number in range(max(map(len, vectors), default=0)):
        candidates = [held[number] if number < len(held) else None for held in vectors]
        matched = _match_vectors(rows, candidates)
        if matched is not None:
            return matched
    return None


def _match_joined(rows: torch.Tensor, vectors: Sequence[torch.Tensor | None]) -> Rows | None:
    """Match a tensor that joins one of each item, one after the other, as patches, tokens and graphs are joined."""
    matched: list[int] = []
    for position, vector in enumerate(vectors):
        if vector is None or vector.ndim != rows.ndim or vector.shape[1:] != rows.shape[1:]:
            return None
        part = rows[len(matched) : len(matched) + len(vector)]
        if len(part) != len(vector) or _digest(part) != _digest(vector.to(rows.dtype)):
            return None
        matched += [position] * len(vector)
    return tuple(matched) if len(matched) == len(rows) else None


def _match_vectors(rows: torch.Tensor, vectors: Sequence[torch.Tensor | None]) -> Rows | None:
    """Match each row with the one vector that has its content, in any order; None if no row is."""
    if len(rows) > 4 * len(vectors):
        return None
    by_digest: dict[tuple[torch.Size, bytes], list[int]] = {}
    for position, vector in enumerate(vectors):
        if vector is not None and _fits(vector, rows):
            key = (vector.shape, _digest(vector.to(rows.dtype)))
            by_digest.setdefault(key, []).append(position)
    # Longest first: a short item may be the beginning of a longer one.
    shapes = sorted(
        {shape for shape, _ in by_digest}, key=lambda shape: shape.numel(), reverse=True
    )
    matched = [_match_row(row, shapes, by_digest) for row in rows]
    return tuple(matched) if any(position is not None for position in matched) else None


def _match_row(
    row: torch.Tensor,
    shapes: Sequence[torch.Size],
    by_digest: Mapping[tuple[torch.Size, bytes], list[int]],
) -> int | None:
    for shape in shapes:
        starts = row[tuple(slice(0, size) for size in shape)]
        ends = row[tuple(slice(row.shape[d] - size, None) for d, size in enumerate(shape))]
        for part in (starts, ends) if shape != row.shape else (row,):
            positions = by_digest.get((shape, _digest(part)))
            if positions is not None:
                # Equal items cannot be told apart.
                return positions[0] if len(positions) == 1 else None
    return None


def _fits(vector: torch.Tensor, rows: torch.Tensor) -> bool:
    if vector.ndim != rows.ndim - 1 or vector.numel() == 0:
        return False
    # One number says too little: labels repeat.
    if vector.numel() == 1 and not vector.is_floating_point():
        return False
    return all(size <= limit for size, limit in zip(vector.shape, rows.shape[1:], strict=True))


def _digest(values: torch.Tensor) -> bytes:
    flat = values.reshape(-1)
    if flat.numel() > _MAX_COMPARED:
        flat = flat[:: -(-flat.numel() // _MAX_COMPARED)]
    content = flat.contiguous().view(torch.uint8)
    # torch runs without NumPy too, then more slowly.
    return bytes(content.numpy()) if "numpy" in sys.modules else bytes(content.tolist())


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _vectors(item: Any) -> list[torch.Tensor]:
    """The tensors, arrays and lists of numbers in an item, at most 16."""
    found: list[torch.Tensor] = []
    _collect_vectors(item, found, 0)
    return found[:_MAX_VECTORS]


def _collect_vectors(value: Any, found: list[torch.Tensor], depth: int) -> None:
    if len(found) >= _MAX_VECTORS or depth > 4:
        return
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            found.append(value.detach().cpu())
    elif _is_array(value):
        if value.dtype.kind in "fiub" and value.dtype.isnative:
            found.append(torch.from_numpy(value.copy()))
    elif isinstance(value, Mapping):
        for child in value.values():
            _collect_vectors(child, found, depth + 1)
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(number, (int, float)) for number in value):
            found.append(torch.tensor(value))
            return
        for child in value:
            _collect_vectors(child, found, depth + 1)
