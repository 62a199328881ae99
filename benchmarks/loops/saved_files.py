"""What a loop wrote: digests of files, and the tensors in them by name, read without the loop's classes."""

import hashlib
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_UNREADABLE = (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError)


class _Placeholder:
    """Stands for an object whose class is the loop's own; keeps its attributes, so that tensors are found in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args, kwargs

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Puts a placeholder where a class is that cannot be imported here."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("__main__", "__mp_main__"):
            return _Placeholder
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return _Placeholder


def _load_pickle(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


# What `torch.load` asks a module for that it unpickles with.
_PICKLE = SimpleNamespace(
    __name__="loops_pickle",
    Unpickler=_Unpickler,
    load=_load_pickle,
    UnpicklingError=pickle.UnpicklingError,
)


@dataclass(frozen=True)
class SavedFile:
    """A file that a loop wrote."""

    digest: str
    leaves: Mapping[str, str] = field(default_factory=dict)
    """Path of each tensor or plain value inside the file, and a digest of its bits."""
    nonfinite: tuple[str, ...] = ()
    """Paths of the float tensors that hold a NaN or an Inf."""
    problem: str = ""
    """Why the file cannot be read; empty if it can, or if it is no file of tensors."""

    def equals(self, reference: "SavedFile") -> bool:
        """True if the bytes are equal, or, where archives differ, every tensor and value in them."""
        if self.digest == reference.digest:
            return True
        return bool(self.leaves) and self.leaves == reference.leaves


def read_saved_file(path: Path) -> SavedFile:
    """Read a file. A file that cannot be read gives a `SavedFile` with the problem; nothing is raised."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    try:
        content = _load(path)
    except (*_UNREADABLE, SafetensorError, zipfile.BadZipFile) as error:
        return SavedFile(digest, problem=f"{type(error).__name__}: {error}")
    leaves, nonfinite = {}, []
    for name, value in _walk(content, "", set()):
        leaves[name] = _digest_value(value)
        if isinstance(value, Tensor) and not _is_finite(value):
            nonfinite.append(name)
    return SavedFile(digest, leaves, tuple(nonfinite))


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".jit":  # its code has the call stack of the trace as debug information
        return dict(torch.jit.load(path, map_location="cpu").state_dict())
    if path.suffix in (".npy", ".npz"):
        loaded = np.load(path, allow_pickle=False)
        return loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    if path.suffix in _TORCH_SUFFIXES:
        if zipfile.is_zipfile(path):
            return torch.load(path, weights_only=False, map_location="cpu", pickle_module=_PICKLE)
        with path.open("rb") as file:
            return _load_pickle(file)
    return None


def _walk(value: Any, path: str, visited: set[int]) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value, with the keys and attributes that lead to it."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value.copy())
    if isinstance(value, Tensor | int | float | str | bytes):
        yield path, value
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(enumerate(value))
    elif hasattr(value, "__dict__"):
        parts = list(vars(value).items())
    for key, part in parts:
        yield from _walk(part, f"{path}/{key}" if path else str(key), visited)


def _digest_value(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_sparse:
        value = value.to_dense()
    values = value.detach().cpu().contiguous()
    bits = values.reshape(-1).view(torch.uint8) if values.numel() else values
    digest = hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]
    return f"{values.dtype} {tuple(values.shape)} {digest}"


def _is_finite(value: Tensor) -> bool:
    if not (value.is_floating_point() or value.is_complex()):
        return True
    values = value.detach()
    return bool((values.to_dense() if values.is_sparse else values).isfinite().all())


def find_saved_files(folder: Path, is_excluded: Callable[[str], bool] = lambda path: False) -> dict[str, SavedFile]:
    """Every file below a folder, by its relative path, except those that are excluded by it."""
    files = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and not is_excluded(relative):
            files[relative] = read_saved_file(path)
    return files
