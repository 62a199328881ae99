"""Names for the rows of a batch: those that the loop gives, those in a column of the batch, or the dataset's indices
from the loader's batch sampler.

A loader asks its sampler ahead of the loop, workers further still, but batches come in the sampler's order: each batch
that is handed out has the oldest list of indices that none had yet.
"""

import logging
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dit_lora.patching import Patches, is_a

_LOG = logging.getLogger("dit_lora")
_DISPATCHER = "accelerate.data_loader:DataLoaderDispatcher"
# Columns of a batch by which people know their samples; `__key__` is WebDataset's.
_NAMES = ("id", "ids", "path", "paths", "file_name", "file_names", "__key__")
_MOST = 256  # batches that a loop takes before it runs the first of them
_NUMBERED = re.compile(r"sample \d+ of micro-batch \d+")


def identifies(sample: str) -> bool:
    """Return True if the name is a sample's own, and not its place in one batch."""
    return _NUMBERED.fullmatch(sample) is None


class _Batch:
    """The names of one batch's samples, and its tensors, which are the loop's."""

    def __init__(self, indices: tuple[object, ...], batch: Any, dataset: int) -> None:
        self.dataset = dataset
        """Id of the dataset that it is of."""
        self.indices = tuple(f"dataset index {index}" for index in indices)
        self.names = _names_in(batch)
        # Weak references: memory that the loop has freed must not be held for a name.
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self.add(batch)

    def add(self, batch: Any) -> None:
        """Note the batch's tensors, or those that it became on a device."""
        self._tensors += [weakref.ref(leaf) for leaf in _tensors_in(batch)]

    def has_one_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        wanted = {id(tensor) for tensor in tensors}
        return any(id(tensor) in wanted for ref in self._tensors if (tensor := ref()) is not None)


def _tensors_in(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _names_in(batch: Any) -> tuple[str, ...]:
    """Return the samples' names by the first column of the batch that holds such."""
    columns = batch if isinstance(batch, Mapping) else {}
    for column in _NAMES:
        values = columns.get(column)
        if isinstance(values, (list, tuple)) and all(isinstance(one, (str, int)) for one in values):
            return tuple(f"{column} {one}" for one in values)
    return ()


def _for_rows(names: Sequence[str], rows: int) -> tuple[str, ...]:
    """Return a name for each row, of which a sample may have several: chosen and rejected, frames, answers.

    They come sample by sample or round by round, which cannot be told; where it matters, the name is of both.
    """
    each = rows // len(names)
    pairs = ((names[row % len(names)], names[row // each]) for row in range(rows))
    return tuple(one if one == other else f"{one} or {other}" for one, other in pairs)


class Names:
    """Says which samples a call of a model has; where that is not certain, rows are numbered."""

    def __init__(self) -> None:
        self.given: tuple[str, ...] = ()
        """Names of the samples in the forward passes under way, as the loop gives them."""
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()
        """Loaders that names are learned from."""
        self._handed_out: deque[_Batch] = deque(maxlen=_MOST)
        self._current: _Batch | None = None
        self._micro_batches = 0
        """Micro-batches that were run."""
        self._read_ahead: set[int] = set()
        """Ids of datasets that were read as a whole before a model was called, as a cache of latents is made."""
        self._is_told = False
        """True where the loop says which batch it begins, so that nobody has to guess."""
        self._seen: Sequence[torch.Tensor] = ()
        self._micro_step = -1
        self._warned = False

    def watch(self, loader: Any, patches: Patches) -> None:
        """Learn names from a loader, if it is not followed already."""
        follow = self.follow(loader, patches)
        if follow is not None:
            patches.iterated(loader, follow)

    def follow(
        self, loader: Any, patches: Patches
    ) -> Callable[[Iterator[Any]], Iterator[Any]] | None:
        """Return what notes a loader's batches as the loop takes them; None where it is followed already.

        Indices in the dataset come from its batch sampler. Not from one that hands batches out in another order, or
        cuts them for other ranks, and not of a stream, which has no indices: names in the batch itself are left.
        """
        sampler = loader.batch_sampler
        if loader in self._followed:
            return None
        asked: deque[tuple[object, ...]] = deque()
        dataset = id(loader.dataset)

        def noted(indices_of_batches: Iterator[Any]) -> Iterator[Any]:
            for indices in indices_of_batches:
                # A sampler may yield anything: what is no list of indices names nobody.
                asked.append(tuple(indices) if isinstance(indices, (list, tuple)) else ())
                yield indices

        def handed_out(batches: Iterator[Any]) -> Iterator[Any]:
            # A new epoch: what the sampler was asked for and nobody took is gone.
            asked.clear()
            before = self._micro_batches
            for batch in batches:
                indices = asked.popleft() if asked else ()
                self._handed_out.append(_Batch(indices, batch, dataset))
                yield batch
            if self._micro_batches == before:
                # What was made of it may be run in later passes, in the order of this one.
                self._read_ahead.add(dataset)

        has_order = sampler is not None and loader.in_order and not is_a(loader, _DISPATCHER)
        if has_order:
            patches.iterated(sampler, noted)
        self._followed.add(loader)
        return handed_out

    def moved(self, batch: Any, copy: Any) -> None:
        """Note that a batch goes on as a copy, on a device say."""
        if (found := self._batch_with(_tensors_in(batch))) is not None:
            found.add(copy)

    def begin(self, batch: Any) -> None:
        """Note which batch the loop begins, where it says so; all calls are of that batch until the next."""
        self._is_told = True
        self._current = self._batch_with(_tensors_in(batch))

    def see(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note what a call is given, before its names are asked for."""
        self._seen = tensors

    def ids(self, micro_step: int, count: int) -> tuple[str, ...]:
        """Return the names of a call's samples."""
        # Models that are called for one micro-batch share its batch.
        if micro_step != self._micro_step:
            self._micro_step = micro_step
            self._advance(self._seen)
        self._seen = ()
        if len(self.given) == count:
            return self.given
        if self.given and not self._warned:
            self._warned = True
            _LOG.warning(
                "guard.microbatch: %d ids for %d rows; rows are numbered", len(self.given), count
            )
        batch = self._current if not self.given else None
        for names in (batch.names, batch.indices) if batch is not None else ():
            if names and count % len(names) == 0:
                return _for_rows(names, count)
        return tuple(f"sample {row} of micro-batch {micro_step}" for row in range(count))

    def next_step(self) -> None:
        self._micro_step = -1

    def _advance(self, tensors: Sequence[torch.Tensor]) -> None:
        """Find the batch that a new micro-batch is of; without a new batch it is of the one before."""
        self._micro_batches += 1
        if self._is_told:
            return
        if self._current is not None and self._current.has_one_of(tensors):
            return
        waiting = self._handed_out
        batch = self._batch_with(tensors)
        if batch is not None:
            # The batches handed out before it were never run.
            while waiting.popleft() is not batch:
                pass
            self._current = batch
        elif len(waiting) == 1:
            one = waiting.popleft()
            self._current = one if one.dataset not in self._read_ahead else None
        elif waiting:  # the loop took several: which of them this is cannot be told
            waiting.clear()
            self._current = None

    def _batch_with(self, tensors: Sequence[torch.Tensor]) -> _Batch | None:
        return next((batch for batch in self._handed_out if batch.has_one_of(tensors)), None)
