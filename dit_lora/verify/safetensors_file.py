"""Reads tensors, metadata and dtypes of safetensors files, with one-line errors for files that cannot be read."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from dit_lora.adapters.lora_file import require_few_tensors
from dit_lora.errors import CheckFailedError

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' dtype names to dtypes."""


def read_file_metadata(file: Path) -> dict[str, str]:
    """Metadata in the file's header.

    Raises `CheckFailedError` if it is not a complete safetensors file, and `DitLoraError` if it has too many tensors.
    """
    try:
        # Opening reads the header and checks the file's length against it.
        with safe_open(file, framework="pt") as opened:
            require_few_tensors(file, opened.keys())
            return dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise make_read_error(file, error) from error


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of the file; empty if it does not exist. Raises as `read_file_metadata`."""
    if not file.is_file():
        return {}
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise make_read_error(file, error) from error


def make_read_error(file: Path, error: Exception) -> CheckFailedError:
    """The error to raise for a file that could not be read."""
    problem = f"{file} cannot be read: {error}"
    return CheckFailedError(f"{problem}; it is not a safetensors file, or not whole: copy it again")


def read_dtypes(files: Iterable[Path]) -> set[str]:
    """safetensors' dtype names of all tensors in these files."""
    dtypes: set[str] = set()
    for file in files:
        # Reads headers only: no tensor is loaded.
        with safe_open(file, framework="pt") as opened:
            dtypes |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return dtypes
