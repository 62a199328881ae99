"""Mark the calls of attention, so that selective checkpointing can save attention outputs.

Selective checkpointing saves outputs with a dispatch mode, and every op inside such a mode goes through Python. When a
block calls attention through `attention_call`, the mode is active only during attention.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class AttentionContextProvider(Protocol):
    """An object that provides a context for every call of attention."""

    def attention_call(self) -> AbstractContextManager[Any]:
        """A context manager to run one call of attention in."""


class _ThreadState(threading.local):
    """The keeper of this thread: backward passes run in threads of their own."""

    provider: AttentionContextProvider | None = None


_THREAD_STATE = _ThreadState()


def attention_call() -> AbstractContextManager[Any]:
    """Context manager for one call of attention; it does nothing without a keeper in this thread."""
    # A dispatch mode sees no op inside compiled code, so the context would have no effect there.
    if torch.compiler.is_compiling():
        return nullcontext()
    keeper = _THREAD_STATE.provider
    return nullcontext() if keeper is None else keeper.attention_call()


def swap_context_provider(provider: AttentionContextProvider | None) -> AttentionContextProvider | None:
    """Set the keeper of attention calls in this thread, and return the previous one."""
    # The caller sets the previous one again when it is done, so that contexts can be nested.
    previous, _THREAD_STATE.provider = _THREAD_STATE.provider, provider
    return previous
