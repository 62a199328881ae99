"""Calls of attention, marked where they are made, for whoever keeps what attention returns.

Selective checkpointing keeps it by a dispatch mode, which every op within it goes through in Python. Where a block's
attention is called through `attention_call`, the mode need not be there for all the rest.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Keeper(Protocol):
    """Whoever wants to be there when attention is called."""

    def attention_call(self) -> AbstractContextManager[Any]:
        """Return what a call of attention runs in."""


class _Local(threading.local):
    """The keeper of this thread: a backward pass has threads of its own."""

    keeper: Keeper | None = None


_LOCAL = _Local()


def attention_call() -> AbstractContextManager[Any]:
    """Return a context for one call of attention, and for nothing beside it."""
    # Compiled, there is nobody to see it: a keeper sees no op inside compiled code.
    if torch.compiler.is_compiling():
        return nullcontext()
    keeper = _LOCAL.keeper
    return nullcontext() if keeper is None else keeper.attention_call()


def exchange_keeper(keeper: Keeper | None) -> Keeper | None:
    """Make this the keeper of attention in this thread, and return the one before."""
    before, _LOCAL.keeper = _LOCAL.keeper, keeper
    return before
