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

_MEDIA_SUFFIXES = IMAGE_SUFFIXES | VIDEO_SUFFIXES


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
    real, folders = root.resolve(), []
    for source in load_recipe(recipe).data.all_sources:
        # A recipe may write the path of the data set in another way, with `~` or a link.
        if Path(source.path).expanduser().resolve() == real:
            folders += [(REFERENCE, name) for name in source.reference_folders]
            folders += [(MASK, source.mask_folder)] if source.mask_folder else []
    files: dict[str, list[RelatedFile]] = {name: [] for name in names}
    hidden = []
    for role, text in folders:
        folder = Path(text).expanduser()
        page = pages.get(folder.resolve())
        # The studio reads no folder that it was not given, whatever a recipe names.
        if page is None:
            hidden.append(text)
            continue
        # Only the subfolders with files of this page are listed: a mask has the path of its sample, with any suffix.
        matches: dict[str, str] = {}
        for parent in {os.path.dirname(name) for name in names}:
            with suppress(OSError):
                listed = [os.path.join(parent, file) for file in sorted(os.listdir(folder / parent))]
                parts = [os.path.splitext(path) for path in listed]
                matches |= {stem: stem + suffix for stem, suffix in parts if suffix.lower() in _MEDIA_SUFFIXES}
        for name in names:
            path = matches.get(os.path.splitext(name)[0])
            if path is not None:
                files[name].append(RelatedFile(role, path, encode_address(path), page))
    return files, hidden
