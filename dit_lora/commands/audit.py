"""Audits a folder without a recipe: its list of samples, media and captions. It needs neither torch nor Diffusers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dit_lora.config.load import load_folder_config
from dit_lora.data.audit.captions import check_captions
from dit_lora.data.audit.finding import VERDICTS, AuditedSample, Finding
from dit_lora.data.audit.pairs import summarise_pairs
from dit_lora.data.audit.runner import audit_media
from dit_lora.data.audit.sound import summarise_sound
from dit_lora.data.audit.summary import compute_totals, merge_audits
from dit_lora.data.sources.clips import DataScan
from dit_lora.data.sources.scan import scan_sources
from dit_lora.terminal import make_one_line

_MAX_SHOWN_REJECTS = 50  # rejects in the terminal

_REMEDIES = {
    "missing": "restore the file, or remove its line",
    "caption_missing": "write a caption (dit-lora caption), or remove the sample",
    "caption_empty": "write a caption, or remove the sample",
    "caption_long": "shorten it, or remove the sample",
    "caption_not_text": "save the caption as UTF-8",
    "unsafe_path": "move the file into the folder of the list, or set data.media to its folder",
    "unsafe_name": "pack the tar again with plain names",
    "duplicate_clip": "keep one of them",
    "reference_missing": "restore the file, or remove the sample",
    "reference_ambiguous": "keep one file of each name",
    "mask_missing": "restore the file, or remove the sample",
    "mask_ambiguous": "keep one file of each name",
}

Findings = dict[str, list[Finding]]
"""Findings by the name of their sample."""


@dataclass(frozen=True)
class Audit:
    """Result of an audit: the findings on every sample, and notes on the dataset as a whole."""

    title: str
    audited_samples: list[AuditedSample]
    notes: tuple[str, ...] = ()
    buckets: dict[str, Any] | None = None
    encoded: dict[str, Any] | None = None

    @property
    def totals(self) -> dict[str, Any]:
        """Number of audited samples, by verdict and in total."""
        return compute_totals(self.audited_samples)

    @property
    def passed(self) -> bool:
        """True if the audit rejected no sample."""
        return not self.totals["reject"]

    def lines(self) -> list[str]:
        """The audit as text for a terminal.

        It has rejected samples with reasons, warnings by code, notes, advice and totals.
        """
        # Every rejected sample has a line, up to a limit.
        lines = []
        for sample in self.audited_samples:
            if sample.verdict == "reject":
                reasons = [f"{f.code}: {f.message}" for f in sample.findings if f.verdict == "reject"]
                lines.append(make_one_line(f"reject  {sample.file}: {'; '.join(reasons)}"))
        if len(lines) > _MAX_SHOWN_REJECTS:
            lines = [*lines[:_MAX_SHOWN_REJECTS], f"and {len(lines) - _MAX_SHOWN_REJECTS} more; --json lists all"]
        sums = self.totals
        # Warnings are counted by code: a list of all of them would hide the rejects.
        warned = [sample for sample in self.audited_samples if sample.verdict == "warn"]
        codes = Counter(code for sample in warned for code in {f.code for f in sample.findings})
        lines += [f"warn    {code}: {count:,}" for code, count in codes.most_common()]
        lines += [make_one_line(f"note    {note}") for note in self.notes]
        lines += [make_one_line(f"advice  {advice}") for advice in (self.buckets or {}).get("advice", ())]
        counts = ", ".join(f"{sums[verdict]:,} {verdict}" for verdict in VERDICTS)
        return [*lines, f"{sums['samples']:,} samples: {counts}"]


def audit_folder(path: str, overrides: Sequence[str] = (), *, progress: bool = True) -> Audit:
    """Audit a folder, tar or dataset without a recipe: no shape is required, and caption length is not limited.

    `overrides` set where its captions, references and masks are, such as `data.mask_folder=masks`.
    """
    data = load_folder_config(path, overrides)
    # Lists the files with their captions; nothing is decoded yet.
    sources = scan_sources(data)
    # None: without a recipe there are no shapes to check against.
    audited_samples = audit_media(sources.clips, None, show_progress=progress)
    captions = check_captions(sources.clips, None, None)
    notes = (*sources.notes, *summarise_pairs(audited_samples), *summarise_sound(audited_samples))
    return Audit(path, merge_audits(audited_samples, collect_scan_findings(sources), captions), notes)


def collect_scan_findings(scan_result: DataScan) -> Findings:
    """Findings on samples that the scan could not list: missing files, captions that are not text."""
    problems: Findings = {}
    for problem in scan_result.problems:
        remedy = _REMEDIES.get(problem.code, "correct it, or remove the sample")
        problems.setdefault(problem.file, []).append(Finding(problem.code, problem.message, "reject", remedy))
    return problems
