"""Index of the entries of a folder of shards: a few arrays, whatever their number."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from dit_lora.data.cache.shards import DEAD, SUFFIX, Layout, ShardError, read_header

# A folder's time of change has the resolution of a clock tick or of a file server, so two changes can share it.
_SAME_TIME_NS = 2_000_000_000

_ROW = np.dtype(
    [("key", "S16"), ("digest", "V16"), ("start", "u8"), ("shard", "u4"), ("layout", "u4")]
)
_NONE = (-1, -1)


class Index:
    """Index of the entries that can be used: whole, not set aside, and one for each key.

    Headers are read once. A shard is looked at again only if it was torn and has changed, or where it is named.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.stamps: list[tuple[int, int]] = []
        """Size and time of change of each shard when its header was read."""
        self._shards: list[str] = []  # by number; empty if it is gone
        self._numbers: dict[str, int] = {}
        self._torn: set[int] = set()
        self._dead: set[str] = set()  # names of tombstones
        self._layouts: list[Layout] = []
        self._met: dict[object, Layout] = {}
        self._layout_numbers: dict[object, int] = {}
        self._all = np.empty(0, _ROW)  # in the order of shards; copies and what was set aside too
        self._live = np.empty(0, "u4")  # those that can be used, by key
        self._keys = np.empty(0, "S16")  # theirs
        self._folder = _NONE  # its time of change, and when it was looked at

    def __len__(self) -> int:
        return len(self._live)

    def find_one(self, key: str) -> int:
        """Return the number of an entry; -1 if it is not there."""
        short = _short(key)
        at = int(self._keys.searchsorted(short))
        # numpy strips zeros from the end of a byte string.
        return at if at < len(self._keys) and self._keys[at] == short.rstrip(b"\0") else -1

    def find(self, keys: Sequence[str]) -> np.ndarray:
        """Return the numbers of entries; -1 for those that are not there."""
        wanted = np.array([_short(key) for key in keys], "S16")
        if not len(self._keys):
            return np.full(len(wanted), -1)
        at = np.searchsorted(self._keys, wanted).clip(max=len(self._keys) - 1)
        return np.where(self._keys[at] == wanted, at, -1)

    def row(self, number: int) -> tuple[int, int, Layout, bytes]:
        """Return shard, start, layout and digest of an entry."""
        _, digest, start, shard, layout = self._all[self._live[number]].item()
        return shard, start, self._layouts[layout], digest

    def path(self, shard: int) -> str:
        return os.path.join(self.root, self._shards[shard])

    def is_as_read(self, shard: int) -> bool:
        """Return True if the shard's file is the one whose header was read."""
        return _stamp(self.path(shard)) == self.stamps[shard] != _NONE

    def may_have_changed(self) -> bool:
        """Return True if files may have come or gone since the last look."""
        changed, looked = self._folder
        now = _stamp(self.root)[1]
        return now != changed or (now != -1 and looked - now < _SAME_TIME_NS)

    def refresh(self, reread: Iterable[str] = ()) -> set[int]:
        """Look at the folder; return the shards that are gone, or have a new number because they were read again."""
        # The time is taken before the listing, so that a change meanwhile is seen at the next look.
        looked, changed = time.time_ns(), _stamp(self.root)[1]
        files = os.listdir(self.root) if changed != -1 else []
        names = {name for name in files if name.endswith(SUFFIX) and not name.startswith(".")}
        again = {*reread, *(self._shards[n] for n in self._torn if not self.is_as_read(n))}
        old = {n for name, n in self._numbers.items() if name not in names or name in again}
        for number in old:
            del self._numbers[self._shards[number]]
            # The number is never used again, so whoever kept it sees that the shard is gone.
            self._shards[number] = ""
        self._torn -= old
        new = [self._read(name) for name in sorted(names - self._numbers.keys())]
        if old or new:
            gone = np.isin(self._all["shard"], np.array(sorted(old), "u4"))
            self._all = np.concatenate([self._all[~gone], *new])
        dead = {name for name in files if name.endswith(DEAD)}
        if old or new or dead != self._dead:
            self._dead = dead
            self._choose()
        self._folder = changed, looked
        return old

    def _read(self, name: str) -> np.ndarray:
        """Read the rows of a shard: those of entries whose bytes are all there."""
        number = self._numbers[name] = len(self._shards)
        self._shards.append(name)
        # No file has this stamp, so a shard that could not be read is never the one that was read.
        self.stamps.append(_NONE)
        rows = []
        try:
            header = read_header(Path(self.path(number)), self._met)
        except ShardError:
            self.stamps[number] = _stamp(self.path(number))
            self._torn.add(number)
            return np.empty(0, _ROW)
        except OSError:
            self._torn.add(number)
            return np.empty(0, _ROW)
        self.stamps[number] = header.size, header.stamp
        for entry in header.entries:
            if entry.end > header.size:
                self._torn.add(number)
                continue
            layout = self._layout_numbers.setdefault(entry.layout.tensors, len(self._layouts))
            if layout == len(self._layouts):
                self._layouts.append(entry.layout)
            rows.append((_short(entry.key), entry.digest, entry.start, number, layout))
        return np.array(rows, _ROW)

    def _choose(self) -> None:
        """Choose for each key the first entry that was not set aside."""
        # Stable, so that the entry of the shard that was read first stays the first of its key.
        order = np.argsort(self._all["key"], kind="stable")
        keys, shards = self._all["key"][order], self._all["shard"][order]
        alive = np.ones(len(keys), bool)
        for name in self._dead:
            shard, _, key = name.removesuffix(DEAD).partition(".")
            number, short = self._numbers.get(f"{shard}{SUFFIX}"), _short(key)
            if number is not None:
                # Only the copy in that shard is set aside; other copies of the key stay.
                begin, end = np.searchsorted(keys, short), np.searchsorted(keys, short, "right")
                alive[begin:end] &= shards[begin:end] != number
        order, keys = order[alive], keys[alive]
        first = np.ones(len(keys), bool)
        first[1:] = keys[1:] != keys[:-1]
        self._live, self._keys = order[first].astype("u4"), keys[first]


def _short(key: str) -> bytes:
    """Return 128 bits that stand for a key."""
    return xxhash.xxh3_128_digest(key.encode())


def _stamp(path: Path | str) -> tuple[int, int]:
    """Return size and time of change in nanoseconds; both are -1 if there is no such file."""
    try:
        state = os.stat(path)
    except OSError:
        return _NONE
    return state.st_size, state.st_mtime_ns
