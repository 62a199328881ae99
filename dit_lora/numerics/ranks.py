"""Says how many ranks there are, and gathers what each has, by torch's own process group: Accelerate is not needed."""

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
    """Return the items of every rank's list, in the order of ranks. Collective."""
    if process_count() == 1:
        return list(own)
    of_ranks: list[list[T]] = [[] for _ in range(process_count())]
    distributed.all_gather_object(of_ranks, own)
    return [item for of_rank in of_ranks for item in of_rank]


def _spread() -> bool:
    return not _IS_ALONE.get() and distributed.is_available() and distributed.is_initialized()
