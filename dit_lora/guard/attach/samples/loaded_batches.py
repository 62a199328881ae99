"""The batches that a loop's loaders have handed out, and the proof that a row of some tensor is one of their items.

Nothing is concluded from order. A row is an item's if it lies in the memory of the batch's tensor, unchanged since the
loader handed it out, or if it has the content of exactly one item that was handed out.
"""

import re
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
from dit_lora.guard.attach.samples.opened_files import data_files, find_bad_files
from dit_lora.guard.attach.samples.tensors import iter_tensors
from dit_lora.numerics.finite import describe_bad

# Columns of a batch by which people know their samples; `__key__` is WebDataset's.
_NAME_COLUMNS = (
    *("id", "ids", "path", "paths", "file_name", "file_names", "filename", "filenames"),
    *("image_path", "image_paths", "video_path", "video_paths", "img_path", "__key__"),
)
_MAX_BATCHES = 256
_MAX_HELD = 8
_MAX_OBJECTS = 4
_MAX_HELD_BYTES = 256 * 2**20
_NUMBERED = re.compile(r"row \d+ of (micro-batch|dataset index) .*")
_OF_ITEM = re.compile(r"row \d+ of dataset index ")


def is_sample_name(name: str) -> bool:
    """True for a name that stays with a sample, False for the number of a row in one micro-batch."""
    return _NUMBERED.fullmatch(name) is None


def is_row_of_micro_batch(name: str) -> bool:
    """True for the number of a row in one micro-batch, which nothing more is known of."""
    return not is_sample_name(name) and not is_row_of_item(name)


def is_row_of_item(name: str) -> bool:
    """True for a row of a dataset's ready batch, whose number says little to its user."""
    return _OF_ITEM.match(name) is not None


def row_name(row: int, micro_step: int) -> str:
    return f"row {row} of micro-batch {micro_step}"


def index_name(dataset: Any, index: object) -> str | None:
    """The name of what `dataset[index]` returned; None for a stream, whose items have no index."""
    if isinstance(index, Mapping):  # a sampler may give descriptions of samples
        names = [f"{column} {index[column]}" for column in _NAME_COLUMNS if column in index]
        return names[0] if names else None
    if not isinstance(index, (int, str)) and not hasattr(index, "__index__"):
        return None
    inner: Any = dataset
    number: Any = index
    while isinstance(inner, Subset) and isinstance(number, int):
        inner, number = inner.dataset, inner.indices[number]
    if inner is not dataset:
        return f"dataset index {number} (index {index} of the Subset)"
    return f"dataset index {index}"


@dataclass
class _LoadedTensor:
    """One tensor of a batch as it was handed out."""

    path: str
    tensor: weakref.ref[torch.Tensor]
    version: int
    rows: Rows | None
    """The item of each row; None where that is not known."""

    def unchanged_tensor(self) -> torch.Tensor | None:
        """The tensor, if it is still there and nothing was written to it: else its rows prove nothing."""
        tensor = self.tensor()
        return tensor if tensor is not None and tensor._version == self.version else None


@dataclass
class LoadedBatch:
    """One batch as a loader handed it out."""

    item_names: tuple[str | None, ...]
    """Names of its items; empty where the loader knows none."""
    column_names: tuple[str, ...]
    """Names of its rows from a column such as `id` or `path`; empty where there is none."""
    item_files: tuple[tuple[str, ...], ...]
    """Files that the dataset opened for each item, as far as they were seen."""
    is_ready: bool
    """True if the dataset hands out ready batches: its one item has several samples."""
    tensors: list[_LoadedTensor]
    objects: list[Any] = field(default_factory=list)
    """The batch as the loop was given it, while it is one of the newest and has one item only."""
    number: int = -1
    """Number of batches that the loop took before it; -1 until the loop takes it."""

    def row_name(self, loaded: _LoadedTensor, row: int) -> str | None:
        """The name of a row of one of the batch's tensors, or None."""
        tensor = loaded.tensor()
        if self.column_names and tensor is not None and len(tensor) == len(self.column_names):
            return self.column_names[row]
        item = loaded.rows[row] if loaded.rows is not None else None
        if item is None or not self.item_names or self.item_names[item] is None:
            return None
        if self.is_ready and tensor is not None and self._is_batch(tensor):
            return f"row {row} of {self.item_names[item]}"
        return self.name_of_item(item)

    def name_of_item(self, item: int) -> str | None:
        """The name of an item, with the file that it was read from if that was only one."""
        name = self.item_names[item]
        files = data_files(self.item_files[item]) if item < len(self.item_files) else ()
        return f"{name} ({Path(files[0]).name})" if name and len(files) == 1 else name

    def _is_batch(self, tensor: torch.Tensor) -> bool:
        """True if the batch has another tensor with as many rows: then they are samples, and no channels, say."""
        others = [t for ref in self.tensors if (t := ref.tensor()) is not None and t.ndim]
        return len(tensor) > 1 and sum(len(other) == len(tensor) for other in others) > 1

    def bad_files(self) -> list[str]:
        """Names of the files of tensors that the batch was made of and that hold a value which is not finite."""
        files = [path for of_item in self.item_files for path in data_files(of_item)]
        return [f"file {Path(path).name}" for path in find_bad_files(files)]


@dataclass
class BadItem:
    """An item of a batch with a value that is not finite, or whose square overflows fp32."""

    name: str
    description: str


@dataclass
class LoadedBatches:
    """Remembers handed-out batches by weak references; of the newest, tensors in host memory are held."""

    _batches: deque[LoadedBatch] = field(default_factory=lambda: deque(maxlen=_MAX_BATCHES))
    _held: deque[tuple[list[torch.Tensor], int]] = field(default_factory=deque)
    _num_taken: int = 0
    _num_taken_at_call: int = 0
    _reads_ahead: bool = False
    """True once the loop took several batches before a call: it reads ahead, or drops some."""
    _begun: int | None = None
    """Number of the batch that a trainer said it begins with."""

    def add(
        self,
        batch: Any,
        dataset: Any,
        indices: Sequence[object],
        rows: tuple[Rows | None, ...] | None,
        files: Sequence[Sequence[str]] = (),
        is_ready: bool = False,
    ) -> LoadedBatch:
        """Remember a batch.

        Args:
            batch: What the loader hands out.
            dataset: Its dataset.
            indices: The items' indices in the dataset; empty where there are none.
            rows: The items of each tensor's rows.
            files: Files that the dataset opened for each item.
            is_ready: Whether the dataset itself hands out batches, so that its item has several samples.
        """
        found = list(iter_tensors(batch))
        names = tuple(index_name(dataset, index) for index in indices)
        tensors = _noted(found, rows)
        opened = tuple(tuple(paths) for paths in files)
        loaded = LoadedBatch(names, _names_in(batch), opened, is_ready, tensors)
        if len(names) == 1:
            loaded.objects.append(batch)
        self._batches.append(loaded)
        self._hold([tensor for _, tensor in found if tensor.device.type == "cpu"])
        return loaded

    def take(self, loaded: LoadedBatch) -> None:
        """Note that the loop was given this batch."""
        loaded.number = self._num_taken
        self._num_taken += 1
        for older in self._batches:
            if 0 <= older.number < loaded.number - _MAX_OBJECTS:
                older.objects.clear()

    def single_item(self, arguments: Iterable[int]) -> str | None:
        """The name of the only item of the batch that is itself one of these arguments, given by their ids."""
        wanted = set(arguments)
        for batch in reversed(self._batches):
            if len(batch.item_names) == 1 and any(id(held) in wanted for held in batch.objects):
                return batch.name_of_item(0)
        return None

    def take_given(self, batch: Any) -> None:
        """Note that a wrapper, which may fetch batches ahead and drop some, has given this one to the loop."""
        loaded = self.find_batch(batch)
        if loaded is None:
            self._num_taken += 1
        else:
            self.take(loaded)

    def add_copy(self, loaded: LoadedBatch, copy: Any) -> None:
        """Note that a batch goes on as a copy with the same structure."""
        found = list(iter_tensors(copy))
        if loaded.objects:
            loaded.objects.append(copy)
        known = {id(tensor.tensor()) for tensor in loaded.tensors}
        if len(found) == len(loaded.tensors) and any(id(t) not in known for _, t in found):
            rows = tuple(tensor.rows for tensor in loaded.tensors)
            loaded.tensors += _noted(found, rows)

    def note_copy(self, batch: Any, copy: Any) -> None:
        """Note that a batch goes on as a copy, on a device say."""
        loaded = self.find_batch(batch)
        if loaded is not None:
            self.add_copy(loaded, copy)

    def forget(self) -> None:
        """Let go of all batches."""
        self._batches.clear()
        self._held.clear()

    @property
    def has_batches(self) -> bool:
        return bool(self._batches)

    def find_batch(self, batch: Any) -> LoadedBatch | None:
        """The batch that one of these tensors is part of."""
        wanted = {id(tensor) for _, tensor in iter_tensors(batch)}
        for loaded in reversed(self._batches):
            if any(
                id(ref.tensor()) in wanted for ref in loaded.tensors if ref.tensor() is not None
            ):
                return loaded
        return None

    def begin(self, batch: Any) -> None:
        """Note which batch a trainer begins with, where it says so; all calls are of that batch until the next."""
        loaded = self.find_batch(batch)
        self._begun = loaded.number if loaded is not None else -1

    def batch_of_call(self) -> int | None:
        """Number of the batch that a call which begins now was made for, None where that is not certain.

        It is the one that the loop took last, if the loop takes one batch for each micro-batch and never reads ahead.
        """
        if self._begun is not None:
            return self._begun if self._begun >= 0 else None
        self._reads_ahead |= self._num_taken - self._num_taken_at_call > 1
        self._num_taken_at_call = self._num_taken
        return None if self._reads_ahead or not self._num_taken else self._num_taken - 1

    def find(self, values: torch.Tensor) -> str | None:
        """The name of the item that these values, one sample's part of some tensor, are proven to be."""
        name = self._by_memory(values)
        return name if name is not None else self._by_content(values)

    def bad_items(self, number: int | None) -> list[BadItem]:
        """Items with bad values in the batch of this number."""
        batches = [b for b in self._batches if number is not None and b.number == number]
        return _bad_items(batches[0]) if batches else []

    def batch_of(self, values: torch.Tensor) -> int | None:
        """Number of the batch in whose memory these values lie, unchanged; None if there is none."""
        found = self._place(values)
        return found[0].number if found is not None and found[0].number >= 0 else None

    def bad_files_of(self, values: torch.Tensor) -> list[str]:
        """Names of the bad files of the batch in whose memory these values lie; empty if there is none."""
        found = self._place(values)
        return found[0].bad_files() if found is not None else []

    def _by_memory(self, values: torch.Tensor) -> str | None:
        """The name of the item whose row, or rows, these values are in the batch's own memory."""
        found = self._place(values)
        if found is None:
            return None
        batch, loaded, rows = found
        names = {batch.row_name(loaded, row) for row in rows}
        return names.pop() if len(names) == 1 else None

    def _place(self, values: torch.Tensor) -> tuple[LoadedBatch, _LoadedTensor, range] | None:
        """The rows of a batch's tensor that these values are; the tensor is as the loader handed it out."""
        if values.numel() == 0 or values.layout is not torch.strided:
            return None
        storage = values.untyped_storage().data_ptr()
        for batch in reversed(self._batches):
            for loaded in batch.tensors:
                tensor = loaded.unchanged_tensor()
                if tensor is None or tensor.ndim == 0:
                    continue
                if tensor.layout is not torch.strided or values.dtype != tensor.dtype:
                    continue
                if tensor.untyped_storage().data_ptr() != storage:
                    continue
                rows = _rows_covered(tensor, values)
                if rows is not None:
                    return batch, loaded, rows
        return None

    def _by_content(self, row: torch.Tensor) -> str | None:
        """The name of the only item that was handed out and has this content."""
        if row.numel() < 2 or row.layout is not torch.strided:
            return None
        names: set[str | None] = set()
        for batch in self._batches:
            for loaded in batch.tensors:
                tensor = loaded.unchanged_tensor()
                if tensor is None or tensor.shape[1:] != row.shape or tensor.ndim == 0:
                    continue
                names |= {batch.row_name(loaded, n) for n in _equal_rows(tensor, row)}
        return names.pop() if len(names) == 1 else None

    def _hold(self, tensors: list[torch.Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors)
        self._held.append((tensors, size))
        while len(self._held) > 1 and (
            len(self._held) > _MAX_HELD or sum(held for _, held in self._held) > _MAX_HELD_BYTES
        ):
            self._held.popleft()


def _noted(
    found: Sequence[tuple[str, torch.Tensor]], rows: tuple[Rows | None, ...] | None
) -> list[_LoadedTensor]:
    known = rows if rows is not None and len(rows) == len(found) else (None,) * len(found)
    return [
        _LoadedTensor(path, weakref.ref(tensor), tensor._version, row_map)
        for (path, tensor), row_map in zip(found, known, strict=True)
    ]


def _rows_covered(tensor: torch.Tensor, values: torch.Tensor) -> range | None:
    """The rows of a tensor that values in its memory are: one row, or several, or all; None for any other part."""
    if tensor.shape == values.shape and tensor.data_ptr() == values.data_ptr():
        return range(len(tensor))
    if tensor.stride(0) == 0:
        return None
    distance = (values.data_ptr() - tensor.data_ptr()) // tensor.element_size()
    start, rest = divmod(distance, tensor.stride(0))
    is_row = values.shape == tensor.shape[1:] and values.stride() == tensor.stride()[1:]
    is_slice = values.shape[1:] == tensor.shape[1:] and values.stride() == tensor.stride()
    count = 1 if is_row else len(values) if is_slice and values.ndim else 0
    if rest or not count or not 0 <= start <= len(tensor) - count:
        return None
    return range(start, start + count)


def _equal_rows(tensor: torch.Tensor, row: torch.Tensor) -> list[int]:
    """The rows of a tensor with the same content, NaN equal to NaN."""
    if tensor.layout is not torch.strided:
        return []
    values = tensor.detach()
    if values.is_floating_point() != row.is_floating_point():
        return []
    wanted = row.detach().to(values.device)
    values = values.to(wanted.dtype)
    same = (values == wanted) | ((values != values) & (wanted != wanted))
    return same.reshape(len(values), -1).all(1).nonzero().flatten().tolist()


def _bad_items(batch: LoadedBatch) -> list[BadItem]:
    bad: list[BadItem] = []
    for loaded in batch.tensors:
        tensor = loaded.unchanged_tensor()
        if tensor is None or tensor.ndim == 0 or not tensor.is_floating_point():
            continue
        for row in bad_rows(tensor):
            name = batch.row_name(loaded, row)
            path = f"batch{loaded.path}" if loaded.path.startswith("[") else loaded.path
            description = describe_values(path or "the batch", tensor[row])
            bad.append(BadItem(name or "", description))
    names = list(dict.fromkeys(item.name for item in bad))
    if not any(map(is_row_of_item, names)):
        return bad
    files = batch.bad_files()
    if len(files) != len(names):
        return bad
    by_name = dict(zip(names, files, strict=True))
    return [BadItem(by_name[item.name], item.description) for item in bad]


def bad_rows(tensor: torch.Tensor) -> list[int]:
    """Rows with a value that is not finite or whose square overflows fp32, ascending."""
    if tensor.ndim == 0 or tensor.layout is not torch.strided or not tensor.numel():
        return []
    if not tensor.is_floating_point():
        return []
    limit = SQUARE_LIMIT if tensor.dtype is not torch.float64 else float("inf")
    peaks = tensor.detach().float().abs().reshape(len(tensor), -1).amax(1)
    return (~(peaks < limit)).nonzero().flatten().tolist()


def describe_values(name: str, values: torch.Tensor) -> str:
    """`x has 1 NaN among 3 values`, or that it reaches a magnitude whose square overflows fp32."""
    description = describe_bad(name, values)
    if description is not None:
        return description
    peak = float(values.detach().float().abs().max())
    return f"{name} reaches {peak:.3g}, whose square overflows fp32"


def _names_in(batch: Any) -> tuple[str, ...]:
    """Names of the rows from the first column of the batch that holds such, also of a batch inside a list."""
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
