"""Find the runs and data sets below folders, and name each in addresses."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from starlette.exceptions import HTTPException

from dit_lora.report.found_folders import find_folders


class RunLibrary:
    """The runs and data sets below some folders. Only these can be opened by their id: no address holds a path."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(root) for root in roots]
        self._folders: dict[bool, dict[str, Path]] = {True: {}, False: {}}
        """Folders by id, of runs (True) and of data sets (False)."""

    def list_runs(self) -> dict[str, Path]:
        """The run folders by id, as they are now. Links are not followed."""
        return self._list_folders(is_run=True)

    def list_data_folders(self) -> dict[str, Path]:
        """The folders by id that hold a table of captions, clips, pictures or tar files, and are no part of a run."""
        return self._list_folders(is_run=False)

    def get_run_folder(self, run_id: str) -> Path:
        """The folder of a run. Raises `HTTPException` if there is none of this id."""
        return self._get_folder(run_id, is_run=True)

    def get_data_folder(self, data_id: str) -> Path:
        """The folder of a data set. Raises `HTTPException` if there is none of this id."""
        return self._get_folder(data_id, is_run=False)

    def _list_folders(self, *, is_run: bool) -> dict[str, Path]:
        # Both kinds in one walk, because large folders are slow to list.
        folders: dict[bool, dict[str, Path]] = {True: {}, False: {}}
        for is_found_run, folder in find_folders(self.roots):
            folders[is_found_run][compute_run_id(folder)] = folder
        self._folders = folders
        return folders[is_run]

    def _get_folder(self, folder_id: str, *, is_run: bool) -> Path:
        # It may have been made since the last look.
        folder = self._folders[is_run].get(folder_id) or self._list_folders(is_run=is_run).get(folder_id)
        if folder is None:
            kind = "run" if is_run else "data set"
            raise HTTPException(404, f"found no such {kind} below the studio's folders; go back to the list")
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
