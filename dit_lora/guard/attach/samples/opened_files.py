"""Record which files a dataset opens for an item, and find those with values that are not finite.

Many trainers store latents and embeddings in one file per picture and return ready batches. A dataset index then
stands for several samples, but a file stands for one.
"""

import builtins
import io
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dit_lora.guard.attach.containment import try_call
from dit_lora.guard.attach.finite_values import has_nonfinite_values

_MAX_FILES = 64
_MAX_BYTES = 2**28
_TEXT_SUFFIXES = (".txt", ".caption", ".json", ".jsonl", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".py")
_local = threading.local()
_lock = threading.Lock()
_originals: list[Any] = []
_num_contexts = 0


@contextmanager
def record_opened_files() -> Iterator[list[str]]:
    """Collect the paths of files that this thread opens for reading inside the context, with Python's `open`."""
    global _num_contexts
    # Contexts may be nested, since a dataset may wrap another one.
    outer = getattr(_local, "paths", None)
    paths: list[str] = []
    _local.paths = paths
    with _lock:
        _num_contexts += 1
        # `open` is replaced once for all threads; each thread has its own list of paths.
        if _num_contexts == 1:
            _originals[:] = [builtins.open, io.open]
            builtins.open = io.open = _record_and_open
    try:
        yield paths
    finally:
        with _lock:
            _num_contexts -= 1
            if _num_contexts == 0:
                builtins.open, io.open = _originals
        _local.paths = outer


def record_path(path: Any) -> None:
    """Record a file that is opened in another way than with Python's `open`."""
    paths = getattr(_local, "paths", None)
    if paths is not None and isinstance(path, (str, os.PathLike)) and len(paths) < _MAX_FILES:
        paths.append(os.fsdecode(path))


def _record_and_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    if mode.startswith("r"):
        record_path(file)
    return _originals[0](file, mode, *args, **kwargs)


def select_data_files(paths: Sequence[str]) -> tuple[str, ...]:
    """Remove duplicates, captions and other text files from a list of opened paths."""
    return tuple(dict.fromkeys(p for p in paths if Path(p).suffix.lower() not in _TEXT_SUFFIXES))


def find_bad_files(paths: Sequence[str]) -> list[str]:
    """Paths of the tensor files that hold a value which is not finite. Reads the files again."""
    return [path for path in paths if try_call(lambda path=path: _is_bad_file(Path(path)))]  # type: ignore[misc]


def _is_bad_file(path: Path) -> bool:
    # Reading large files again would stop the loop for too long.
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return False
    suffix = path.suffix.lower()
    if suffix == ".safetensors" and "safetensors.torch" in sys.modules:
        return has_nonfinite_values(sys.modules["safetensors.torch"].load_file(path))
    if suffix in (".npz", ".npy") and "numpy" in sys.modules:
        content = sys.modules["numpy"].load(path, allow_pickle=False)
        return has_nonfinite_values(dict(content) if suffix == ".npz" else content)
    if suffix in (".pt", ".pth", ".bin"):
        return has_nonfinite_values(torch.load(path, map_location="cpu", weights_only=True))
    return False
