"""Index of the entries in a folder of shards, by key."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from dit_lora.data.cache.shards import DEAD, SUFFIX, EntryLayout, ShardError, ShardHeader, StoredEntry, read_header
from dit_lora.data.storage import make_missing_file_error

# The resolution of a folder's modification time may be this coarse, so two changes can have the same time.
_MTIME_RESOLUTION_NS = 2_000_000_000
_NO_FILE_STAMP = (-1, -1)


class Index:
    """Index of a cache's usable entries: complete, not marked bad, one per key.

    Each header is read once. A shard is read again only if it was incomplete and has changed, or if `refresh`
    is told to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: dict[str, StoredEntry] = {}
        """The entries by key; of several copies, the one in the shard that was read first."""
        self._headers: dict[str, ShardHeader] = {}
        """Headers by the shard's file name, in the order in which they were read."""
        self._removed_headers: dict[str, ShardHeader] = {}
        """Last known headers of shards that were removed or can no longer be read."""
        self._incomplete: set[str] = set()
        # File names of the marks of bad entries.
        self._bad_marks: set[str] = set()
        self._layouts: dict[object, EntryLayout] = {}
        # The folder's time of change, and when it was listed; both in nanoseconds.
        self._folder_state = _NO_FILE_STAMP

    def get_stamp(self, shard: Path) -> tuple[int, int]:
        """Size and modification time (ns) that a cache shard had when its header was read."""
        header = self._headers.get(shard.name)
        return header.stamp if header else _NO_FILE_STAMP

    def is_unchanged(self, shard: Path) -> bool:
        """True if a shard's file is still the one whose header was read."""
        return _read_stamp(shard) == self.get_stamp(shard) != _NO_FILE_STAMP

    def may_have_changed(self) -> bool:
        """True if files may have been added to or removed from the cache folder since the last `refresh`."""
        changed_ns, listed_ns = self._folder_state
        current_ns = _read_stamp(self.root)[1]
        # A change soon after the listing may have left the same time, so a recent folder counts as changed.
        return current_ns != changed_ns or (current_ns != -1 and listed_ns - current_ns < _MTIME_RESOLUTION_NS)

    def refresh(self, shards_to_reread: Iterable[str] = ()) -> None:
        """List the cache folder again, and read new shards and those named in `shards_to_reread`."""
        # Take the time before listing, so that a change in between is noticed next time.
        listed_ns, changed_ns = time.time_ns(), _read_stamp(self.root)[1]
        files = os.listdir(self.root) if changed_ns != -1 else []
        names = {name for name in files if name.endswith(SUFFIX) and not name.startswith(".")}
        to_reread = {*shards_to_reread}
        to_reread |= {name for name in self._incomplete if not self.is_unchanged(self.root / name)}
        removed = {name for name in self._headers if name not in names or name in to_reread}
        for name in removed:
            header = self._headers.pop(name)
            if header.entries:
                # Remember what the shard held: this tells damaged entries from unreachable ones later.
                self._removed_headers[name] = header
        self._incomplete -= removed
        new = sorted(names - self._headers.keys())
        for name in new:
            self._headers[name] = self._read_header(name)
        bad_marks = {name for name in files if name.endswith(DEAD)}
        if removed or bad_marks != self._bad_marks:
            # Another shard may hold a copy of an entry that went away, so choose again among all shards.
            self._bad_marks, new = bad_marks, list(self._headers)
            self.entries.clear()
        for name in new:
            stem = name.removesuffix(SUFFIX)
            for entry in self._headers[name].entries:
                # A mark applies only to the copy in that shard; other copies of the key stay usable.
                is_dead = self._bad_marks and f"{stem}.{entry.key}{DEAD}" in self._bad_marks
                if entry.is_complete and not is_dead:
                    # The first copy of a key wins.
                    self.entries.setdefault(entry.key, entry)
        self._folder_state = changed_ns, listed_ns

    def raise_if_unreachable(self, key: str) -> None:
        """Raise `OSError` unless an unusable entry is certainly damaged or marked bad in its shard.

        Call it after a `refresh`. The storage is at fault if the entry's shard is missing or cannot be opened.
        It is also at fault if no shard is known to have held the entry and no shard has a damaged header, which
        might have named it.
        """
        if any(_has_entry(header, key) for header in self._headers.values()):
            return
        former = [name for name, header in self._removed_headers.items() if _has_entry(header, key)]
        shards = former or sorted(self._incomplete)
        # Opening and reading raise the `OSError` if the storage is at fault.
        for name in shards:
            with open(self.root / name, "rb") as file:
                file.read(1)
        if not shards:
            raise make_missing_file_error(self.root / f"{key}{SUFFIX}")

    def _read_header(self, name: str) -> ShardHeader:
        """Read the header of a cache shard; a shard that cannot be read counts as one without entries."""
        path = self.root / name
        try:
            header = read_header(path, self._layouts)
        except ShardError:
            header = ShardHeader([], _read_stamp(path), has_valid_name=False)
        except OSError:
            # No file has this stamp, so the shard is read again at the next `refresh`.
            header = ShardHeader([], _NO_FILE_STAMP, has_valid_name=False)
        if not header.entries or not all(entry.is_complete for entry in header.entries):
            self._incomplete.add(name)
        return header


def _has_entry(header: ShardHeader, key: str) -> bool:
    """True if a cache shard has an entry with this key, complete or not."""
    return any(entry.key == key for entry in header.entries)


def _read_stamp(path: Path) -> tuple[int, int]:
    """Size and modification time (ns) of a file; both are -1 if it does not exist."""
    try:
        state = os.stat(path)
    except OSError:
        return _NO_FILE_STAMP
    return state.st_size, state.st_mtime_ns
