"""Follow every DataLoader of a process: find which dataset indices each returned batch consists of.

torch returns batches in the order of its sampler, even from workers that prefetch. Each iterator is followed
separately, from its first index. Wrappers such as Accelerate's iterate a torch loader, so they are followed too.
"""

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import Any

from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from dit_lora.guard.attach.containment import try_or_warn, warn_on_error
from dit_lora.guard.attach.interception import MethodInterceptions
from dit_lora.guard.attach.samples.collate_rows import TaggedBatch, TaggingCollate
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches
from dit_lora.guard.attach.samples.opened_files import record_opened_files
from dit_lora.guard.attach.samples.tensors import iter_tensors

_followers: "weakref.WeakSet[DataLoaderBatchRecorder]" = weakref.WeakSet()
_is_unwrapping = False


def _patch_iterators_to_unwrap() -> None:
    """Make DataLoader iterators unwrap the batches to which the guard has attached dataset indices.

    This is never undone: an iterator that a guard follows yields wrapped batches even after the guard is gone.
    """
    global _is_unwrapping
    if _is_unwrapping:
        return
    _is_unwrapping = True
    original = _BaseDataLoaderIter.__next__

    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        batch = None
        try:
            batch = original(iterator)
        finally:
            if batch is None:
                for loaders in list(_followers):
                    loaders.drop_oldest_batch_index(iterator)
        if type(batch) is not TaggedBatch:
            return batch
        for loaders in list(_followers):
            loaders.record_batch(iterator, batch)
        return batch.batch

    setattr(_BaseDataLoaderIter, "__next__", next_batch)  # noqa: B010  mypy takes no assignment to a method


class _FileRecordingDataset:
    """Wrapper of a dataset while a batch is fetched, which records the files that each item was read from."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.files: list[tuple[str, ...]] = []
        # torch looks for this method on the instance and prefers it.
        if getattr(dataset, "__getitems__", None):
            # All items are read in one call, so files cannot be matched with items.
            self.__getitems__ = dataset.__getitems__

    def __getitem__(self, index: Any) -> Any:
        with record_opened_files() as paths:
            item = self._dataset[index]
        self.files.append(tuple(paths))
        return item


class DataLoaderBatchRecorder:
    """Records every batch that the followed DataLoaders return."""

    def __init__(self, batches: LoadedBatches) -> None:
        self.batches = batches
        self._follows_accelerate = False
        self._pending_indices: MutableMapping[Any, deque[Any]] = weakref.WeakKeyDictionary()
        """Sampled indices that no batch has been returned for yet, by iterator."""
        self._wrapper_depth = 0
        """Number of Accelerate wrappers that are fetching. They pass the batch, or a copy, to the loop later."""

    def patch_dataloaders(self, interceptions: MethodInterceptions) -> None:
        """Start following all DataLoaders of the process. Iterators that already exist are not followed."""
        _followers.add(self)
        self._follows_accelerate = False
        interceptions.intercept_function(_BaseDataLoaderIter, "__init__", self._intercept_init)
        interceptions.intercept_function(_BaseDataLoaderIter, "_reset", self._intercept_reset)
        interceptions.intercept_function(_BaseDataLoaderIter, "_next_index", self._intercept_next_index)
        _patch_iterators_to_unwrap()
        # This also applies to worker processes that are forked later.
        interceptions.intercept_function(_MapDatasetFetcher, "fetch", self._intercept_fetch)
        self.follow_accelerate_loaders(interceptions)

    def follow_accelerate_loaders(self, interceptions: MethodInterceptions) -> None:
        """Follow Accelerate's loaders, once Accelerate is imported: they fetch a batch ahead of the loop."""
        module = sys.modules.get("accelerate.data_loader")
        if module is not None and not self._follows_accelerate:
            self._follows_accelerate = True
            interceptions.intercept_function(module.DataLoaderShard, "__iter__", self._iterate_wrapped_batches)
            interceptions.intercept_function(module, "send_to_device", self._intercept_device_copy)

    def _iterate_wrapped_batches(self, original: Callable[..., Iterator[Any]], loader: Any) -> Iterator[Any]:
        batches = original(loader)
        while True:
            self._wrapper_depth += 1
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._wrapper_depth -= 1
            try_or_warn(partial(self.batches.mark_batch_forwarded, batch), "following an Accelerate loader")
            yield batch

    def _intercept_device_copy(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        copy = original(batch, *args, **kwargs)
        try_or_warn(partial(self.batches.record_batch_copy, batch, copy), "following a batch to a device")
        return copy

    def _intercept_init(
        self, original: Callable[..., None], iterator: Any, loader: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(iterator, loader, *args, **kwargs)
        self._pending_indices[iterator] = deque()
        # Replace only the iterator's reference: the loader keeps its original function.
        iterator._collate_fn = TaggingCollate(iterator._collate_fn, is_batched=iterator._auto_collation)

    def _intercept_fetch(self, original: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        """Record which files the dataset opens for each item of a batch that is fetched."""
        if not isinstance(fetcher.collate_fn, TaggingCollate):
            return original(fetcher, index)
        dataset = fetcher.dataset
        observed = _FileRecordingDataset(dataset)
        fetcher.dataset = observed
        try:
            tagged = original(fetcher, index)
        finally:
            fetcher.dataset = dataset
        if isinstance(tagged, TaggedBatch):
            # Files travel with the batch, since a worker is another process.
            tagged.files = tuple(observed.files)
        return tagged

    def _intercept_reset(self, original: Callable[..., None], iterator: Any, *args: Any, **kwargs: Any) -> None:
        """Forget the indices of the last epoch when a DataLoader with persistent workers starts a new one."""
        if iterator in self._pending_indices:
            self._pending_indices[iterator].clear()
        original(iterator, *args, **kwargs)

    def _intercept_next_index(self, original: Callable[..., Any], iterator: Any) -> Any:
        index = original(iterator)
        if iterator in self._pending_indices:
            self._pending_indices[iterator].append(index)
        return index

    def drop_oldest_batch_index(self, iterator: Any) -> None:
        """Drop the oldest batch index, after the dataset or a worker failed to produce that batch."""
        if self._pending_indices.get(iterator):
            self._pending_indices[iterator].popleft()

    @warn_on_error("following a DataLoader")
    def record_batch(self, iterator: Any, batch: TaggedBatch) -> None:
        if iterator not in self._pending_indices:
            return  # the iterator started before this guard
        pending = self._pending_indices[iterator]
        index = pending.popleft() if pending else None
        is_map_dataset = iterator._dataset_kind == _DatasetKind.Map
        # A stream has no indices, and without `in_order` batches come back in any order.
        has_known_order = is_map_dataset and getattr(iterator, "_in_order", True)
        indices: tuple[object, ...] = ()
        rows = batch.rows
        if has_known_order and isinstance(index, (list, tuple)) and iterator._auto_collation:
            indices = tuple(index)
        elif has_known_order and not iterator._auto_collation and isinstance(index, int):
            # The dataset returned a whole batch as one item: every row belongs to it.
            indices = (index,)
            tensors = [tensor for _, tensor in iter_tensors(batch.batch)]
            rows = tuple((0,) * len(tensor) if tensor.ndim else None for tensor in tensors)
        is_ready = batch.is_prebatched or rows is not batch.rows
        loaded = self.batches.record_loaded_batch(batch.batch, iterator._dataset, indices, rows, batch.files, is_ready)
        # An Accelerate wrapper passes the batch on later, and it is counted then.
        if not self._wrapper_depth:
            self.batches.mark_batch_received(loaded)
