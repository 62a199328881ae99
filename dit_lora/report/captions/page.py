"""A page of a folder's clips and pictures with their captions, and the audit's findings about each caption."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from dit_lora.data.audit.captions import check_captions
from dit_lora.data.audit.finding import Finding
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.data.sources.caption_text import has_word
from dit_lora.data.sources.clips import Clip
from dit_lora.report.captions.rules import CaptionRules
from dit_lora.report.captions.thumbnails import make_thumbnail
from dit_lora.report.pages import PagePictures, render_page, write_page

_MAX_WRITTEN_CARDS = 200


@dataclass(frozen=True)
class CaptionCard:
    """One row of the written page: a file with its caption."""

    name: str
    link: str
    """Path from the page's folder; empty if the file is elsewhere."""
    caption: str
    findings: Sequence[Finding]
    picture: str
    """Data URI of a thumbnail; empty if it cannot be read, or the page is full."""


class CaptionFindings:
    """The caption audit's findings by file, cached between requests: only changed captions are checked again."""

    def __init__(self, rules: CaptionRules) -> None:
        self._rules = rules
        self._checked_captions: dict[str, str | None] = {}
        self._findings_by_file: dict[str, list[Finding]] = {}
        self.has_checked = False
        """True if `update` has been called: a first call checks all captions."""

    def update(self, table: CaptionTable) -> dict[str, list[Finding]]:
        """Update the findings to the table's current captions.

        The result equals a full check of the table with `check_table_captions`.
        """
        self.has_checked = True
        old_captions = self._checked_captions
        # None for a file without a caption.
        current_captions = {name: table.captions.get(name) for name in table.media}
        # Files that are new, were removed, or have another caption.
        changed = {name for name, _ in old_captions.items() ^ current_captions.items()}
        if changed:
            # The audit counts equal captions, without regard to whitespace, so other files with a changed caption's
            # text are checked again too. Every changed file's current text is among these.
            texts = {_normalize_caption(old_captions.get(name)) for name in changed}
            texts |= {_normalize_caption(current_captions.get(name)) for name in changed}
            affected = {name for name, caption in current_captions.items() if _normalize_caption(caption) in texts}
            for name in changed | affected:
                self._findings_by_file.pop(name, None)
            self._findings_by_file |= check_table_captions(table, self._rules, affected)
            self._checked_captions = current_captions
        return self._findings_by_file


def _normalize_caption(caption: str | None) -> str:
    return " ".join((caption or "").split())


def compute_caption_version(caption: str) -> str:
    """Digest of a caption, by which a page identifies the version that it has edited."""
    return hashlib.sha256(caption.encode("utf-8", errors="surrogatepass")).hexdigest()[:24]


def check_table_captions(
    table: CaptionTable, rules: CaptionRules, names: Collection[str] | None = None
) -> dict[str, list[Finding]]:
    """The audit's findings about captions by file, for `names` or all files. Files without findings are absent."""
    media = [name for name in table.media if names is None or name in names]
    captions = {name: table.captions.get(name, "").strip() for name in media}  # as training does
    described = [Clip(name, MediaFile(table.root / name), caption) for name, caption in captions.items() if caption]
    findings = check_captions(described, rules.tokenizer, rules.max_tokens)
    for name in (name for name, caption in captions.items() if not caption):
        # The audit's check only takes files that have a caption, so missing ones are reported here.
        message = "it has no caption; training refuses it"
        findings[name] = [Finding("caption_missing", message, "reject", "write a caption")]
    for clip in described:
        if rules.trigger and not has_word(clip.caption, rules.trigger):
            message = f"its caption does not contain {rules.trigger}"
            finding = Finding("trigger_missing", message, "warn", "add the word to the caption")
            findings[clip.id] = [*findings.get(clip.id, ()), finding]
    return findings


def write_captions_page(path: Path, table: CaptionTable, rules: CaptionRules) -> Path:
    """Write a page of captions that links to the media files. Files with findings come first.

    Raises:
        DitLoraError: If the file cannot be written.
    """
    findings = check_table_captions(table, rules)
    # False sorts before True; the sort is stable, so both halves keep the table's order.
    ordered = sorted(table.media, key=lambda name: name not in findings)
    pictures = PagePictures()
    cards = [
        _build_card(table, name, findings, pictures.make_uri(make_thumbnail(table.root / name)), path.parent)
        for name in ordered[:_MAX_WRITTEN_CARDS]
    ]
    page = render_page("captions_page.html", **count_captions(table, findings), cards=cards)
    return write_page(path, page)


def count_captions(table: CaptionTable, findings: dict[str, list[Finding]]) -> dict[str, Any]:
    """Title of a page of captions, and its numbers of files: all, without a caption, and with other findings."""
    missing = len(table.uncaptioned_files)
    return {
        "title": table.root.resolve().name,
        "total": len(table.media),
        "missing": missing,
        "flagged": len(findings) - missing,
    }


def _build_card(
    table: CaptionTable, name: str, findings: dict[str, list[Finding]], picture: str, page_dir: Path
) -> CaptionCard:
    # Both resolved: a link to a file outside of the page's folder would not work for readers elsewhere.
    target, root = (table.root / name).resolve(), page_dir.resolve()
    link = encode_address(target.relative_to(root).as_posix()) if target.is_relative_to(root) else ""
    return CaptionCard(name, link, table.captions.get(name, ""), findings.get(name, []), picture)


def encode_address(name: str) -> str:
    """A file name as a URL path. Names that are not UTF-8 hold their bytes as surrogate escapes."""
    return quote(name.encode(errors="surrogateescape"))


def decode_address(address: str) -> str:
    """Decode a URL path made by `encode_address` to the file name."""
    return unquote(address, errors="surrogateescape")
