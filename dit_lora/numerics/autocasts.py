"""The autocast that a loop has around the call of a model, kept to be opened again for a replay."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

Autocasts = tuple[tuple[str, torch.dtype], ...]
"""Kinds of device with the dtype that autocast computes in there."""

_held_off: set[str] = set()


def open_autocasts(devices: Iterable[str]) -> Autocasts:
    """Return what autocast is open on devices of these kinds."""
    kinds = sorted(set(devices))
    return tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))


@contextmanager
def opened_again(autocasts: Autocasts) -> Iterator[None]:
    """Open each of them within, but for those that `held_off` has off."""
    with ExitStack() as stack:
        for kind, dtype in autocasts:
            if kind not in _held_off:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
        yield


@contextmanager
def held_off(kind: str) -> Iterator[None]:
    """Have autocast off on devices of this kind within, for calls that are opened again too."""
    is_outermost = kind not in _held_off
    _held_off.add(kind)
    try:
        with torch.autocast(kind, enabled=False):
            yield
    finally:
        if is_outermost:
            _held_off.discard(kind)
