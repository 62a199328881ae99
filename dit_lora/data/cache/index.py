"""Index of the entries of a folder of shards, by key."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from dit_lora.data.cache.shards import (
    DEAD,
    SUFFIX,
    EntryLayout,
    Header,
    ShardError,
    StoredEntry,
    read_header,
)
from dit_lora.data.storage import missing_file

# A folder's time of change has the resolution of a clock tick or of a file server, so two changes can share it.
_SAME_TIME_NS = 2_000_000_000
_NO_FILE = (-1, -1)


class Index:
    """Index of the entries that can be used: whole, not set aside, and one for each key.

    Headers are read once. A shard is looked at again only if it was torn and has changed, or where it is named.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: dict[str, StoredEntry] = {}
        """The entries by key: of several copies, that of the shard that was read first."""
        self._headers: dict[str, Header] = {}
        """Headers by the shard's name, in the order in which they were read."""
        self._former: dict[str, Header] = {}
        """Last headers with entries of shards that are gone, or can no longer be read."""
        self._torn: set[str] = set()
        self._dead: set[str] = set()  # names of tombstones
        self._layouts: dict[object, EntryLayout] = {}
        self._folder = _NO_FILE  # its time of change, and when it was looked at

    def stamp(self, shard: Path) -> tuple[int, int]:
        """Return size and time of change of a shard when its header was read."""
        header = self._headers.get(shard.name)
        return header.stamp if header else _NO_FILE

    def is_as_read(self, shard: Path) -> bool:
        """Return True if the shard's file is the one whose header was read."""
        return _stamp(shard) == self.stamp(shard) != _NO_FILE

    def may_have_changed(self) -> bool:
        """Return True if files may have come or gone since the last look."""
        changed, looked = self._folder
        now = _stamp(self.root)[1]
        return now != changed or (now != -1 and looked - now < _SAME_TIME_NS)

    def refresh(self, reread: Iterable[str] = ()) -> None:
        """Look at the folder, and read the shards named `reread` again."""
        # The time is taken before the listing, so that a change meanwhile is seen at the next look.
        looked, changed = time.time_ns(), _stamp(self.root)[1]
        files = os.listdir(self.root) if changed != -1 else []
        names = {name for name in files if name.endswith(SUFFIX) and not name.startswith(".")}
        again = {*reread, *(name for name in self._torn if not self.is_as_read(self.root / name))}
        gone = {name for name in self._headers if name not in names or name in again}
        for name in gone:
            header = self._headers.pop(name)
            if header.entries:
                self._former[name] = header
        self._torn -= gone
        new = sorted(names - self._headers.keys())
        for name in new:
            self._headers[name] = self._read(name)
        dead = {name for name in files if name.endswith(DEAD)}
        if gone or dead != self._dead:
            # What comes back may be a copy in any of the shards.
            self._dead, new = dead, list(self._headers)
            self.entries.clear()
        self._choose(new)
        self._folder = changed, looked

    def require_lost(self, key: str) -> None:
        """Raise `OSError` unless an entry that is not usable is surely damaged or marked bad in its shard.

        Call it after a `refresh`. The storage is at fault where the entry's shard is not there or cannot be opened, and
        where no shard is known to have held it and none has a damaged header, which may have named it.
        """
        if any(_holds(header, key) for header in self._headers.values()):
            return
        former = [name for name, header in self._former.items() if _holds(header, key)]
        shards = former or sorted(self._torn)
        for name in shards:
            with open(self.root / name, "rb") as file:
                file.read(1)
        if not shards:
            raise missing_file(self.root / f"{key}{SUFFIX}")

    def _read(self, name: str) -> Header:
        """Read a shard's header; one that cannot be read has no entries."""
        path = self.root / name
        try:
            header = read_header(path, self._layouts)
        except ShardError:
            header = Header([], _stamp(path), is_named=False)
        except OSError:
            # No file has this stamp, so the shard is read again at the next look.
            header = Header([], _NO_FILE, is_named=False)
        if not header.entries or not all(entry.is_whole for entry in header.entries):
            self._torn.add(name)
        return header

    def _choose(self, names: Iterable[str]) -> None:
        """Add the entries of these shards that are whole and not set aside, unless there is one of their key."""
        for name in names:
            header, stem = self._headers[name], name.removesuffix(SUFFIX)
            for entry in header.entries:
                # Only the copy in that shard is set aside; other copies of the key stay.
                is_dead = self._dead and f"{stem}.{entry.key}{DEAD}" in self._dead
                if entry.is_whole and not is_dead:
                    self.entries.setdefault(entry.key, entry)


def _holds(header: Header, key: str) -> bool:
    return any(entry.key == key for entry in header.entries)


def _stamp(path: Path) -> tuple[int, int]:
    """Return size and time of change in nanoseconds; both are -1 if there is no such file."""
    try:
        state = os.stat(path)
    except OSError:
        return _NO_FILE
    return state.st_size, state.st_mtime_ns
