"""Edit a folder's captions while other programs may edit them too."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, Semaphore

from dit_lora.data.audit.stored_audit import SampleFilter, StoredAudit
from dit_lora.data.sources.caption_changes import CaptionChange, compute_change_version
from dit_lora.data.sources.caption_table import CaptionTable, lock_table
from dit_lora.data.sources.caption_text import find_caption_fault
from dit_lora.data.sources.caption_undo import UndoStep
from dit_lora.errors import DitLoraError
from dit_lora.report.captions.page import CaptionFindings, compute_caption_version
from dit_lora.report.captions.rules import CaptionRules
from dit_lora.report.captions.sheet import ContactSheet, SheetSource, build_sheet, count_tokens, list_sheet_lines

_MAX_AWAITED_FILES = 2_000
"""A sheet of at most these files, which take a few hundredths of a second, waits for the first check of all."""
_CHECK_DELAY_S = 0.1
"""Time for the sheet that has started the check to be sent first."""
_CHECKER = ThreadPoolExecutor(1, "caption-checks")
_CHECKER_IS_FREE = Semaphore(1)
"""Without a queue: a page that finds the checker busy is asked for again, and its folder may be wanted no more."""


@dataclass(frozen=True)
class CaptionChangePreview:
    """What a change of many captions would do."""

    captions: dict[str, tuple[str, str]]
    """The caption as it is and as it would be, by file."""
    version: str


@dataclass(frozen=True)
class CaptionState:
    """A caption as stored in its file, with its version and findings."""

    caption: str
    version: str
    findings: list[dict[str, str]]
    num_tokens: int
    """Words without a tokenizer."""


class StaleCaptionError(DitLoraError):
    """Raised for an edit of a caption that has changed since the page was rendered."""

    def __init__(self, state: CaptionState) -> None:
        super().__init__("this caption was changed elsewhere")
        self.state = state


class CaptionEdits:
    """A folder's captions, read again when their files have changed, since other programs may write them."""

    def __init__(self, root: Path, rules: CaptionRules) -> None:
        self.root, self.rules = root, rules
        self._table: CaptionTable | None = None
        self._audit = StoredAudit()
        self._findings = CaptionFindings(rules)
        self._first_check: Future[tuple[CaptionTable, StoredAudit, CaptionFindings]] | None = None
        self._lock = Lock()

    def build_sheet(self, sample_filter: SampleFilter, page_number: int) -> ContactSheet:
        """One page of the files that pass a filter.

        The first check of many files runs in a thread, and sheets are not checked until it ends. A filter that
        needs the findings waits for it.
        """
        with self._lock:
            is_checked = self._findings.has_checked or (self._first_check is not None and self._first_check.done())
            if is_checked or sample_filter.needs_audit_results:
                return build_sheet(self._read_source(self._read_table()), sample_filter, page_number, self.rules)
            # Opening a .txt file for each of many files takes longer than all else.
            table = self._read_table(skip_texts=not sample_filter.text)
            if len(table.media) <= _MAX_AWAITED_FILES:
                return build_sheet(self._read_source(self._read_table()), sample_filter, page_number, self.rules)
            sheet = build_sheet(SheetSource(table, is_checked=False), sample_filter, page_number, self.rules)
            # At most one check in this process: that of another folder may be under way.
            if self._first_check is None and _CHECKER_IS_FREE.acquire(blocking=False):
                # A copy of what edits change meanwhile. The next `update` checks these edits.
                self._first_check = _CHECKER.submit(
                    self.check_all_captions, replace(table, captions=dict(table.captions))
                )
                self._first_check.add_done_callback(lambda _: _CHECKER_IS_FREE.release())
            return sheet

    def check_all_captions(self, table: CaptionTable) -> tuple[CaptionTable, StoredAudit, CaptionFindings]:
        """Read the folder's audit and .txt files and check all captions, which takes a second for 30,000 files."""
        # Both threads share one interpreter, which would otherwise delay the sheet.
        time.sleep(_CHECK_DELAY_S)
        table = CaptionTable.read(self.root, table, allow_other_lists=True)
        findings = CaptionFindings(self.rules)
        findings.update(table)
        return table, StoredAudit.read(self.root), findings

    def list_caption_lines(self, sample_filter: SampleFilter) -> list[str]:
        """A line for each file that passes a filter: name, tokens or words, codes of findings, caption."""
        with self._lock:
            source = self._read_source(self._read_table())
            return list_sheet_lines(source, source.list_matching_files(sample_filter), self.rules)

    def find_media(self, name: str) -> Path | None:
        """Path of a media file of the folder; None if there is none of that name."""
        with self._lock:
            # The file may have been added since the table was read.
            if self._table is None or not self._table.has_media(name):
                self._read_table(skip_texts=True)
            return self.root / name if self._table and self._table.has_media(name) else None

    def preview(self, change: CaptionChange, sample_filter: SampleFilter) -> CaptionChangePreview:
        """What a change does to the captions of the files that pass a filter; nothing is written.

        Raises:
            DitLoraError: If a changed caption could not be trained on.
        """
        with self._lock:
            return self._preview(self._read_table(), change, sample_filter)

    def apply(
        self, change: CaptionChange, sample_filter: SampleFilter, version: str | None = None
    ) -> CaptionChangePreview:
        """Change the captions of the files that pass a filter, in one write; returns what was done.

        Nothing is written if `version` is given and the change is not the one that was shown with it. The result's
        version then differs.

        Raises:
            DitLoraError: If a changed caption could not be trained on, or the table cannot be written.
        """
        with self._lock, lock_table(self.root, self._table) as table:
            self._table = table
            preview = self._preview(table, change, sample_filter)
            # Compared inside the lock, so that nobody writes between the check and our write.
            if version in (None, preview.version):
                table.write_captions({name: new for name, (_, new) in preview.captions.items()})
            return preview

    def undo(self, step_id: str | None = None) -> UndoStep:
        """Take back the last write to the table, byte for byte.

        Raises:
            DitLoraError: If there is none, or it is not the one of `step_id`, or the table has changed since.
        """
        with self._lock, lock_table(self.root, self._table) as table:
            # The next request reads the table again, because its stamp has changed.
            return table.undo(step_id)

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

    def _read_table(self, *, skip_texts: bool = False) -> CaptionTable:
        """The files and captions as they are now; see `CaptionTable.read`."""
        previous, first_check = self._table, self._first_check
        # The first check has read the .txt files.
        if first_check is not None and first_check.done() and first_check.exception() is None:
            previous = first_check.result()[0] if previous is None or previous.has_unread_texts else previous
        # Parses only what has changed since the last time.
        self._table = CaptionTable.read(self.root, previous, allow_other_lists=True, skip_texts=skip_texts)
        return self._table

    def _read_source(self, table: CaptionTable) -> SheetSource:
        """Everything about the files as they are now; waits for a first check that is under way."""
        # A check that failed is tried again at the next request.
        first_check, self._first_check = self._first_check, None
        if first_check is not None:
            _, self._audit, self._findings = first_check.result()
        self._audit = StoredAudit.read(self.root, self._audit)
        return SheetSource(table, self._audit, self._findings.update(table))

    def _preview(
        self, table: CaptionTable, change: CaptionChange, sample_filter: SampleFilter
    ) -> CaptionChangePreview:
        source = (
            self._read_source(table) if sample_filter.needs_audit_results else SheetSource(table, is_checked=False)
        )
        names = source.list_matching_files(sample_filter)
        changes = change.find_changes(table, names)
        captions = {name: (table.captions.get(name, ""), new) for name, new in changes.items()}
        return CaptionChangePreview(captions, compute_change_version(table, changes))

    def _build_state(self, table: CaptionTable, name: str) -> CaptionState:
        caption = table.captions.get(name, "")
        findings = [
            {"verdict": finding.verdict, "code": finding.code, "words": finding.message}
            for finding in self._read_source(table).caption_findings.get(name, ())
        ]
        num_tokens = count_tokens(table, [name], self.rules)[name]
        return CaptionState(caption, compute_caption_version(caption), findings, num_tokens)


def _normalize_line_ends(caption: str) -> str:
    """A caption with line ends as in a browser's text area."""
    return caption.replace("\r\n", "\n").replace("\r", "\n")
