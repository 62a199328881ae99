"""Finds the runs and data sets below folders."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dit_lora.data.media.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from dit_lora.data.sources.caption_table import TABLE_NAME

_MAX_DEPTH = 5  # of a folder below those that were named
_MAX_FOLDERS = 20_000  # that are looked through
_DATA_SUFFIXES = {*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, ".tar"}


def find_folders(roots: Sequence[Path]) -> Iterator[tuple[bool, Path]]:
    """Yield the folders of runs (True) and of data sets (False)."""
    # Depth first and in the order of names, as a file manager shows them.
    pending = [(root, 0) for root in reversed(roots)]
    num_folders = 0
    while pending and num_folders < _MAX_FOLDERS:
        folder, depth = pending.pop()
        num_folders += 1
        with suppress(OSError), os.scandir(folder) as entries:  # removed meanwhile, or not readable
            folder_entries = list(entries)
            # A run's own folders hold no other runs.
            if any(entry.name == "config.yaml" for entry in folder_entries):
                yield True, folder
                continue
            # Folders below may hold data sets of their own, or runs.
            if any(_is_data(entry) for entry in folder_entries):
                yield False, folder
            if depth < _MAX_DEPTH:
                folders = [entry for entry in folder_entries if entry.is_dir(follow_symlinks=False)]
                names = sorted(entry.name for entry in folders if not entry.name.startswith("."))
                pending += [(folder / name, depth + 1) for name in reversed(names)]


def _is_data(entry: os.DirEntry[str]) -> bool:
    is_named_so = entry.name == TABLE_NAME or os.path.splitext(entry.name)[1].lower() in _DATA_SUFFIXES
    return is_named_so and entry.is_file(follow_symlinks=False)
