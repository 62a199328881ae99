"""Generated captions on their way into a folder's metadata.jsonl: each is on disk as soon as it exists.

They are collected in `.captions/`, in one file per process, and added to the table when the work ends or is
started again. So a killed process loses none, and several processes may work on one folder.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dit_lora.data.sources.caption_lines import to_json_text
from dit_lora.data.sources.caption_table import WORK_FOLDER, lock_table, make_work_folder
from dit_lora.environment.operating_system import lock_file
from dit_lora.errors import DitLoraError
from dit_lora.files import append_line, read_file_inside_folder, read_json_lines


class GeneratedCaptions:
    """File of the captions that one process generates for a folder."""

    def __init__(self, root: Path, rank: int = 0) -> None:
        self._folder = root / WORK_FOLDER
        self._file = self._folder / f"part_{rank}.jsonl"

    @contextmanager
    def lock_folder(self) -> Iterator[None]:
        """Lock a folder whose captions are generated, for one command; raises `DitLoraError` if another has it."""
        make_work_folder(self._folder.parent)
        try:
            handle = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as error:
            raise DitLoraError(f"cannot write {self._folder}: {error.strerror}") from error
        try:
            lock_file(handle)
        except BlockingIOError as error:
            os.close(handle)
            folder = self._folder.parent
            raise DitLoraError(f"another process is writing captions for {folder}; wait until it ends") from error
        try:
            yield
        finally:
            os.close(handle)

    def add(self, name: str, caption: str) -> None:
        """Append a generated caption to the file of this process."""
        append_line(self._file, to_json_text({"file": name, "caption": caption}))

    def merge_into_table(self, *, include_all: bool) -> int:
        """Move generated captions, of this process or of all, into metadata.jsonl; returns how many were added.

        A caption that was added to the table in the meantime, for example in an editor, stays.
        """
        files = sorted(self._folder.glob("part_*.jsonl")) if include_all else [self._file]
        waiting = {
            str(row["file"]): str(row["caption"])
            for file in files
            # Damaged lines, which a killed process may have left, are skipped.
            for row in read_json_lines(file).objects
            if {"file", "caption"} <= row.keys()
        }
        with lock_table(self._folder.parent) as table:
            # Files that got a caption in the table in the meantime are not in `uncaptioned_files`.
            missing = {*table.uncaptioned_files}
            new = {name: text for name, text in waiting.items() if name in missing}
            if new:
                table.write_captions(new)
        # Delete the collected files only after the table was written.
        for file in files:
            file.unlink(missing_ok=True)
        return len(new)


def count_generated(root: Path) -> int:
    """Captions that commands have generated for a folder and not yet added to its table."""
    num_captions = 0
    for file in (root / WORK_FOLDER).glob("part_*.jsonl"):
        with suppress(OSError):
            num_captions += read_file_inside_folder(root, file).count(b"\n")
    return num_captions
