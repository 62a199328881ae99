"""Record the autocast state around a model's call, so that a replay can restore it."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

Autocasts = tuple[tuple[str, torch.dtype], ...]
"""Pairs of a device type and the dtype that autocast uses on it."""

# Device types for which `held_off` is active.
_held_off: set[str] = set()


def open_autocasts(devices: Iterable[str]) -> Autocasts:
    """The autocasts that are enabled now on these device types, with their dtypes."""
    kinds = sorted(set(devices))
    return tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))


@contextmanager
def opened_again(autocasts: Autocasts) -> Iterator[None]:
    """Enable these autocasts inside the context, except on device types that `held_off` has disabled."""
    with ExitStack() as stack:
        for kind, dtype in autocasts:
            # Without autocast's cache, casted copies of weights are freed after each op.
            if kind not in _held_off:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        yield


@contextmanager
def held_off(kind: str) -> Iterator[None]:
    """Disable autocast on a device type inside the context. Calls of `opened_again` inside it respect this."""
    # Only the outermost of nested contexts may allow autocast again.
    is_outermost = kind not in _held_off
    _held_off.add(kind)
    try:
        # Set first: a replay of recorded autocasts inside the context looks at it.
        with torch.autocast(kind, enabled=False):
            yield
    finally:
        if is_outermost:
            _held_off.discard(kind)
