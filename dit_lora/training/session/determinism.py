"""Deterministic algorithms during a run: `train.deterministic`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dit_lora.errors import DitLoraError

_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
# Eight buffers of 4 MiB; otherwise cuBLAS picks algorithms by the space that its streams left.
_WORKSPACE_SETTING = ":4096:8"
# Part of PyTorch's error message.
_NO_DETERMINISTIC_TEXT = "does not have a deterministic implementation"


def configure_cublas_workspace() -> None:
    """Configure cuBLAS's workspace for reproducible results; must run before the first cuBLAS call, which reads it."""
    os.environ.setdefault(_WORKSPACE_VARIABLE, _WORKSPACE_SETTING)


@contextmanager
def use_deterministic_algorithms(is_enabled: bool) -> Iterator[None]:
    """If `is_enabled`, use only deterministic algorithms of PyTorch inside the context; enter it before using CUDA.

    Raises `DitLoraError` if an op has none. Uninitialized memory is not filled: no op here reads any.
    """
    if not is_enabled:
        yield
        return
    configure_cublas_workspace()
    before = torch.are_deterministic_algorithms_enabled()
    # A module whose properties mypy does not see.
    memory = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    except RuntimeError as error:
        if _NO_DETERMINISTIC_TEXT not in str(error):
            raise
        # The word before the phrase is the op's name.
        reason = str(error).partition(_NO_DETERMINISTIC_TEXT)[0].split()[-1]
        raise DitLoraError(
            f"train.deterministic: PyTorch's {reason} has no deterministic implementation here; set it to false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
