"""Exchange of values between ranks during a gradient check, in which an error on one rank is raised on all."""

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn, TypeVar

import torch
from torch import distributed

from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.containment import try_call
from dit_lora.numerics.digest import compute_digest
from dit_lora.numerics.ranks import gather_object, get_num_processes

T = TypeVar("T")


# A device that can compute nothing more ends the run, and takes part in no exchange.
_RERAISED = (torch.AcceleratorError,)


class GradientCheckError(DitLoraError):
    """Raised on all ranks if one of them failed inside a gradient check."""

    collective = True


def gather_or_raise(kind: str, compute: Callable[[], T]) -> list[T]:
    """Compute a value on each rank, and return those of all ranks in order. Collective.

    Args:
        kind: Names the exchange. Ranks that take different decisions would otherwise use each other's values.
        compute: Computes this rank's value, which is pickled.

    Raises:
        GradientCheckError: On all ranks, if `compute` failed on one of them, or if `kind` differs.
    """
    # Without other ranks, errors keep their class.
    if get_num_processes() == 1:
        return [compute()]
    failures: list[Exception] = []
    # The other ranks wait for this one.
    values = try_call(lambda: [compute()], on_error=failures.append, reraised=_RERAISED)
    reason = _describe_error(failures[0]) if failures else ""
    outcomes = gather_object([(kind, values or [], reason)])
    reasons = [reason for _, _, reason in outcomes if reason]
    if reasons:
        raise GradientCheckError(reasons[0]) from next(iter(failures), None)
    if len({kind for kind, _, _ in outcomes}) > 1:
        raise GradientCheckError("the ranks do not take the same decisions in the gradient check")
    return [value for _, (value,), _ in outcomes]


def run_or_raise_on_all_ranks(attempt: Callable[[], T]) -> T:
    """Run a part of a gradient check, which may fail with any exception. Collective.

    Raises:
        GradientCheckError: On all ranks, if `attempt` failed on one of them.
    """
    failures: list[Exception] = []
    # All ranks raise a `GradientCheckError` together.
    reraised = (GradientCheckError, *_RERAISED)
    results = try_call(lambda: [attempt()], on_error=failures.append, reraised=reraised)
    if results is not None:
        gather_or_raise("end", lambda: None)
        return results[0]

    def raise_failure() -> NoReturn:
        raise failures[0]

    # The other ranks wait in their next exchange, or at the end.
    if get_num_processes() > 1:
        gather_or_raise("error", raise_failure)
    raise GradientCheckError(_describe_error(failures[0])) from failures[0]


def _describe_error(error: Exception) -> str:
    """An error as one line of a report."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


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
    parameters = list(parameters)

    def fill_missing() -> None:
        # Every rank must take part, also without a gradient, which counts as zero.
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    # Before the first all-reduce: a rank that fails between them could not tell the others.
    gather_or_raise("missing gradients", fill_missing)
    for parameter in parameters:
        # Filled above.
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad)
        parameter.grad /= num_ranks
