"""Reads a safetensors file that is to be checked: what cannot be read is the file's fault, in one line."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from dit_lora.errors import CheckFailedError


def header_of(file: Path) -> dict[str, str]:
    """Return the metadata in the file's header. Raises `CheckFailedError` if it is not a whole safetensors file."""
    try:
        # Opening reads the header and checks the file's length against it.
        with safe_open(file, framework="pt") as opened:
            return dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise unreadable(file, error) from error


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    """Return all tensors; none if the file is not there. Raises as `header_of`."""
    if not file.is_file():
        return {}
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: Exception) -> CheckFailedError:
    """Return the error to raise for a file that could not be read."""
    return CheckFailedError(
        f"{file} cannot be read: {error}; it is not a safetensors file, or not whole: copy it again"
    )
