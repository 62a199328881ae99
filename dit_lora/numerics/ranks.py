"""The number of ranks, and object gathering over torch's process group, without Accelerate."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import distributed

T = TypeVar("T")
_IS_ALONE: ContextVar[bool] = ContextVar("is_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Count this process as the only one in this context, for processes of a group that train separate models."""
    token = _IS_ALONE.set(True)
    try:
        yield
    finally:
        _IS_ALONE.reset(token)


def process_count() -> int:
    return distributed.get_world_size() if _spread() else 1


def process_index() -> int:
    return distributed.get_rank() if _spread() else 0


def gather_object(own: list[T]) -> list[T]:
    """Concatenate the lists of all ranks, in rank order. Collective."""
    # No process group is needed, and none may exist.
    if process_count() == 1:
        return list(own)
    # Filled by torch, one list for each rank; objects are pickled.
    lists: list[list[T]] = [[] for _ in range(process_count())]
    distributed.all_gather_object(lists, own)
    return [item for items in lists for item in items]


def _spread() -> bool:
    # `is_initialized` exists only in builds of torch with distributed support.
    return not _IS_ALONE.get() and distributed.is_available() and distributed.is_initialized()
