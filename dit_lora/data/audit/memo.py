"""Memo of the audit's measurements by content digest, so that a second audit decodes only new files."""

import base64
import json
import time
from dataclasses import asdict
from pathlib import Path

from dit_lora.data.audit.finding import Finding
from dit_lora.data.audit.probe import ProbedFile
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media
from dit_lora.data.sources.clips import LossMask
from dit_lora.files import write_atomically
from dit_lora.parsing import parse_json

# Seconds between two saves: the work that a killed audit loses at most.
_SAVE_INTERVAL_S = 20.0
AUDIT_VERSION = 5
"""Version of the probes; raised when the same bytes would give other findings or measurements."""


class AuditMemo:
    """Stores measurements of media files by digest, as JSON lines, so that later audits need not decode them.

    Findings that depend on the recipe are computed again from them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, str] = {}
        self._has_changes = False
        self._last_saved_s = time.monotonic()
        if path.is_file():
            start = f'{{"key": "{AUDIT_VERSION}/'
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
                # Skip a line that is incomplete (a killed process) or of another version. Only the key is read here:
                # most of a large memo is not needed.
                if line.startswith(start) and line.endswith("}"):
                    self._lines[line[len('{"key": "') : line.index('"', len(start))]] = line

    def __len__(self) -> int:
        return len(self._lines)

    def get(self, media: Media | LossMask, digest: str) -> ProbedFile | None:
        """Stored measurements of a file with this digest, read as this kind of media; None if there are none."""
        line = self._lines.get(_make_key(media, digest))
        if not line:
            return None
        record = parse_json(line)
        faults = tuple(
            Finding(fault["code"], fault["words"], fault["verdict"], fault["remedy"]) for fault in record["faults"]
        )
        thumbnail = base64.b64decode(record["thumbnail"]) if record["thumbnail"] else None
        return ProbedFile(faults, record["facts"], thumbnail, record["broke"])

    def store(self, media: Media | LossMask, digest: str, probed_file: ProbedFile) -> None:
        """Store the measurements of a file; all are saved every `_SAVE_INTERVAL_S` seconds."""
        key = _make_key(media, digest)
        # JSON cannot hold bytes, so the thumbnail is stored as base64.
        thumbnail = base64.b64encode(probed_file.thumbnail).decode() if probed_file.thumbnail else None
        # In files the message is called `words`.
        faults = [
            {"code": fault.code, "words": fault.message, "verdict": fault.verdict, "remedy": fault.remedy}
            for fault in probed_file.faults
        ]
        self._lines[key] = json.dumps({"key": key, **asdict(probed_file), "faults": faults, "thumbnail": thumbnail})
        self._has_changes = True
        if time.monotonic() - self._last_saved_s > _SAVE_INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Save the stored measurements of media files for the next audit."""
        if self._has_changes:
            write_atomically(self._path, "".join(f"{line}\n" for line in self._lines.values()))
            self._has_changes, self._last_saved_s = False, time.monotonic()


def _make_key(media: Media | LossMask, digest: str) -> str:
    """Key under which a file's measurements are stored, from its digest and its kind (image, video, mask).

    The kind is part of it, because it decides how the file is read.
    """
    if isinstance(media, LossMask):
        # An alpha mask is read from the same bytes as its picture, but measured differently.
        kind = "alpha" if media.alpha else "mask"
    else:
        kind = "image" if is_image(media) else "video"
    return f"{AUDIT_VERSION}/{kind}/{digest}"
