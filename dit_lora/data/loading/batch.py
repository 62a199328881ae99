"""Micro-batches: their positions in a run, the loader that reads them, and reading that survives a lost worker.

`PositionSampler` lists the positions of each micro-batch of a rank. The data set turns a position into a `Batch` of
one sample, `collate` joins those of a micro-batch, and `build_loader` runs all this in worker processes.
`MicroBatchReader` takes the micro-batches from the loader: failures of the machine or of a worker are raised where
data is requested.
"""

import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dit_lora.data.loading.order import SampleOrder
from dit_lora.data.loading.quarantine import Quarantine
from dit_lora.data.storage import UnreadableError, enable_waiting_in_worker
from dit_lora.numerics.streams import DrawFunctions, RandomInputs, RandomStreams, derive_seed, make_generator

LOSS_WEIGHT = "loss_weight"
"""Name of the tensor with each sample's loss weight, fp32 (B,); only present if the data has weights."""
PRESERVE_PREFIX = "preserve."
"""Prefix of the names of tensors of captions without the trigger word (`train.preserve`)."""
PRESERVE_WEIGHT = "preserve_weight"
"""Name of the tensor with the weight of the loss on those captions, fp32 (B,); only present with such captions."""
EMPTY_PREFIX = "empty."
"""Prefix of the names of tensors of the empty caption (`train.target: guided`)."""
GUIDED_SCALE = "guided_scale"
"""Name of the guidance of each sample's target, fp32 (samples,); 1 for a sample whose caption was dropped."""
HOST_TENSORS = frozenset({"prompt_attention_mask", "prompt_mask", "prompt_embeds_mask"})
"""Names of tensors that stay on the host: caption masks, for example of Sana, Latte and Qwen-Image.

Their values decide shapes and attention backends; on a device, the host would have to wait in every micro-step.
"""


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Each tensor is (B, ...); `sample_seeds` are the seeds of each sample's random numbers."""

    ids: tuple[str, ...]
    sample_seeds: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]
    faults: Mapping[str, str] = field(default_factory=dict)
    """Problems that were found while reading the samples, by sample id."""
    random_inputs: RandomInputs | None = None
    """Random inputs of its step, if they were drawn while the batch was read; None if the step draws them."""

    def to(self, device: torch.device) -> "Batch":
        """Move a batch to a device, except for the tensors in `HOST_TENSORS`."""
        # The masks of captions without the trigger word stay on the host too, hence the prefix is removed.
        moved = {
            name: t
            if name.removeprefix(PRESERVE_PREFIX).removeprefix(EMPTY_PREFIX) in HOST_TENSORS
            else t.to(device, non_blocking=True)
            for name, t in self.tensors.items()
        }
        return self._replace_tensors(moved, lambda draws: draws.to(device, non_blocking=True))

    def select_sample(self, index: int) -> "Batch":
        """Extract one sample of a batch, as a batch of one."""
        sample = self.ids[index]
        faults = {sample: self.faults[sample]} if sample in self.faults else {}
        # Slices keep the batch dimension: (B, ...) becomes (1, ...).
        tensors = {name: tensor[index : index + 1] for name, tensor in self.tensors.items()}
        ahead = None if self.random_inputs is None else self.random_inputs.select_sample(index)
        return Batch((sample,), (self.sample_seeds[index],), tensors, faults, ahead)

    def pin_memory(self) -> "Batch":
        """Copy the batch's tensors to pinned memory. The DataLoader calls this method by its name."""
        pinned = {name: tensor.pin_memory() for name, tensor in self.tensors.items()}
        return self._replace_tensors(pinned, torch.Tensor.pin_memory)

    def _replace_tensors(
        self, tensors: Mapping[str, torch.Tensor], convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> "Batch":
        """Copy the batch with these tensors, and with `convert` applied to its pre-drawn random inputs."""
        ahead = None if self.random_inputs is None else self.random_inputs.map_tensors(convert)
        return replace(self, tensors=tensors, random_inputs=ahead)


def make_sample_seed(sample_id: str, epoch: int, copy: int = 0) -> int:
    """Seed of a sample's random numbers in an epoch.

    It does not depend on the sample's position, so leaving out other samples does not change it.
    """
    draw = derive_seed(epoch, "draws", sample_id)
    # The first copy keeps the seed that it has in data without repeats.
    return derive_seed(draw, "copies", copy) if copy else draw


def collate(samples: Sequence[Batch]) -> Batch:
    """Join batches of one sample each to one batch; pre-drawn random inputs are dropped."""
    return Batch(
        ids=tuple(sample.ids[0] for sample in samples),
        sample_seeds=tuple(sample.sample_seeds[0] for sample in samples),
        # (1, ...) of each sample to (B, ...).
        tensors={name: torch.cat([sample.tensors[name] for sample in samples]) for name in samples[0].tensors},
        faults={sample: fault for batch in samples for sample, fault in batch.faults.items()},
    )


class OrderedDataset(Dataset):
    """Interface of a dataset with the sample at each position of a run."""

    order: SampleOrder


@dataclass(kw_only=True, eq=False)
class PositionSampler(Sampler[list[int]]):
    """Yields the positions of each micro-batch of one rank, from the step after `start_step` on.

    Step s covers positions s*G .. s*G + G-1, where G = `samples_per_step` = accumulate * ranks * batch_size. They are
    divided among micro-steps and ranks in order, so the samples of a step do not depend on how it is split.
    """

    start_step: int
    steps: int
    batch_size: int
    accumulate: int
    rank: int
    num_ranks: int

    @property
    def samples_per_step(self) -> int:
        """Number of samples in one optimizer step, over all ranks."""
        return self.accumulate * self.num_ranks * self.batch_size

    def __len__(self) -> int:
        return (self.steps - self.start_step) * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start_step, self.steps):
            for micro in range(self.accumulate):
                # Micro-steps come first, then ranks: each rank has a contiguous slice of every micro-step.
                start = step * self.samples_per_step + (micro * self.num_ranks + self.rank) * self.batch_size
                yield list(range(start, start + self.batch_size))


T = TypeVar("T")
_DEAD_WORKER_PATTERN = re.compile("DataLoader worker|Pin memory thread")
"""Start of torch's message when a worker or the pinning thread has died."""


class WatchedLoader(DataLoader):
    """A `DataLoader` that reports a dead worker process only when data is requested."""

    def __iter__(self) -> Any:
        number = getattr(signal, "SIGCHLD", None)  # Windows has none
        before = None if number is None else signal.getsignal(number)
        iterator = super().__iter__()
        # torch's signal handler would raise in the middle of any code, such as an optimizer step. It is
        # not needed: a process that waits for data checks the workers every five seconds.
        if number and before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)
        return iterator


class MicroBatchReader(Generic[T]):
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
class DataReadingSettings:
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
        values = streams.draw_random_tensors(self.get_draw_functions(batch.tensors), torch.device("cpu"))
        return replace(batch, random_inputs=RandomInputs(self.seed, batch.sample_seeds, values))


def build_loader(
    dataset: OrderedDataset,
    reading: DataReadingSettings,
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
