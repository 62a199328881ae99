"""Exchange of values between ranks during a gradient check, in which an error on one rank is raised on all."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch
from torch import distributed

from dit_lora.errors import DitLoraError
from dit_lora.numerics.digest import compute_digest
from dit_lora.numerics.ranks import gather_object, get_num_processes

T = TypeVar("T")


class RankError(DitLoraError):
    """Raised on all ranks if one of them failed inside a gradient check."""

    collective = True


def gather_or_raise(kind: str, compute: Callable[[], T]) -> list[T]:
    """Compute a value on each rank, and return those of all ranks in order. Collective.

    Args:
        kind: Names the exchange. Ranks that take different decisions would otherwise use each other's values.
        compute: Computes this rank's value, which is pickled.

    Raises:
        RankError: On all ranks, if `compute` failed on one of them, or if `kind` differs.
    """
    # Without other ranks, errors keep their class.
    if get_num_processes() == 1:
        return [compute()]
    values: list[T] = []
    failure: RuntimeError | None = None
    # Out of memory is a RuntimeError too. The other ranks wait for this one.
    try:
        values.append(compute())
    except RuntimeError as error:
        failure = error
    reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = gather_object([(kind, values, reason)])
    reasons = [reason for _, _, reason in outcomes if reason]
    if reasons:
        raise RankError(reasons[0]) from failure
    if len({kind for kind, _, _ in outcomes}) > 1:
        raise RankError("the ranks do not take the same decisions in the gradient check")
    return [value for _, (value,), _ in outcomes]


@contextmanager
def raise_together() -> Iterator[None]:
    """Context for a part of a gradient check: if one rank fails inside, all raise `RankError`. Collective."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        # The other ranks wait in their next exchange, or at the end of the context.
        _tell_other_ranks(error)
    gather_or_raise("end", lambda: None)


def _tell_other_ranks(error: RuntimeError) -> NoReturn:
    def fail() -> NoReturn:
        raise error

    gather_or_raise("error", fail)
    raise error


def find_unequal_tensors(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal on all ranks, or missing on some. Collective."""
    if get_num_processes() == 1:
        return []
    digests = gather_or_raise("digest", lambda: (list(tensors), compute_digest(tensors.values())))
    if all(digest == digests[0] for digest in digests):
        return []
    # By name only now: a healthy check sends one number.
    by_name = gather_or_raise("digests", lambda: {name: compute_digest([t]) for name, t in tensors.items()})
    # A dict keeps the order of names, unlike a set.
    names = {name: None for digests_by_name in by_name for name in digests_by_name}
    return [name for name in names if len({digests_by_name.get(name) for digests_by_name in by_name}) > 1]


def average_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Replace each parameter's gradient with its mean over all ranks, as DDP does. Collective."""
    num_ranks = get_num_processes()
    if num_ranks == 1:
        return
    for parameter in parameters:
        # Every rank must take part, also without a gradient, which counts as zero.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        distributed.all_reduce(parameter.grad)
        parameter.grad /= num_ranks
