"""Mark the calls of attention, so that selective checkpointing can save attention outputs.

Selective checkpointing saves outputs with a dispatch mode, and every op inside such a mode goes through Python. When a
block calls attention through `attention_call`, the mode is active only during attention.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class AttentionContextProvider(Protocol):
    """Interface of an object that wraps every call of an attention layer in a context manager."""

    def attention_call(self) -> AbstractContextManager[Any]:
        """Create the context manager in which one call of an attention layer runs."""


class _ThreadState(threading.local):
    """Attention context provider of the current thread, or None.

    Backward passes run in threads of their own.
    """

    provider: AttentionContextProvider | None = None


_THREAD_STATE = _ThreadState()


def attention_call() -> AbstractContextManager[Any]:
    """Context manager in which one attention call runs; it does nothing if this thread has no context provider."""
    # A dispatch mode sees no op inside compiled code, so the context would have no effect there.
    if torch.compiler.is_compiling():
        return nullcontext()
    keeper = _THREAD_STATE.provider
    return nullcontext() if keeper is None else keeper.attention_call()


def swap_context_provider(provider: AttentionContextProvider | None) -> AttentionContextProvider | None:
    """Set the object that wraps each attention call of this thread in a context manager; None for none.

    Returns the previous one.
    """
    # The caller sets the previous one again when it is done, so that contexts can be nested.
    previous, _THREAD_STATE.provider = _THREAD_STATE.provider, provider
    return previous
