"""The batches that a loop's loaders have returned, and the proof that a row of some tensor is one of their items.

Nothing is concluded from order. A row is an item's if it lies in the memory of the batch's tensor, unchanged since the
loader returned it, or if its content matches exactly one returned item.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from dit_lora.guard.attach.finite_values import SQUARE_LIMIT
from dit_lora.guard.attach.samples.collate_rows import Rows
from dit_lora.guard.attach.samples.opened_files import find_bad_files, select_data_files
from dit_lora.guard.attach.samples.row_names import is_item_row
from dit_lora.guard.attach.samples.tensors import iter_tensors
from dit_lora.numerics.finite import describe_bad_values

# Batch columns that identify a sample to its user; `__key__` is WebDataset's.
_NAME_COLUMNS = (
    *("id", "ids", "path", "paths", "file_name", "file_names", "filename", "filenames"),
    *("image_path", "image_paths", "video_path", "video_paths", "img_path", "__key__"),
)
# Batches to remember; batches whose tensors are kept alive; batches whose objects are kept.
_MAX_BATCHES = 256
_MAX_KEPT_BATCHES = 8
_MAX_OBJECTS = 4
_MAX_KEPT_BYTES = 256 * 2**20


def format_index_name(dataset: Any, index: object) -> str | None:
    """Name of the item `dataset[index]`; None for a stream, whose items have no index."""
    if isinstance(index, Mapping):  # a sampler may give descriptions of samples
        names = [f"{column} {index[column]}" for column in _NAME_COLUMNS if column in index]
        return names[0] if names else None
    if not isinstance(index, (int, str)) and not hasattr(index, "__index__"):
        return None
    inner: Any = dataset
    number: Any = index
    # Subsets may be nested; the user knows the index in the innermost dataset.
    while isinstance(inner, Subset) and isinstance(number, int):
        inner, number = inner.dataset, inner.indices[number]
    if inner is not dataset:
        return f"dataset index {number} (index {index} of the Subset)"
    return f"dataset index {index}"


@dataclass
class _LoadedTensor:
    """Weak reference to one tensor of a batch as the data loader returned it, with the dataset items of its rows."""

    path: str
    tensor: weakref.ref[torch.Tensor]
    version: int
    rows: Rows | None
    """The item of each row; None if unknown."""

    def get_unmodified_tensor(self) -> torch.Tensor | None:
        """The loaded tensor if it is alive and unmodified; otherwise None, because its rows prove nothing."""
        tensor = self.tensor()
        return tensor if tensor is not None and tensor._version == self.version else None


@dataclass
class LoadedBatch:
    """One batch as a data loader returned it, with its items' names and files."""

    item_names: tuple[str | None, ...]
    """Names of its items; empty if they are unknown."""
    column_names: tuple[str, ...]
    """Names of its rows from a column such as `id` or `path`; empty without such a column."""
    item_files: tuple[tuple[str, ...], ...]
    """Files that the dataset was seen to open for each item."""
    is_prebatched: bool
    """True if the dataset returns ready batches: its single item has several samples."""
    tensors: list[_LoadedTensor]
    objects: list[Any] = field(default_factory=list)
    """The batch as the loop received it, kept only for recent batches with a single item."""
    number: int = -1
    """Number of batches that the loop took before it; -1 until the loop takes it."""

    def find_row_name(self, loaded: _LoadedTensor, row: int) -> str | None:
        """Name of the dataset item in a row of one of the batch's tensors, or None."""
        tensor = loaded.tensor()
        if self.column_names and tensor is not None and len(tensor) == len(self.column_names):
            return self.column_names[row]
        item = loaded.rows[row] if loaded.rows is not None else None
        if item is None or not self.item_names or self.item_names[item] is None:
            return None
        # The only item is a whole batch, so its name does not identify a row.
        if self.is_prebatched and tensor is not None:
            lengths = [len(t) for ref in self.tensors if (t := ref.tensor()) is not None and t.ndim]
            # Another tensor has as many rows, so they are samples and not, for example, channels.
            if len(tensor) > 1 and lengths.count(len(tensor)) > 1:
                return f"row {row} of {self.item_names[item]}"
        return self.find_item_name(item)

    def find_item_name(self, item: int) -> str | None:
        """Name of an item of the batch, with its file if it was read from exactly one."""
        name = self.item_names[item]
        files = select_data_files(self.item_files[item]) if item < len(self.item_files) else ()
        return f"{name} ({Path(files[0]).name})" if name and len(files) == 1 else name

    def list_bad_files(self) -> list[str]:
        """Names of the batch's data files that hold a value which is not finite. Reads the files again."""
        files = [path for item_paths in self.item_files for path in select_data_files(item_paths)]
        return [f"file {Path(path).name}" for path in find_bad_files(files)]


@dataclass
class LoadedBatches:
    """Remembers the batches that data loaders returned, by weak references.

    Tensors of the newest batches in host memory are kept alive.
    """

    _batches: deque[LoadedBatch] = field(default_factory=lambda: deque(maxlen=_MAX_BATCHES))
    _kept_tensors: deque[tuple[list[torch.Tensor], int]] = field(default_factory=deque)
    _num_taken: int = 0
    _num_taken_at_call: int = 0
    _is_prefetching: bool = False
    """True once the loop took several batches before a call, because it prefetches or drops batches."""
    _announced_number: int | None = None
    """Number of the batch that a trainer has announced as the current one; -1 if it is not known here."""

    def record_loaded_batch(
        self,
        batch: Any,
        dataset: Any,
        indices: Sequence[object],
        rows: tuple[Rows | None, ...] | None,
        files: Sequence[Sequence[str]] = (),
        is_prebatched: bool = False,
    ) -> LoadedBatch:
        """Remember a batch that a data loader returns.

        Args:
            batch: The batch that the loader returns.
            dataset: Its dataset.
            indices: The items' indices in the dataset; empty if there are none.
            rows: The items of each tensor's rows.
            files: Files that the dataset opened for each item.
            is_prebatched: Whether the dataset itself returns batches, so that its item has several samples.
        """
        named_tensors = list(iter_tensors(batch))
        names = tuple(format_index_name(dataset, index) for index in indices)
        tensors = _record_tensors(named_tensors, rows)
        opened = tuple(tuple(paths) for paths in files)
        loaded = LoadedBatch(names, _read_column_names(batch), opened, is_prebatched, tensors)
        if len(names) == 1:
            loaded.objects.append(batch)
        self._batches.append(loaded)
        cpu_tensors = [tensor for _, tensor in named_tensors if tensor.device.type == "cpu"]
        self._kept_tensors.append((cpu_tensors, sum(tensor.nbytes for tensor in cpu_tensors)))
        # The newest batch always stays, however large it is.
        while len(self._kept_tensors) > 1 and (
            len(self._kept_tensors) > _MAX_KEPT_BATCHES
            or sum(num_bytes for _, num_bytes in self._kept_tensors) > _MAX_KEPT_BYTES
        ):
            self._kept_tensors.popleft()
        return loaded

    def mark_batch_received(self, loaded: LoadedBatch) -> None:
        """Record that the loop received this batch from the data loader."""
        loaded.number = self._num_taken
        self._num_taken += 1
        # Release the objects of all but the last few batches.
        for older in self._batches:
            if 0 <= older.number < loaded.number - _MAX_OBJECTS:
                older.objects.clear()

    def find_single_item_name(self, passed_ids: Iterable[int]) -> str | None:
        """Name of the only item of a batch, if that item itself was passed to the model; else None.

        `passed_ids` are the `id()` of the call's arguments.
        """
        argument_ids = set(passed_ids)
        for batch in reversed(self._batches):
            if len(batch.item_names) == 1 and any(
                id(passed_object) in argument_ids for passed_object in batch.objects
            ):
                return batch.find_item_name(0)
        return None

    def mark_batch_forwarded(self, batch: Any) -> None:
        """Record that a wrapper, which may prefetch or drop batches, passed this batch to the loop."""
        loaded = self.find_batch(batch)
        if loaded is None:
            self._num_taken += 1
        else:
            self.mark_batch_received(loaded)

    def record_batch_copy(self, batch: Any, copy: Any) -> None:
        """Record a copy of a batch with the same structure, for example on a device."""
        loaded = self.find_batch(batch)
        if loaded is None:
            return
        named_tensors = list(iter_tensors(copy))
        if loaded.objects:
            loaded.objects.append(copy)
        known_ids = {id(tensor.tensor()) for tensor in loaded.tensors}
        if len(named_tensors) == len(loaded.tensors) and any(id(t) not in known_ids for _, t in named_tensors):
            rows = tuple(tensor.rows for tensor in loaded.tensors)
            loaded.tensors += _record_tensors(named_tensors, rows)

    def clear_batches(self) -> None:
        self._batches.clear()
        self._kept_tensors.clear()

    @property
    def has_batches(self) -> bool:
        return bool(self._batches)

    def find_batch(self, batch: Any) -> LoadedBatch | None:
        """The batch that one of these tensors belongs to; None if there is none."""
        tensor_ids = {id(tensor) for _, tensor in iter_tensors(batch)}
        for loaded in reversed(self._batches):
            if any(id(ref.tensor()) in tensor_ids for ref in loaded.tensors if ref.tensor() is not None):
                return loaded
        return None

    def set_current_batch(self, batch: Any) -> None:
        """Record the current batch of a trainer that announces it: calls until the next announcement belong to it."""
        loaded = self.find_batch(batch)
        self._announced_number = loaded.number if loaded is not None else -1

    def get_current_batch_number(self) -> int | None:
        """Number of the batch of a call that starts now; None if it is not certain.

        It is the batch that the loop took last, if the loop takes one batch per micro-batch and never prefetches.
        """
        if self._announced_number is not None:
            return self._announced_number if self._announced_number >= 0 else None
        # A loop that takes several batches per call prefetches, or drops some.
        self._is_prefetching |= self._num_taken - self._num_taken_at_call > 1
        self._num_taken_at_call = self._num_taken
        return None if self._is_prefetching or not self._num_taken else self._num_taken - 1

    def find_item_name(self, values: torch.Tensor) -> str | None:
        """Name of the dataset item that one sample's part of a tensor is proven to be; else None."""
        match = self._find_containing_batch(values)
        if match is not None:
            batch, loaded, rows = match
            names = {batch.find_row_name(loaded, row) for row in rows}
            name = names.pop() if len(names) == 1 else None
            if name is not None:
                return name
        return self._find_item_by_content(values)

    def find_bad_items(self, number: int | None) -> list[tuple[str, str]]:
        """Names and descriptions of the bad values in the batch with this number."""
        batches = [b for b in self._batches if number is not None and b.number == number]
        return _collect_bad_items(batches[0]) if batches else []

    def find_batch_number(self, values: torch.Tensor) -> int | None:
        """Number of the batch in whose memory these values lie, unchanged; None if there is none."""
        match = self._find_containing_batch(values)
        return match[0].number if match is not None and match[0].number >= 0 else None

    def list_bad_files(self, values: torch.Tensor) -> list[str]:
        """Names of the bad files of the batch in whose memory these values lie; empty if there is none."""
        match = self._find_containing_batch(values)
        return match[0].list_bad_files() if match is not None else []

    def _find_containing_batch(self, values: torch.Tensor) -> tuple[LoadedBatch, _LoadedTensor, range] | None:
        """Find the loaded batch, tensor and rows that a tensor is a view of.

        None if it is not a view, or if the loaded tensor was written to.
        """
        if values.numel() == 0 or values.layout is not torch.strided:
            return None
        # A view has the storage of the tensor that it was taken from.
        storage = values.untyped_storage().data_ptr()
        for batch in reversed(self._batches):
            for loaded in batch.tensors:
                tensor = loaded.get_unmodified_tensor()
                if tensor is None or tensor.ndim == 0:
                    continue
                if tensor.layout is not torch.strided or values.dtype != tensor.dtype:
                    continue
                if tensor.untyped_storage().data_ptr() != storage:
                    continue
                rows = _find_rows_sharing_memory(tensor, values)
                if rows is not None:
                    return batch, loaded, rows
        return None

    def _find_item_by_content(self, row: torch.Tensor) -> str | None:
        """Name of the only loaded item with the same content as this row; None unless exactly one matches."""
        # A single number is too little to identify an item by.
        if row.numel() < 2 or row.layout is not torch.strided:
            return None
        names: set[str | None] = set()
        for batch in self._batches:
            for loaded in batch.tensors:
                tensor = loaded.get_unmodified_tensor()
                if tensor is None or tensor.shape[1:] != row.shape or tensor.ndim == 0:
                    continue
                names |= {batch.find_row_name(loaded, n) for n in _find_equal_rows(tensor, row)}
        return names.pop() if len(names) == 1 else None


def _record_tensors(
    named_tensors: Sequence[tuple[str, torch.Tensor]], rows: tuple[Rows | None, ...] | None
) -> list[_LoadedTensor]:
    tensor_rows = rows if rows is not None and len(rows) == len(named_tensors) else (None,) * len(named_tensors)
    return [
        _LoadedTensor(path, weakref.ref(tensor), tensor._version, row_map)
        for (path, tensor), row_map in zip(named_tensors, tensor_rows, strict=True)
    ]


def _find_rows_sharing_memory(tensor: torch.Tensor, values: torch.Tensor) -> range | None:
    """Rows of a tensor that `values`, a view of it, cover: one, several or all; None for any other part."""
    if tensor.shape == values.shape and tensor.data_ptr() == values.data_ptr():
        return range(len(tensor))
    if tensor.stride(0) == 0:
        return None
    # In elements. A row starts at a multiple of the first dimension's stride.
    distance = (values.data_ptr() - tensor.data_ptr()) // tensor.element_size()
    start, remainder = divmod(distance, tensor.stride(0))
    # `tensor[i]` has lost the first dimension; `tensor[i:j]` still has it.
    is_row = values.shape == tensor.shape[1:] and values.stride() == tensor.stride()[1:]
    is_slice = values.shape[1:] == tensor.shape[1:] and values.stride() == tensor.stride()
    count = 1 if is_row else len(values) if is_slice and values.ndim else 0
    if remainder or not count or not 0 <= start <= len(tensor) - count:
        return None
    return range(start, start + count)


def _find_equal_rows(tensor: torch.Tensor, row: torch.Tensor) -> list[int]:
    """Numbers of the rows of a tensor with the same content; NaN equals NaN."""
    if tensor.layout is not torch.strided or tensor.is_floating_point() != row.is_floating_point():
        return []
    expected = row.detach().to(tensor.device)
    values = tensor.detach().to(expected.dtype)
    is_equal_element = (values == expected) | ((values != values) & (expected != expected))
    return is_equal_element.reshape(len(values), -1).all(1).nonzero().flatten().tolist()


def _collect_bad_items(batch: LoadedBatch) -> list[tuple[str, str]]:
    bad: list[tuple[str, str]] = []
    for loaded in batch.tensors:
        tensor = loaded.get_unmodified_tensor()
        if tensor is None or tensor.ndim == 0 or not tensor.is_floating_point():
            continue
        for row in find_bad_rows(tensor):
            name = batch.find_row_name(loaded, row)
            path = f"batch{loaded.path}" if loaded.path.startswith("[") else loaded.path
            description = describe_values(path or "the batch", tensor[row])
            bad.append((name or "", description))
    names = list(dict.fromkeys(name for name, _ in bad))
    if not any(map(is_item_row, names)):
        return bad
    files = batch.list_bad_files()
    if len(files) != len(names):
        return bad
    file_by_name = dict(zip(names, files, strict=True))
    return [(file_by_name[name], description) for name, description in bad]


def find_bad_rows(tensor: torch.Tensor) -> list[int]:
    """Numbers of the rows with a value that is not finite or whose square overflows fp32, ascending."""
    if tensor.ndim == 0 or tensor.layout is not torch.strided:
        return []
    if not tensor.numel() or not tensor.is_floating_point():
        return []
    # fp64 can hold the squares.
    limit = SQUARE_LIMIT if tensor.dtype is not torch.float64 else float("inf")
    # (B, ...) -> (B,): the largest magnitude of each row.
    peaks = tensor.detach().float().abs().reshape(len(tensor), -1).amax(1)
    # `not <` is also true for NaN.
    return (~(peaks < limit)).nonzero().flatten().tolist()


def describe_values(name: str, values: torch.Tensor) -> str:
    """Text such as `x has 1 NaN among 3 values`, or that a value's square overflows fp32."""
    description = describe_bad_values(name, values)
    if description is not None:
        return description
    peak = float(values.detach().float().abs().max())
    return f"{name} reaches {peak:.3g}, whose square overflows fp32"


def _read_column_names(batch: Any) -> tuple[str, ...]:
    """Names of a batch's rows, from its first column that holds names; also searches dicts inside a list."""
    # Batches are dicts, or short tuples that contain one.
    parts = [batch, *batch] if isinstance(batch, (list, tuple)) and len(batch) <= 8 else [batch]
    for columns in parts:
        if not isinstance(columns, Mapping):
            continue
        for column in _NAME_COLUMNS:
            values = columns.get(column)
            if isinstance(values, torch.Tensor) and values.ndim == 1 and column in ("id", "ids"):
                values = values.tolist()
            if not isinstance(values, (list, tuple)) or not values:
                continue
            if all(isinstance(value, (str, int)) for value in values):
                return tuple(f"{column} {value}" for value in values)
    return ()
