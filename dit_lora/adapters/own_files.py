"""Find the files of a folder that belong to the checkpoint in it. Only these are copied into a result or published."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dit_lora.config.records import read_typed
from dit_lora.errors import DitLoraError, listed
from dit_lora.files import files_below

INDEX = "model_index.json"
# The files of a component that `from_pretrained` reads: configs, safetensors and tokenizer files.
_READ = re.compile(
    r"(\w+_)?config\.json|.+\.safetensors(\.index(\.\w+)?\.json)?|tokenizer\.json|vocab\.(json|txt)|merges\.txt|"
    r"added_tokens\.json|special_tokens_map\.json|chat_template\.json|normalizer\.json|"
    r".+\.(model|spm|tiktoken|jinja)"
)
_PLAIN = re.compile(r"[A-Za-z_]\w*")


def own_files(folder: Path) -> list[str]:
    """Sorted relative paths of the checkpoint's files: a pipeline's index and its components' files, or a single
    model's.

    Raises `DitLoraError` that lists all such files that link to outside the folder: their contents were never part of
    the checkpoint. In the Hub's cache, links to the blobs of the same repository are allowed.
    """
    if (folder / INDEX).is_file():
        # A pipeline: its index names the components, and each has a folder.
        candidates = [folder / INDEX]
        parts = [folder / name for name in _components(folder)]
    else:
        # A single model, with its files at the top of the folder.
        candidates = [path for path in folder.iterdir() if _READ.fullmatch(path.name)]
        parts = [path for path in folder.iterdir() if _is_part(path)]
    for part in parts:
        inner_files = files_below(part) if part.is_dir() else []
        candidates += [path for path in inner_files if _READ.fullmatch(path.name)]
    names = {path.relative_to(folder) for path in candidates if path.is_file()}
    # Hidden files and folders, such as .git, are not part of the checkpoint.
    visible = sorted(name for name in names if not any(part.startswith(".") for part in name.parts))
    require_inside(folder, [*parts, *(folder / name for name in visible)])
    return [name.as_posix() for name in visible]


def copy_own(base: Path, out: Path, wanted: Callable[[str], bool]) -> None:
    """Copy the checkpoint's files for whose relative path `wanted` returns True."""
    for name in own_files(base):
        if wanted(name):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base / name, out / name)


def require_inside(folder: Path, paths: list[Path]) -> None:
    """Raise `DitLoraError` that lists all paths that are, or lead through, links to outside the folder."""
    root = folder.resolve()
    # In the Hub's cache, files are links to the blobs beside `snapshots`.
    # .../models--OWNER--NAME/snapshots/COMMIT: take the folder of the whole repository.
    if root.parent.name == "snapshots":
        root = root.parent.parent
    outside = [path for path in paths if not path.resolve().is_relative_to(root)]
    if outside:
        names = sorted({path.relative_to(folder).as_posix() for path in outside})
        message = f"{folder}: these are links to outside of it, which are not followed; put the files themselves there"
        raise DitLoraError(listed(message, names))


def _components(folder: Path) -> list[str]:
    """Names of the components that the pipeline has."""
    try:
        named = read_typed(folder / INDEX, dict[str, Any])
    except (OSError, ValueError) as error:
        raise DitLoraError(f"cannot read {folder / INDEX}: {error}") from error
    return [
        name
        for name, value in named.items()
        # A component that the pipeline lacks is [null, null].
        if _PLAIN.fullmatch(name) and isinstance(value, list) and None not in value
    ]


def _is_part(path: Path) -> bool:
    """True if a subfolder belongs to the model, such as a second tokenizer."""
    return (
        _PLAIN.fullmatch(path.name) is not None
        and path.is_dir()
        and any(_READ.fullmatch(inner.name) for inner in path.iterdir())
    )
