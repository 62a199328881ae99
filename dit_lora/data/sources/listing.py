"""Lists a folder's media, captions and tars."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from dit_lora.data.media.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from dit_lora.errors import DitLoraError
from dit_lora.files import MAX_FOLDER_DEPTH

PACKED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
"""Suffixes of compressed tars, which cannot be read without unpacking."""
_MEDIA_SUFFIXES = VIDEO_SUFFIXES | IMAGE_SUFFIXES
_CLOCK_RESOLUTION_NS = 2_000_000_000
"""Coarsest resolution of a file system's times, in nanoseconds (FAT: two seconds)."""


def is_tar(path: Path) -> bool:
    """True if a path is named as a tar, compressed or not, and is not a folder."""
    return path.name.lower().endswith((".tar", *PACKED_SUFFIXES)) and not path.is_dir()


@dataclass
class FolderListing:
    """Relative paths of the files below a folder, without hidden ones; links are followed."""

    root: Path
    media: list[str] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    tars: list[str] = field(default_factory=list)
    other_files: list[str] = field(default_factory=list)
    """All files of other kinds."""
    folders: list[str] = field(default_factory=list)
    """Names of the folders directly in the root."""
    broken_links: set[str] = field(default_factory=set)
    """Links to files that do not exist."""
    _folder_times: dict[str, int] = field(default_factory=dict)
    """Modification times (ns) of the folders, which change when a name is added or removed."""
    _listed_ns: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        # The real path of the root, so that a link back to it is noticed.
        for name in self._walk_files(str(self.root), "", (os.path.realpath(self.root),)):
            # Faster than `splitext`; the results differ only for names without an extension.
            suffix = name[name.rfind(".") :].lower()
            if suffix in _MEDIA_SUFFIXES:
                self.media.append(name)
            elif suffix == ".txt":
                self.texts.add(name)
            elif suffix == ".tar" or name.lower().endswith(PACKED_SUFFIXES):
                self.tars.append(name)
            else:
                self.other_files.append(name)

    def is_current(self) -> bool:
        """True if no folder in the listing has changed since it was listed."""
        # With a coarse clock, a change right after the listing may have left the same modification time.
        newest = max(self._folder_times.values(), default=self._listed_ns)
        if newest > self._listed_ns - _CLOCK_RESOLUTION_NS:
            return False
        try:
            return all(os.stat(folder).st_mtime_ns == before for folder, before in self._folder_times.items())
        except OSError:
            return False

    def _walk_files(self, folder: str, prefix: str, parent_paths: tuple[str, ...]) -> Iterator[str]:
        """Yield the relative paths of all files below a folder; `parent_paths`: real paths of it and its parents."""
        if len(parent_paths) > MAX_FOLDER_DEPTH:
            raise DitLoraError(
                f"{parent_paths[0]} has more than {MAX_FOLDER_DEPTH} levels of folders; give the folder with the "
                "samples"
            )
        # scandir returns each entry's kind without a further system call, which would take most of the time.
        try:
            self._folder_times[folder] = os.stat(folder).st_mtime_ns
            with os.scandir(folder) as scanned:
                entries = []
                for entry in scanned:
                    # First: there may be one for each sample, and their order does not matter.
                    if entry.name.endswith(".txt") and entry.name[0] != "." and entry.is_file(follow_symlinks=False):
                        self.texts.add(prefix + entry.name)
                    else:
                        entries.append(entry)
            entries.sort(key=attrgetter("name"))
        except FileNotFoundError:
            return
        except OSError as error:
            raise DitLoraError(f"cannot read the folder {folder}: {error.strerror}") from error
        for entry in entries:
            # Hidden entries include the folder of caption locks and files of the operating system.
            if entry.name.startswith("."):
                continue
            try:
                is_folder = entry.is_dir()
            except OSError:
                # Raised for a link to itself.
                is_folder = False
            if is_folder:
                if not prefix:
                    self.folders.append(entry.name)
                real = os.path.realpath(entry.path)
                # Do not follow a link to a folder that contains it, which would never end.
                if real not in parent_paths:
                    yield from self._walk_files(entry.path, f"{prefix}{entry.name}/", (*parent_paths, real))
                continue
            if entry.is_symlink() and not os.path.exists(entry.path):
                # Still listed, so that the reader can report it as missing.
                self.broken_links.add(prefix + entry.name)
            yield prefix + entry.name
