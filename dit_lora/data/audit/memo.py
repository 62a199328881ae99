"""Memo of the audit's measurements, keyed by the media's content: a second audit decodes only what is new."""

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dit_lora.data.audit.finding import Finding
from dit_lora.data.audit.probe import ProbedFile
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import Media
from dit_lora.data.sources.clips import LossMask
from dit_lora.files import write_whole
from dit_lora.parsing import parse_json

# A killed audit loses the work of so many seconds at most.
_SAVED_EVERY = 20.0
AUDIT_VERSION = 5
"""Version of the probes, raised when they would find or measure something else in the same bytes."""


class AuditMemo:
    """Probes by the media's digest; one JSON object a line. Each recipe's verdicts are made anew from them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, str] = {}
        self._changed = False
        self._saved_at = time.monotonic()
        if path.is_file():
            # A torn last line, or one of another version, is left out.
            for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
                key = _key_of(line)
                if key is not None:
                    self._lines[key] = line

    def __len__(self) -> int:
        return len(self._lines)

    def get(self, media: Media | LossMask, digest: str) -> ProbedFile | None:
        """Return the probe of these bytes under such a name; None if there is none."""
        line = self._lines.get(_key(media, digest))
        return _probe(parse_json(line)) if line else None

    def put(self, media: Media | LossMask, digest: str, probed: ProbedFile) -> None:
        """Keep a probe, and write the memo now and then."""
        key = _key(media, digest)
        thumbnail = base64.b64encode(probed.thumbnail).decode() if probed.thumbnail else None
        self._lines[key] = json.dumps({"key": key, **asdict(probed), "thumbnail": thumbnail})
        self._changed = True
        if time.monotonic() - self._saved_at > _SAVED_EVERY:
            self.save()

    def save(self) -> None:
        """Write the memo for the next run."""
        if self._changed:
            write_whole(self._path, "".join(f"{line}\n" for line in self._lines.values()))
            self._changed, self._saved_at = False, time.monotonic()


def _key(media: Media | LossMask, digest: str) -> str:
    """Return the key of a medium's bytes; its name only says whether they are read as an image or as a video."""
    if isinstance(media, LossMask):
        kind = "alpha" if media.alpha else "mask"
    else:
        kind = "image" if is_image(media) else "video"
    return f"{AUDIT_VERSION}/{kind}/{digest}"


def _key_of(line: str) -> str | None:
    """Return the key that a line begins with; None if the line is of another version, or torn."""
    # Lines are searched and parsed only when asked for, since most of a large memo is not needed.
    start = f'{{"key": "{AUDIT_VERSION}/'
    if not (line.startswith(start) and line.endswith("}")):
        return None
    return line[len('{"key": "') : line.index('"', len(start))]


def _probe(record: Mapping[str, Any]) -> ProbedFile:
    thumbnail = record["thumbnail"]
    return ProbedFile(
        tuple(Finding(**fault) for fault in record["faults"]),
        record["facts"],
        base64.b64decode(thumbnail) if thumbnail else None,
        record["broke"],
    )
