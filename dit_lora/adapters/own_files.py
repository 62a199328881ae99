"""Find the files of a folder that belong to the checkpoint in it. Only these are copied into a result or published."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dit_lora.config.records import read_typed_json
from dit_lora.environment.pipeline_index import find_index_file
from dit_lora.errors import DitLoraError, format_list
from dit_lora.files import list_files, read_regular_file
from dit_lora.parsing import parse_json

# The files of a component that `from_pretrained` reads: configs, safetensors and tokenizer files.
_COMPONENT_FILE = re.compile(
    r"(\w+_)?config\.json|.+\.safetensors(\.index(\.\w+)?\.json)?|tokenizer\.json|vocab\.(json|txt)|merges\.txt|"
    r"added_tokens\.json|special_tokens_map\.json|chat_template\.json|normalizer\.json|"
    r".+\.(model|spm|tiktoken|jinja)"
)
_PLAIN_NAME = re.compile(r"[A-Za-z_]\w*")


def list_checkpoint_files(folder: Path) -> list[str]:
    """Sorted relative paths of the checkpoint's files: a pipeline's index and its components' files, or a single
    model's.

    Raises `DitLoraError` that lists all such files that link to outside the folder: their contents were never part of
    the checkpoint. In the Hub's cache, links to the blobs of the same repository are allowed.
    """
    index = find_index_file(folder)
    if index is not None:
        # A pipeline: its index names the components, and each has a folder.
        candidates = [index]
        parts = [folder / name for name in _list_components(index)]
    else:
        # A single model, with its files at the top of the folder.
        candidates = [path for path in folder.iterdir() if _COMPONENT_FILE.fullmatch(path.name)]
        parts = [path for path in folder.iterdir() if _is_component_folder(path)]
    for part in parts:
        inner_files = list_files(part) if part.is_dir() else []
        candidates += [path for path in inner_files if _COMPONENT_FILE.fullmatch(path.name)]
    names = {path.relative_to(folder) for path in candidates if path.is_file()}
    # Hidden files and folders, such as .git, are not part of the checkpoint.
    visible = sorted(name for name in names if not any(part.startswith(".") for part in name.parts))
    require_paths_inside_checkpoint(folder, [*parts, *(folder / name for name in visible)])
    return [name.as_posix() for name in visible]


def copy_checkpoint_files(base: Path, output_folder: Path, should_copy: Callable[[str], bool]) -> None:
    """Copy the files of a checkpoint for whose relative path `should_copy` returns True."""
    for name in list_checkpoint_files(base):
        if should_copy(name):
            (output_folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(base / name, output_folder / name)


def require_valid_json(folder: Path) -> None:
    """Raise `DitLoraError` that lists all JSON files of the checkpoint that cannot be parsed, as torn downloads."""
    problems = []
    for name in list_checkpoint_files(folder):
        if name.endswith(".json"):
            try:
                parse_json(read_regular_file(folder / name))
            except (DitLoraError, OSError) as error:
                problems.append(f"{name}: {error}")
    if problems:
        raise DitLoraError(format_list(f"{folder} is damaged; download these files again", problems))


def require_paths_inside_checkpoint(folder: Path, paths: list[Path]) -> None:
    """Raise `DitLoraError` that lists all paths that are, or lead through, links to outside the folder."""
    root = folder.resolve()
    # In the Hub's cache, files are links to the blobs beside `snapshots`.
    # .../models--OWNER--NAME/snapshots/COMMIT: take the folder of the whole repository.
    if root.parent.name == "snapshots":
        root = root.parent.parent
    outside = [path for path in paths if not path.resolve().is_relative_to(root)]
    if outside:
        names = sorted({path.relative_to(folder).as_posix() for path in outside})
        message = f"{folder}: links to files outside of it are not followed; put the files themselves there"
        raise DitLoraError(format_list(message, names))


def _list_components(index: Path) -> list[str]:
    try:
        named = read_typed_json(index, dict[str, Any])
    except OSError as error:
        raise DitLoraError(f"cannot read {index}: {error.strerror or error}") from error
    return [
        name
        for name, value in named.items()
        # A component that the pipeline lacks is [null, null].
        if _PLAIN_NAME.fullmatch(name) and isinstance(value, list) and None not in value
    ]


def _is_component_folder(path: Path) -> bool:
    """True if a subfolder of a checkpoint belongs to the model, such as a second tokenizer."""
    return (
        _PLAIN_NAME.fullmatch(path.name) is not None
        and path.is_dir()
        and any(_COMPONENT_FILE.fullmatch(inner.name) for inner in path.iterdir())
    )
