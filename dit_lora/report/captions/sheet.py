"""A page of a folder's contact sheet: thumbnails, captions with their tokens, findings, masks and references."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dit_lora.data.audit.captions import count_caption_tokens
from dit_lora.data.audit.finding import Finding
from dit_lora.data.audit.stored_audit import SampleFilter, StoredAudit, StoredSample
from dit_lora.data.media.media import MediaFile
from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.data.sources.caption_undo import UndoStep
from dit_lora.data.sources.clips import Clip
from dit_lora.report.captions.extra_files import RelatedFile
from dit_lora.report.captions.page import compute_caption_version, count_captions, encode_address
from dit_lora.report.captions.rules import CaptionRules
from dit_lora.terminal import make_one_line

CARDS_PER_PAGE = 60
"""Number of files on one page."""


@dataclass(frozen=True)
class SheetCard:
    """One file of the contact sheet."""

    name: str
    address: str
    """The name as a URL path, which can also represent names that are not UTF-8."""
    caption: str
    version: str
    findings: Sequence[Finding]
    related: Sequence[RelatedFile]
    num_tokens: int
    """Tokens of the caption with the special ones; without a tokenizer, words."""
    measures: str
    """Size and length of the file as the audit has measured them; empty without an audit."""

    @property
    def caption_json(self) -> str:
        """The exact caption as JSON for a script: HTML would change line ends, NUL and lone surrogates."""
        return json.dumps(self.caption)


@dataclass(frozen=True)
class ContactSheet:
    """One page of the files that pass a filter, with figures of the whole folder."""

    cards: Sequence[SheetCard]
    number: int
    """Number of the page, from 1."""
    num_pages: int
    num_matches: int
    facts: Mapping[str, Any]
    """Title, and numbers of files: `total`, `missing`, and `flagged`. Before the first check, `flagged` is None; so is
    `missing` while .txt files are unread."""
    codes: Sequence[tuple[str, int]]
    """Codes of findings with their numbers of files, the most frequent first."""
    audit_time: float
    """When the media were audited, in seconds since 1970; 0 if they were not."""
    undo: UndoStep | None
    rules: CaptionRules
    has_metadata_rows: bool
    """True if captions come from a metadata.jsonl, and not from .txt files or none."""
    other_list: str
    """The list that has the captions, where they cannot be edited; empty where they can."""
    is_checked: bool
    """False before the first check of the folder: findings, codes and the audit's measurements are not known yet."""


@dataclass(frozen=True)
class SheetSource:
    """Everything that is known of a folder's files."""

    table: CaptionTable
    audit: StoredAudit = field(default_factory=StoredAudit)
    caption_findings: Mapping[str, Sequence[Finding]] = field(default_factory=dict)
    is_checked: bool = True
    """False if neither the captions were checked nor the audit was read."""

    def get_findings(self, name: str) -> list[Finding]:
        """All findings about a file: of the audit's last run, and of its caption as it is now."""
        return [*self.get_sample(name).findings, *self.caption_findings.get(name, ())]

    def get_sample(self, name: str) -> StoredSample:
        return self.audit.samples.get(name) or StoredSample()

    def list_matching_files(self, sample_filter: SampleFilter) -> list[str]:
        """The files that pass a filter, in the order of the folder."""
        # The usual case, which need not look at each of many files.
        if sample_filter == SampleFilter():
            return self.table.media
        captions = self.table.captions
        return [
            name
            for name in self.table.media
            if sample_filter.matches(name, captions.get(name, ""), self.get_findings(name), self.get_sample(name))
        ]


def build_sheet(source: SheetSource, sample_filter: SampleFilter, number: int, rules: CaptionRules) -> ContactSheet:
    """Page `number` (from 1) of the files that pass a filter; a number beyond the last page gives the last one."""
    table, names = source.table, source.list_matching_files(sample_filter)
    # Ceiling division; an empty result still has one page.
    num_pages = max(1, -(-len(names) // CARDS_PER_PAGE))
    number = min(max(1, number), num_pages)
    page_names = names[(number - 1) * CARDS_PER_PAGE : number * CARDS_PER_PAGE]
    if table.has_unread_texts:
        table.read_texts(page_names)
    lengths = count_tokens(table, page_names, rules)
    # Files without findings are in neither, and files that were removed since the audit are left out.
    codes: Counter[str] = Counter()
    # A set for each file: a code that a file has twice counts once.
    for name in {*source.caption_findings, *source.audit.samples} & table.media_names:
        codes.update({finding.code for finding in source.get_findings(name)})
    facts = count_captions(table, {name: list(findings) for name, findings in source.caption_findings.items()})
    facts |= {} if source.is_checked else {"flagged": None}
    facts |= {"missing": None} if table.has_unread_texts else {}
    return ContactSheet(
        cards=[_build_card(source, name, num_tokens) for name, num_tokens in lengths.items()],
        number=number,
        num_pages=num_pages,
        num_matches=len(names),
        facts=facts,
        codes=sorted(codes.items(), key=lambda item: (-item[1], item[0])),
        audit_time=source.audit.time,
        undo=None if table.other_list else table.undo_step,
        rules=rules,
        has_metadata_rows=table.has_metadata_rows,
        other_list=table.other_list,
        is_checked=source.is_checked,
    )


def list_sheet_lines(source: SheetSource, names: Sequence[str], rules: CaptionRules) -> list[str]:
    """A line for each file, with tabs between name, tokens or words of the caption, codes of findings, and caption."""
    lines = []
    for name, num_tokens in count_tokens(source.table, names, rules).items():
        codes = ",".join(finding.code for finding in source.get_findings(name))
        # Tabs and line ends in a caption would look like further columns and rows.
        caption = make_one_line(source.table.captions.get(name, ""))
        lines.append("\t".join((make_one_line(name), str(num_tokens), codes or "ok", caption)))
    return lines


def count_tokens(table: CaptionTable, names: Sequence[str], rules: CaptionRules) -> dict[str, int]:
    """Tokens of each file's caption, special ones included; without a tokenizer, its words."""
    # Stripped, as training does.
    captions = {name: table.captions.get(name, "").strip() for name in names}
    clips = [Clip(name, MediaFile(table.root / name), caption) for name, caption in captions.items()]
    lengths = count_caption_tokens(clips, rules.tokenizer)
    return {name: lengths.get(caption, len(caption.split())) for name, caption in captions.items()}


def _build_card(source: SheetSource, name: str, num_tokens: int) -> SheetCard:
    sample = source.get_sample(name)
    caption = source.table.captions.get(name, "")
    # An audit of an earlier version of the data does not know new files.
    measures = [f"{sample.width:g} x {sample.height:g}"] if sample.width and sample.height else []
    # The length of a picture is 0.
    measures += [f"{sample.seconds:.3g} s"] if sample.frames > 1 else []
    return SheetCard(
        name=name,
        address=encode_address(name),
        caption=caption,
        version=compute_caption_version(caption),
        findings=source.get_findings(name),
        related=[
            RelatedFile(column, related, encode_address(related))
            for column, related in source.table.related_files.get(name, ())
            # Other columns hold any text, which names no file of the folder.
            if related in source.table.related_names
        ],
        num_tokens=num_tokens,
        measures=", ".join(measures),
    )
