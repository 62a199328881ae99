"""Find the runs below folders, and name each in addresses."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from starlette.exceptions import HTTPException

_MAX_DEPTH = 5  # of a run's folder below the folders that were named
_MAX_FOLDERS = 20_000  # that are looked through


class RunLibrary:
    """The runs below some folders. Only these can be opened by their id, so no address holds a path."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(root) for root in roots]
        self._folders: dict[str, Path] = {}

    def list_runs(self) -> dict[str, Path]:
        """The run folders by id, as they are now. Links are not followed."""
        self._folders = {compute_run_id(folder): folder for folder in _find_runs(self.roots)}
        return self._folders

    def get_folder(self, run_id: str) -> Path:
        """The folder of a run. Raises `HTTPException` if there is none of this id."""
        # The run may have been started since the last look.
        folder = self._folders.get(run_id) or self.list_runs().get(run_id)
        if folder is None:
            raise HTTPException(404, "found no such run below the studio's folders; go back to the list of runs")
        return folder

    def get_name(self, folder: Path) -> str:
        """A run's name on the pages: its path below the folder that was named."""
        for root in self.roots:
            if folder != root and folder.is_relative_to(root):
                return folder.relative_to(root).as_posix()
        return folder.absolute().name


def compute_run_id(folder: Path) -> str:
    """Id of a run's folder in addresses: any path, also one that is not UTF-8, gets one, the same at each start."""
    return hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]


def _find_runs(roots: Sequence[Path]) -> Iterator[Path]:
    pending = [(root, 0) for root in reversed(roots)]
    num_folders = 0
    while pending and num_folders < _MAX_FOLDERS:
        folder, depth = pending.pop()
        num_folders += 1
        with suppress(OSError), os.scandir(folder) as entries:  # removed meanwhile, or not readable
            folder_entries = sorted(entries, key=lambda entry: entry.name)
            # A run's own folders hold no other runs.
            if any(entry.name == "config.yaml" for entry in folder_entries):
                yield folder
            elif depth < _MAX_DEPTH:
                names = [
                    e.name for e in folder_entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")
                ]
                pending += [(folder / name, depth + 1) for name in reversed(names)]
