"""SHA-256 of files and folders, remembered by path, size and time of change."""

import hashlib
import json
from pathlib import Path

from dit_lora.files import write_whole

# Files of a checkpoint's component that decide what it computes; a README does not.
_COMPONENT_SUFFIXES = {".json", ".safetensors", ".model", ".txt"}


class Digests:
    """Digests of file contents; a file is read again only if its size or time of change differs."""

    def __init__(self, memo: Path) -> None:
        self._memo = memo
        self._known: dict[str, list] = {}
        if memo.is_file():
            try:
                self._known = json.loads(memo.read_text(encoding="utf-8"))
            except ValueError:
                self._known = {}  # torn by a killed run; digests are computed anew

    def file(self, path: Path) -> str:
        """Hex SHA-256 of the bytes of one file."""
        status = path.stat()
        name, stamp = str(path.resolve()), [status.st_size, status.st_mtime_ns]
        known = self._known.get(name)
        if known is None or known[:2] != stamp:
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            known = self._known[name] = [*stamp, digest]
        return known[2]

    def component(self, folder: Path) -> str:
        """One digest for a checkpoint component: names and contents of its configs and weights."""
        files = [p for p in sorted(folder.rglob("*")) if p.suffix in _COMPONENT_SUFFIXES]
        lines = [f"{path.relative_to(folder).as_posix()} {self.file(path)}" for path in files]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def save(self) -> None:
        """Keep the memo for the next run."""
        write_whole(self._memo, json.dumps(self._known))
