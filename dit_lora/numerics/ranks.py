"""The number of ranks, and objects sent between ranks over torch's process group, without Accelerate."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import distributed

T = TypeVar("T")
_IS_SINGLE_PROCESS: ContextVar[bool] = ContextVar("is_alone", default=False)


@contextmanager
def act_as_single_process() -> Iterator[None]:
    """Count this process as the only one in this context, for processes of a group that train separate models."""
    token = _IS_SINGLE_PROCESS.set(True)
    try:
        yield
    finally:
        _IS_SINGLE_PROCESS.reset(token)


def get_num_processes() -> int:
    return distributed.get_world_size() if _is_distributed() else 1


def get_process_index() -> int:
    return distributed.get_rank() if _is_distributed() else 0


def gather_object(local_items: list[T]) -> list[T]:
    """Concatenate the lists of all ranks, in rank order. Collective."""
    # No process group is needed, and none may exist.
    if get_num_processes() == 1:
        return list(local_items)
    # Filled by torch, one list for each rank; objects are pickled.
    lists: list[list[T]] = [[] for _ in range(get_num_processes())]
    distributed.all_gather_object(lists, local_items)
    return [item for items in lists for item in items]


def broadcast_object(value: T, source: int = 0) -> T:
    """Send the value of rank `source` to all ranks, and return it. Collective."""
    # Torch replaces the list's items in place.
    values = [value]
    if get_num_processes() > 1:
        distributed.broadcast_object_list(values, src=source)
    return values[0]


def is_true_on_any_rank(flag: bool) -> bool:
    """True if the flag is true on at least one rank. Collective, without the device."""
    # Every rank gathers, whatever its flag is: the others would wait for it.
    return any(gather_object([flag]))


def is_true_on_all_ranks(flag: bool) -> bool:
    """True if the flag is true on every rank. Collective, without the device."""
    return all(gather_object([flag]))


def _is_distributed() -> bool:
    # `is_initialized` exists only in builds of torch with distributed support.
    return not _IS_SINGLE_PROCESS.get() and distributed.is_available() and distributed.is_initialized()
