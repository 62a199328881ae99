"""Undoes writes to a folder's metadata.jsonl, byte for byte, from what each write has replaced."""

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.files import overwrite_file_atomically, read_file_inside_folder, write_atomically
from dit_lora.parsing import parse_json

UNDO_FOLDER = "undo"
"""Folder of the steps below the hidden work folder."""
_MAX_STEPS = 50  # that are kept; older ones are deleted
_MAX_BYTES = 64 * 2**20  # of the kept steps together; the latest one is kept whatever its size


@dataclass(frozen=True)
class UndoStep:
    """The latest write to the table."""

    step_id: str
    """Names the step, so that a page undoes the one that it shows."""
    num_captions: int
    """Captions that the write has changed or added."""
    time: float
    """When it was written, in seconds since 1970."""


class CaptionUndo:
    """Steps by which the writes to a table can be undone, newest first. Used inside `lock_table` only.

    A step has the lines that the write has replaced, and digests of the table before and after it. A table that has
    changed since is not touched, so undoing never loses a caption that somebody else has written.
    """

    def __init__(self, table: Path, work_folder: Path) -> None:
        self._table, self._folder = table, work_folder / UNDO_FOLDER

    def record(self, bom: bytes, old_lines: Sequence[str], lines: Sequence[str], num_captions: int) -> None:
        """Record a write before it is done. Raises `OSError`."""
        # Only these are stored: a copy of the table for each edited caption would fill the disk.
        replaced = {index: line for index, line in enumerate(old_lines) if index >= len(lines) or line != lines[index]}
        numbers = [int(path.stem) for path in self._list_files()]
        step = {
            "before": _compute_digest(_join_lines(bom, old_lines)) if self._table.exists() else None,
            "after": _compute_digest(_join_lines(bom, lines)),
            "captions": num_captions,
            "time": time.time(),
            "num_lines": len(old_lines),
            "lines": replaced,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._folder.is_symlink():
            raise OSError(errno.ENXIO, "is a link; remove it", str(self._folder))
        # JSON escapes lone surrogates, which UTF-8 cannot hold.
        write_atomically(self._folder / f"{max(numbers, default=0) + 1:08d}.json", json.dumps(step))
        num_bytes = 0
        # The newest first: what is too old or too much is at the end.
        for age, path in enumerate(reversed(self._list_files())):
            num_bytes += path.lstat().st_size
            if age >= _MAX_STEPS or (age > 0 and num_bytes > _MAX_BYTES):
                path.unlink(missing_ok=True)

    def find_step(self) -> UndoStep | None:
        """The step that would be undone; None if there is none, or if the table has changed since the last one."""
        digest = None
        # The folder may have no table yet.
        with suppress(FileNotFoundError):
            digest = _compute_digest(self._table.read_bytes())
        for path in reversed(self._list_files()):
            step = self._read_step(path)
            if step is not None and step["after"] == digest:
                # Numbers repeat after an undo, and digests after equal writes, so an id has both.
                step_id = f"{path.stem}-{digest[:12]}" if digest else path.stem
                return UndoStep(step_id, int(step["captions"]), float(step["time"]))
            # The step of a write that was interrupted is skipped.
            if step is None or step["before"] != digest:
                return None
        return None

    def undo(self, step_id: str | None = None) -> UndoStep:
        """Restore the bytes from before the last write, or remove a table that this write has created.

        Args:
            step_id: The step that is expected to be the last one; None for any.

        Raises:
            DitLoraError: If nothing was written, or the table or the last step has changed since.
        """
        undo_step = self.find_step()
        if undo_step is None:
            raise DitLoraError("nothing can be undone: the table has changed since the last write, or there was none")
        if step_id is not None and undo_step.step_id != step_id:
            raise DitLoraError("captions have changed since the page was loaded; load the page again")
        path = self._folder / f"{undo_step.step_id.partition('-')[0]}.json"
        step = self._read_step(path)
        assert step is not None  # `find_step` has read it
        try:
            if step["before"] is None:
                self._table.unlink()
            else:
                overwrite_file_atomically(self._table, self._restore(step))
        except OSError as error:
            raise DitLoraError(f"cannot write {self._table}: {error.strerror}") from error
        # This step and later ones, whose writes were interrupted.
        for later in self._list_files():
            if later.name >= path.name:
                later.unlink(missing_ok=True)
        return undo_step

    def _restore(self, step: dict[str, Any]) -> bytes:
        """The bytes of the table before a step."""
        data = self._table.read_bytes()
        # Writes keep the byte order mark, so that of the table now is that of before.
        bom = data[:3] if data.startswith(b"\xef\xbb\xbf") else b""
        lines, replaced = data[len(bom) :].decode().split("\n"), step["lines"]
        old_lines = [replaced[str(i)] if str(i) in replaced else lines[i] for i in range(int(step["num_lines"]))]
        restored = _join_lines(bom, old_lines)
        if _compute_digest(restored) != step["before"]:
            raise DitLoraError(f"cannot undo: the step in {self._folder} is damaged; the captions stay as they are")
        return restored

    def _list_files(self) -> list[Path]:
        with suppress(OSError):
            names = sorted(os.listdir(self._folder))
            return [self._folder / name for name in names if re.fullmatch(r"\d{8}\.json", name)]
        return []

    def _read_step(self, path: Path) -> dict[str, Any] | None:
        """A step's values; None if its file is damaged."""
        with suppress(OSError, ValueError):
            step = parse_json(read_file_inside_folder(self._folder, path))
            if isinstance(step, dict) and {"before", "after", "captions", "time", "num_lines", "lines"} <= step.keys():
                return step
        return None


def _join_lines(bom: bytes, lines: Sequence[str]) -> bytes:
    return bom + "\n".join(lines).encode()


def _compute_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
