"""Edit a folder's captions while other programs may edit them too."""

from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from dit_lora.data.sources.caption_table import CaptionTable, lock_table
from dit_lora.data.sources.caption_text import find_caption_fault
from dit_lora.errors import DitLoraError
from dit_lora.report.captions.page import CaptionFindings, TextRules, compute_caption_version, render_served_page


@dataclass(frozen=True)
class CaptionState:
    """A caption as stored in its file, with its version and findings."""

    caption: str
    version: str
    findings: list[dict[str, str]]


class StaleCaptionError(DitLoraError):
    """Raised for an edit of a caption that has changed since the page was rendered."""

    def __init__(self, state: CaptionState) -> None:
        super().__init__("this caption was changed elsewhere")
        self.state = state


class CaptionEdits:
    """A folder's captions, read again when their files have changed, since other programs may write them."""

    def __init__(self, root: Path, rules: TextRules) -> None:
        self.root = root
        self._table: CaptionTable | None = None
        self._findings = CaptionFindings(rules)
        self._lock = Lock()

    def render_page(self, token: str, page_number: int, only_flagged: bool) -> str:
        with self._lock:
            table = self._read_table()
            return render_served_page(table, self._findings.update(table), token, page_number, only_flagged)

    def find_media(self, name: str) -> Path | None:
        """Path of a media file of the captioned folder; None if there is none of that name."""
        with self._lock:
            # The file may have been added since the table was read.
            if self._table is None or name not in self._table.media_names:
                self._read_table()
            return self.root / name if self._table and name in self._table.media_names else None

    def save_caption(self, name: str, caption: str, version: str) -> CaptionState:
        """Write one caption exactly as given, unless it differs from the current one only in line ends.

        Raises:
            DitLoraError: If the caption cannot be trained on.
            StaleCaptionError: If the caption in the file is not that of `version`.
        """
        # (code, message), or None for a caption that training accepts.
        fault = find_caption_fault(caption)
        if fault is not None:
            raise DitLoraError(fault[1])
        # The file lock keeps other processes out between reading the table and writing it.
        with self._lock, lock_table(self.root, self._table) as table:
            self._table = table
            if name not in table.media_names:
                raise DitLoraError("this file is no longer in the folder")
            current = table.captions.get(name, "")
            # A text area changes CRLF to LF: without this, opening and saving would rewrite the file.
            if _normalize_line_ends(caption) != _normalize_line_ends(current):
                if version != compute_caption_version(current):
                    raise StaleCaptionError(self._build_state(table, name))
                num_crlf = current.count("\r\n")
                # Use CRLF if the current caption uses only CRLF.
                if num_crlf > 0 and current.count("\n") == current.count("\r") == num_crlf:
                    caption = _normalize_line_ends(caption).replace("\n", "\r\n")
                table.write_captions({name: caption})
            return self._build_state(table, name)

    def _read_table(self) -> CaptionTable:
        # Parses only what has changed since the last time.
        self._table = CaptionTable.read(self.root, self._table)
        return self._table

    def _build_state(self, table: CaptionTable, name: str) -> CaptionState:
        caption = table.captions.get(name, "")
        findings = [
            {"verdict": finding.verdict, "code": finding.code, "words": finding.message}
            for finding in self._findings.update(table).get(name, [])
        ]
        return CaptionState(caption, compute_caption_version(caption), findings)


def _normalize_line_ends(caption: str) -> str:
    """A caption with line ends as in a browser's text area."""
    return caption.replace("\r\n", "\n").replace("\r", "\n")
