"""Agreement and sharing of work over ranks, for both kinds of tasks."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from dit_lora.errors import DitLoraError, unwritable
from dit_lora.numerics.dtensors import needs_all_ranks
from dit_lora.training.session.session import Session, agree

T = TypeVar("T")


def agreed(session: Session, work: Callable[[], T] | None) -> T | None:
    """Return the result of `work`, on the ranks that have any; a `DitLoraError` of one is raised on all. Collective."""
    error, result = None, None
    if work is not None:
        try:
            result = work()
        except DitLoraError as problem:
            error = problem
        except OSError as problem:
            error = unwritable(problem)
    agree(session.accelerator, error)
    return result


def own_share(items: Sequence[T], accelerator: Accelerator, model: nn.Module) -> Sequence[T]:
    """Return this rank's share of the items, or all of them where a forward pass needs all ranks."""
    # A rank that had fewer items would leave the others waiting inside a forward pass.
    if needs_all_ranks(model):
        return items
    return items[accelerator.process_index :: accelerator.num_processes]


def of_any_rank(faults: Mapping[str, str], model: nn.Module) -> bool:
    """Return true if a sample is left out: where all ranks run it together, if it is bad on any. Collective then."""
    return any(gather_object([bool(faults)])) if needs_all_ranks(model) else bool(faults)
