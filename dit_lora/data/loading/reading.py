"""Reads micro-batches; failures of the machine or of a worker are raised where data is requested."""

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
from dit_lora.data.storage import UnreadableError, enable_waiting_in_worker
from dit_lora.numerics.streams import DrawFunctions, RandomInputs, RandomStreams, make_generator

T = TypeVar("T")
_DEAD_WORKER_PATTERN = re.compile("DataLoader worker|Pin memory thread")
"""Start of torch's message when a worker or the pinning thread has died."""


class WatchedLoader(DataLoader):
    """A `DataLoader` that reports a dead worker process only when data is requested."""

    def __iter__(self) -> Any:
        before = signal.getsignal(signal.SIGCHLD)
        iterator = super().__iter__()
        # torch's signal handler would raise in the middle of any code, such as an optimizer step. It is
        # not needed: a process that waits for data checks the workers every five seconds.
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)
        return iterator


class Reader(Generic[T]):
    """Reads a rank's micro-batches one after another; returns the last one again if the data cannot be read."""

    def __init__(self) -> None:
        self._batches: Iterable[T] = ()
        self._stream: Iterator[T] | None = None
        self._last_batch: T | None = None
        self._failure = ""

    def start(self, batches: Iterable[T]) -> None:
        """Continue reading with these micro-batches."""
        self._batches, self._stream, self._failure = batches, None, ""

    def read_next(self) -> tuple[T, str]:
        """Read the next micro-batch; returns it and "", or the last one again with the reason.

        Raises `UnreadableError` if the first micro-batch cannot be read.
        """
        if not self._failure:
            try:
                self._last_batch = self._read()
            except UnreadableError as error:
                if self._last_batch is None:
                    raise
                self._failure = str(error)
        # A failure of the first read was raised, so there is a last batch here.
        assert self._last_batch is not None
        return self._last_batch, self._failure

    def _read(self) -> T:
        """Read the next micro-batch; raises `UnreadableError` if the machine or a worker failed."""
        try:
            # The iterator starts the worker processes, so it is created only when data is needed.
            if self._stream is None:
                self._stream = iter(self._batches)
            return next(self._stream)
        except (OSError, EOFError) as error:
            file_name = getattr(error, "filename", None)
            # An error raised inside a worker arrives with its traceback ("Caught ..."), and a file's error has the
            # file's name. Otherwise the connection broke: a worker died while it was sending a batch.
            is_from_reading = "Caught " in str(error) or file_name is not None
            if not is_from_reading and isinstance(error, ConnectionError | EOFError | FileNotFoundError):
                raise _make_dead_worker_error(error) from error
            # The last line of a worker's traceback is its message.
            message = getattr(error, "strerror", None) or str(error).strip().rpartition("\n")[2]
            location = "" if file_name is None else f": {file_name}"
            raise UnreadableError(f"data cannot be read: {message}{location}") from error
        except RuntimeError as error:
            if not _DEAD_WORKER_PATTERN.match(str(error)):
                raise
            raise _make_dead_worker_error(error) from error


def _make_dead_worker_error(error: Exception) -> UnreadableError:
    message = str(error).partition("\n")[0]
    # The connection to the worker broke before torch noticed that it had died.
    if not _DEAD_WORKER_PATTERN.match(message):
        message = getattr(error, "strerror", None) or message or type(error).__name__
        message = f"DataLoader worker, in the middle of a batch ({message})"
    return UnreadableError(
        f"a process that reads data has ended: {message}; if memory ran out, lower data.workers or data.prefetch"
    )


@dataclass(frozen=True)
class Reading:
    """Settings for reading the training set."""

    sampler: PositionSampler
    seed: int
    caption_dropout: float
    quarantine: Quarantine
    workers: int
    prefetch: int
    pin_memory: bool
    get_draw_functions: Callable[[Mapping[str, torch.Tensor]], DrawFunctions] | None = None
    """Which random inputs a step needs for a batch, to draw them while reading it. None: the step draws them."""


@dataclass(frozen=True)
class _CollateWithRandomInputs:
    """Collate function that also draws the random inputs of a step in the worker, so that no step waits for them.

    They depend only on the seed and the sample seeds, so they are bit-identical in every process.
    """

    collate_samples: Callable[[list[Any]], Batch]
    get_draw_functions: Callable[[Mapping[str, torch.Tensor]], DrawFunctions]
    seed: int

    def __call__(self, samples: list[Any]) -> Batch:
        batch = self.collate_samples(samples)
        streams = RandomStreams(self.seed, batch.sample_seeds)
        values = streams.draw_tensors(self.get_draw_functions(batch.tensors), torch.device("cpu"))
        return replace(batch, random_inputs=RandomInputs(self.seed, batch.sample_seeds, values))


def build_loader(
    dataset: OrderedDataset,
    reading: Reading,
    *,
    worker_dataset: Dataset | None = None,
    collate_fn: Callable[[list[Any]], Any] = collate,
) -> DataLoader:
    """Create the DataLoader of the sampler's micro-batches in order; each worker reads `reading.prefetch` ahead.

    Workers read `worker_dataset` instead of the dataset if given. Raises `ValueError` if the steps of the order and of
    the sampler differ in size.
    """
    # With several buckets, a step of the order must be a step of the sampler; otherwise a step would mix shapes.
    group = dataset.order.samples_per_step
    if dataset.order.num_buckets > 1 and group != reading.sampler.samples_per_step:
        raise ValueError(
            f"a step of the order has {group} samples, one of the sampler {reading.sampler.samples_per_step}"
        )
    if reading.get_draw_functions is not None:
        collate_fn = _CollateWithRandomInputs(collate_fn, reading.get_draw_functions, reading.seed)
    return WatchedLoader(
        worker_dataset or dataset,
        batch_sampler=reading.sampler,
        collate_fn=collate_fn,
        num_workers=reading.workers,
        worker_init_fn=enable_waiting_in_worker,
        # DataLoader raises for a prefetch factor without workers.
        prefetch_factor=reading.prefetch if reading.workers else None,
        pin_memory=reading.pin_memory,
        # Without a generator, the loader would draw its base seed from the global one, which would
        # change the run's random numbers.
        generator=make_generator(reading.seed, "workers"),
    )
