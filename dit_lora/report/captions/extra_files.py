"""Masks and references that lie in folders of their own, as a recipe names them for a data set."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dit_lora.config.load import load_recipe
from dit_lora.data.media.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from dit_lora.data.sources.clips import MASK, REFERENCE
from dit_lora.report.captions.page import encode_address


@dataclass(frozen=True)
class RelatedFile:
    """A mask, a reference or another file that belongs to a file of the contact sheet."""

    column: str
    """The column of the table that names it, or its role."""
    name: str
    address: str
    page: str = ""
    """Address of the data set that it is in; empty for that of the contact sheet."""


def find_extra_files(
    recipe: Path, root: Path, names: Sequence[str], pages: Mapping[Path, str]
) -> tuple[dict[str, list[RelatedFile]], list[str]]:
    """Masks and references of a data set's files, from the folders that a recipe names.

    Args:
        recipe: Its file.
        root: The folder of the data set.
        names: Files of the data set.
        pages: Addresses of the data sets that can be shown, by the real path of their folders.

    Returns:
        The files by the name of the sample, and the folders that cannot be shown.

    Raises:
        DitLoraError: If the recipe cannot be read.
    """
    files: dict[str, list[RelatedFile]] = {name: [] for name in names}
    hidden = []
    for role, folder in _list_extra_folders(recipe, root):
        page = pages.get(folder.resolve())
        if page is None:
            hidden.append(str(folder))
            continue
        listed: dict[str, dict[str, str]] = {}
        for name in names:
            parent, file = os.path.split(name)
            if parent not in listed:
                listed[parent] = _list_media_by_stem(folder / parent)
            match = listed[parent].get(os.path.splitext(file)[0])
            if match is not None:
                path = os.path.join(parent, match)
                files[name].append(RelatedFile(role, path, encode_address(path), page))
    return files, hidden


def _list_extra_folders(recipe: Path, root: Path) -> list[tuple[str, Path]]:
    """Role and path of the folders that a recipe names for a data set."""
    real = root.resolve()
    folders = []
    for source in load_recipe(recipe).data.all_sources:
        if Path(source.path).expanduser().resolve() == real:
            folders += [(REFERENCE, Path(name).expanduser()) for name in source.reference_folders]
            folders += [(MASK, Path(source.mask_folder).expanduser())] if source.mask_folder else []
    return folders


def _list_media_by_stem(folder: Path) -> dict[str, str]:
    """Names of a folder's pictures and clips by their names without suffix."""
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if not name.startswith(".")]
        suffixes = IMAGE_SUFFIXES | VIDEO_SUFFIXES
        return {stem: stem + end for stem, end in map(os.path.splitext, sorted(names)) if end.lower() in suffixes}
    return {}
