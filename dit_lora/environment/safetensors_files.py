"""Writes safetensors files, and opens those of users and strangers with one-line errors if they cannot be read."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dit_lora.errors import DitLoraError
from dit_lora.files import open_regular_file
from dit_lora.parsing import parse_json

MAX_TENSORS = 100_000
"""Largest number of tensors of a file. A published LoRA has a few thousand; a million would take minutes."""
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' dtype names of at least half precision, to dtypes."""


class UnreadableFileError(DitLoraError):
    """Raised if a safetensors file cannot be opened, or is damaged or incomplete."""


@dataclass(frozen=True)
class TensorHeader:
    """Dtype and shape of one tensor, from the header of a safetensors file."""

    dtype: str
    """safetensors' name, such as `BF16`."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SafetensorsHeader:
    """Header of a safetensors file: its metadata, and dtype and shape of each tensor."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorHeader]


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a file for reading single tensors, with safetensors' `safe_open`.

    Opening reads the header and checks the file's length against it. Links are followed, as the Hub's cache needs it.

    Raises:
        UnreadableFileError: It is missing, not a regular file, or not a complete safetensors file; also if reading a
            tensor inside the context fails.
        DitLoraError: It has more than `MAX_TENSORS` tensors.
    """
    try:
        # safetensors would wait forever on a named pipe.
        open_regular_file(file).close()
        # Reads the header only; tensors are mapped into memory when they are asked for.
        opened = safe_open(file, framework="pt")
    except OSError as error:
        raise UnreadableFileError(f"cannot read {file}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise _make_damaged_file_error(file, error) from error
    with opened:
        # Before anything else is read: the file may come from a stranger.
        count = len(opened.keys())
        if count > MAX_TENSORS:
            raise DitLoraError(f"{file} has {count:,} tensors; at most {MAX_TENSORS:,} are read")
        # Only errors of the file: an `OSError` in the caller's code may be about another one.
        try:
            yield opened
        except SafetensorError as error:
            raise _make_damaged_file_error(file, error) from error


def read_header(file: Path) -> SafetensorsHeader:
    """Read a safetensors file's header, and none of its tensors. Raises as `open_safetensors`."""
    with open_safetensors(file) as opened:
        # A slice knows its dtype and shape without reading the tensor.
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        tensors = {name: TensorHeader(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
        return SafetensorsHeader(opened.metadata() or {}, tensors)


def read_metadata(file: Path) -> dict[str, str]:
    """Read the metadata in a safetensors file's header. Raises as `open_safetensors`."""
    with open_safetensors(file) as opened:
        # None in files that have no metadata.
        return dict(opened.metadata() or {})


def read_tensors(file: Path, *, missing_ok: bool = False) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors file to the CPU; none if it does not exist and `missing_ok`.

    Raises as `open_safetensors`. Values are read even inside a context that builds tensors on `meta`.
    """
    # Results without an adapter, or without trained base weights, lack one of their files.
    if missing_ok and not file.is_file():
        return {}
    # Opened first for its checks and errors: `load_file` names neither the file nor the remedy.
    with torch.device("cpu"), open_safetensors(file):
        return load_file(file)


def write_tensors(tensors: Mapping[str, torch.Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, equal in every byte for equal content: safetensors orders `metadata` at random.

    Raises `OSError` and `SafetensorError`.
    """
    save_file(dict(tensors), file, metadata=dict(metadata or {}) or None)
    if not metadata:
        return
    with file.open("r+b") as stored:
        # The length of the header, which is JSON and padded with spaces.
        length = int.from_bytes(stored.read(8), "little")
        header = parse_json(stored.read(length))
        header["__metadata__"] = dict(sorted(metadata.items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        # Tensors follow the header and stay where they are.
        if len(text) <= length:
            stored.seek(8)
            stored.write(text.ljust(length))


def _make_damaged_file_error(file: Path, error: SafetensorError) -> UnreadableFileError:
    # An interrupted download or copy is the usual reason.
    return UnreadableFileError(
        f"cannot read {file}: {error}; it is incomplete or not a safetensors file; copy or download it again"
    )
