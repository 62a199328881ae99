"""Reading of micro-batches: failures of the machine or a worker are raised where data is asked for."""

import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from dit_lora.data.loading.batch import Batch, collate
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.data.loading.sampler import OrderedDataset, PositionSampler
from dit_lora.data.storage import UnreadableError, wait_in_worker
from dit_lora.numerics.streams import Drawn, Draws, Streams, generator

T = TypeVar("T")
_LOST = re.compile("DataLoader worker|Pin memory thread")
"""Beginning of torch's message when a worker or the pinning thread has died."""


class WatchedLoader(DataLoader):
    """A `DataLoader` that reports a dead worker where data is asked for, and nowhere else."""

    def __iter__(self) -> Any:
        before = signal.getsignal(signal.SIGCHLD)
        iterator = super().__iter__()
        # torch's handler raises in the middle of whatever runs, be it an optimizer's step. It is
        # not needed: whoever waits for data looks after the workers every five seconds.
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)
        return iterator


class Reader(Generic[T]):
    """Reader of a rank's micro-batches, one after another; the last one stands for one that cannot be read."""

    def __init__(self) -> None:
        self._batches: Iterable[T] = ()
        self._stream: Iterator[T] | None = None
        self._last: T | None = None
        self._why = ""

    def begin(self, batches: Iterable[T]) -> None:
        """Go on with these micro-batches."""
        self._batches, self._stream, self._why = batches, None, ""

    def next(self) -> tuple[T, str]:
        """Return the next one, or the last one again and why; raises `UnreadableError` where there is no last one."""
        # A stream that has failed gives nothing more.
        if not self._why:
            try:
                self._last = self._read()
            except UnreadableError as error:
                if self._last is None:
                    raise
                self._why = str(error)
        assert self._last is not None
        return self._last, self._why

    def _read(self) -> T:
        try:
            if self._stream is None:
                self._stream = iter(self._batches)
            return next(self._stream)
        except (OSError, EOFError) as error:
            # A worker died while a batch of it was on the way.
            if _is_of_connection(error):
                raise _lost(error) from error
            raise UnreadableError(f"data cannot be read: {_words(error)}") from error
        except RuntimeError as error:
            if not _LOST.match(str(error)):
                raise
            raise _lost(error) from error


def _is_of_connection(error: OSError | EOFError) -> bool:
    """Return True if the connection to a worker broke.

    An error within a worker arrives with its traceback ("Caught ..."), and a file's error has the file's name.
    """
    if "Caught " in str(error) or getattr(error, "filename", None) is not None:
        return False
    return isinstance(error, ConnectionError | EOFError | FileNotFoundError)


def _words(error: OSError | EOFError) -> str:
    message = getattr(error, "strerror", None) or str(error).strip().rpartition("\n")[2]
    name = getattr(error, "filename", None)
    return message if name is None else f"{message}: {name}"


def _lost(error: Exception) -> UnreadableError:
    message = str(error).partition("\n")[0]
    # The connection to the worker broke before torch saw that it had died.
    if not _LOST.match(message):
        message = getattr(error, "strerror", None) or message or type(error).__name__
        message = f"DataLoader worker, in the middle of a batch ({message})"
    return UnreadableError(
        f"a process that reads data has ended: {message}; was it killed for want of memory? Lower data.workers or "
        "data.prefetch"
    )


@dataclass(frozen=True)
class Reading:
    """Settings by which a run reads its training set."""

    sampler: PositionSampler
    seed: int
    caption_dropout: float
    quarantine: Quarantine
    workers: int
    prefetch: int
    pin_memory: bool
    draws: Callable[[Mapping[str, torch.Tensor]], Draws] | None = None
    """Says what a step draws for a batch: it is drawn by whoever reads the batch. None to leave it to the step."""


@dataclass(frozen=True)
class _Drawing:
    """Joins samples and draws what their step will: in a worker, so that no step waits for it.

    A draw is of the seed and the samples' draw numbers alone, so that it has the same bits in every process.
    """

    join: Callable[[list[Any]], Batch]
    draws: Callable[[Mapping[str, torch.Tensor]], Draws]
    seed: int

    def __call__(self, samples: list[Any]) -> Batch:
        batch = self.join(samples)
        streams = Streams(self.seed, batch.draws)
        drawn = streams.drawn(self.draws(batch.tensors), torch.device("cpu"))
        return replace(batch, ahead=Drawn(self.seed, batch.draws, drawn))


def build_loader(
    dataset: OrderedDataset,
    how: Reading,
    *,
    source: Dataset | None = None,
    collate_fn: Callable[[list[Any]], Any] = collate,
) -> DataLoader:
    """Return a loader of the sampler's micro-batches in its order, each worker reading `how.prefetch` of them ahead.

    Workers read `source` where that is not the dataset itself. Raises `ValueError` if the steps of the
    order and of the sampler differ in size.
    """
    group = dataset.order.group
    if dataset.order.buckets > 1 and group != how.sampler.group:
        raise ValueError(
            f"a step of the order has {group} samples, one of the sampler {how.sampler.group}"
        )
    if how.draws is not None:
        collate_fn = _Drawing(collate_fn, how.draws, how.seed)
    return WatchedLoader(
        source or dataset,
        batch_sampler=how.sampler,
        collate_fn=collate_fn,
        num_workers=how.workers,
        worker_init_fn=wait_in_worker,
        # DataLoader refuses a prefetch factor without workers.
        prefetch_factor=how.prefetch if how.workers else None,
        pin_memory=how.pin_memory,
        # A loader without a generator draws its base seed from the global one, which would change
        # the run's draws.
        generator=generator(how.seed, "workers"),
    )
