"""Record the autocast state around a model's call, so that a replay can restore it."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

AutocastState = tuple[tuple[str, torch.dtype], ...]
"""Pairs of a device type and the dtype that autocast uses on it."""

# Device types for which `disable_autocast` is active.
_disabled_device_types: set[str] = set()


def get_enabled_autocasts(device_types: Iterable[str]) -> AutocastState:
    """The autocasts that are enabled now on these device types, with their dtypes."""
    kinds = sorted(set(device_types))
    return tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))


@contextmanager
def restore_autocasts(autocasts: AutocastState) -> Iterator[None]:
    """Enable the autocasts from `get_enabled_autocasts` inside the context.

    Device types that `disable_autocast` has disabled are left out.
    """
    with ExitStack() as stack:
        for kind, dtype in autocasts:
            # Without autocast's cache, casted copies of weights are freed after each op.
            if kind not in _disabled_device_types:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        yield


@contextmanager
def disable_autocast(device_type: str) -> Iterator[None]:
    """Disable autocast on a device type inside the context. Calls of `restore_autocasts` inside it respect this."""
    # Only the outermost of nested contexts may allow autocast again.
    is_outermost = device_type not in _disabled_device_types
    _disabled_device_types.add(device_type)
    try:
        # Set first: a replay of recorded autocasts inside the context looks at it.
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        if is_outermost:
            _disabled_device_types.discard(device_type)
