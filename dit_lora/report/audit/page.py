"""Write a data set audit as a self-contained page: rejected samples, warnings, and statistics of the data."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from dit_lora.data.audit.finding import VERDICTS, Finding, JudgedSample, Verdict
from dit_lora.report.audit.charts import (
    ChannelChart,
    Histogram,
    aspect_ratios,
    counted,
    histogram,
)
from dit_lora.report.audit.pairs import Card, card, some_pairs
from dit_lora.report.charts.bars import BarChart, number
from dit_lora.report.pages import PagePictures, clipped, render, write_page

CARDS = 200
"""Maximum number of samples shown; the JSON file lists all of them."""
_REJECT_CARDS = 140  # the other cards are reserved for warnings, however many rejects there are
_NAMES = 24  # file names in one line
_LINES = 50  # lines of one list
_PAIRS = 12  # good samples with references or masks
_FINDINGS = 6  # findings on one card
_CHANNELS = 128


@dataclass(frozen=True)
class AuditGroup:
    """The samples whose first finding has this code, and the names of those shown under another code."""

    code: str
    count: int
    cards: Sequence[Card]
    """The samples shown on the page."""
    hidden: int
    elsewhere: str = ""


@dataclass(frozen=True)
class Buckets:
    """A bucket report as rows of text."""

    advice: Sequence[str]
    rows: Sequence[tuple[Sequence[str], bool]]
    """For each bucket its cells, and whether it is empty."""
    dropped: Sequence[tuple[str, str, str]]


def write_audit_page(
    path: Path,
    judged: Sequence[JudgedSample],
    *,
    title: str,
    totals: Mapping[str, Any],
    buckets: Mapping[str, Any] | None = None,
    encoded: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write the audit page atomically. It loads no external content, and all text from the data is escaped.

    At most `CARDS` samples are shown.

    Args:
        path: The HTML file.
        judged: All audited samples.
        title: The page's title.
        totals: The result of `audit.summary.totals`.
        buckets: A `BucketReport.as_dict()`, or None.
        encoded: The statistics of `audit.encoded.check_encoded`, or None.
        notes: Lines of text shown on the page.

    Raises:
        DitLoraError: If the file cannot be written.
    """
    pictures = PagePictures()
    rejects, warnings = _sheet(judged, pictures)
    page = render(
        "audit_page.html",
        title=title,
        totals=totals,
        notes=notes,
        rejects=rejects,
        warnings=warnings,
        pairs=[card(sample, pictures) for sample in some_pairs(judged, _PAIRS)],
        findings_of_a_card=_FINDINGS,
        worst_first=_worst_first,
        facts=_facts,
        codes=_codes(judged),
        charts=_charts(judged),
        buckets=bucket_rows(buckets) if buckets else None,
        encoded=encoded or {},
        drawn_channels=_CHANNELS,
        channel_chart=ChannelChart,
        number=number,
        outliers=_encoded_findings(judged) if encoded else [],
        duplicates=_duplicates(judged),
        lines=_LINES,
    )
    return write_page(path, page)


def _sheet(
    judged: Sequence[JudgedSample], pictures: PagePictures
) -> tuple[AuditGroup, list[AuditGroup]]:
    """The cards of rejected samples, and of samples with warnings by their first code, up to the page's limit."""
    rejected, warned = _by_first_code(judged, "reject"), _by_first_code(judged, "warn")
    count, warnings = sum(map(len, rejected.values())), sum(map(len, warned.values()))
    # Rejected samples may use the cards that warnings leave free.
    max_cards = _even(rejected, max(_REJECT_CARDS, CARDS - warnings))
    shown_samples = [
        sample for code, ones in rejected.items() for sample in ones[: max_cards[code]]
    ]
    cards = [card(sample, pictures) for sample in shown_samples]
    rejects = AuditGroup("reject", count, cards, count - len(cards))
    # Warnings share what is left.
    max_cards = _even(warned, CARDS - len(cards))
    groups = []
    for code, count in _counts(judged, "warn").most_common():
        code_samples = warned.get(code, [])
        # A sample with several findings is shown once, under its first code. The others are listed by name.
        files = {sample.file for sample in code_samples}
        having = [sample.file for sample in judged if any(f.code == code for f in sample.findings)]
        elsewhere = _names(file for file in having if file not in files)
        cards = [card(sample, pictures) for sample in code_samples[: max_cards.get(code, 0)]]
        groups.append(AuditGroup(code, count, cards, len(code_samples) - len(cards), elsewhere))
    return rejects, groups


def _by_first_code(
    judged: Sequence[JudgedSample], verdict: Verdict
) -> dict[str, list[JudgedSample]]:
    """Group the samples with this verdict by the code of the first finding with it."""
    groups: dict[str, list[JudgedSample]] = {}
    for sample in judged:
        if sample.verdict == verdict:
            code = next(finding.code for finding in sample.findings if finding.verdict == verdict)
            groups.setdefault(code, []).append(sample)
    return groups


def _worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: -VERDICTS.index(finding.verdict))


def _even(groups: Mapping[str, Sequence[JudgedSample]], room: int) -> dict[str, int]:
    """Divide `room` cards evenly between the groups. Cards that a small group does not need go to the others."""
    shares: dict[str, int] = {}
    # Smallest groups first: the cards that they leave unused are divided among the larger ones.
    ordered = sorted(groups.items(), key=lambda item: len(item[1]))
    for index, (code, group) in enumerate(ordered):
        shares[code] = min(len(group), room // (len(ordered) - index))
        room -= shares[code]
    return shares


def _counts(judged: Sequence[JudgedSample], verdict: Verdict) -> Counter[str]:
    """Number of samples by finding code."""
    return Counter(
        code
        for sample in judged
        for code in dict.fromkeys(f.code for f in sample.findings if f.verdict == verdict)
    )


def _codes(judged: Sequence[JudgedSample]) -> list[tuple[Verdict, str, int, str]]:
    """Verdict, code, number of samples and remedy of each finding code, the worst and most frequent first."""
    remedies: dict[str, str] = {}
    for sample in judged:
        for finding in sample.findings:
            remedies[finding.code] = remedies.get(finding.code) or finding.remedy
    verdicts: tuple[Verdict, ...] = ("reject", "warn")
    return [
        (verdict, code, count, remedies[code])
        for verdict in verdicts
        for code, count in _counts(judged, verdict).most_common()
    ]


def _facts(facts: Mapping[str, Any]) -> str:
    """Media properties of a clip as text, such as `1280 x 720, 25 fps, 4 s, h264`."""
    height, width = _number(facts.get("height")), _number(facts.get("width"))
    fps, seconds = _number(facts.get("fps")), _number(facts.get("seconds"))
    parts = [
        f"{width:g} x {height:g}" if height and width else "",
        f"{fps:.4g} fps" if fps else "",
        f"{seconds:.3g} s" if seconds else "",
        clipped(str(facts.get("codec") or "")),
    ]
    return ", ".join(part for part in parts if part)


def _charts(judged: Sequence[JudgedSample]) -> list[BarChart | Histogram]:
    """Charts of the data set's properties; unmeasured properties are left out."""

    def column(key: str) -> list[float]:
        numbers = (_number(sample.facts.get(key)) for sample in judged)
        return [value for value in numbers if value is not None]

    sizes = [
        (width, height)
        for sample in judged
        if (width := _number(sample.facts.get("width")))
        and (height := _number(sample.facts.get("height")))
    ]
    charts = [
        histogram("Duration", column("seconds"), "seconds"),
        histogram("Frame rate", column("fps"), "frames per second"),
        counted("Resolution", (f"{width:g}x{height:g}" for width, height in sizes)),
        aspect_ratios(sizes),
        histogram("Caption length", column("caption_tokens"), "tokens"),
    ]
    return [chart for chart in charts if chart is not None]


def _encoded_findings(judged: Sequence[JudgedSample]) -> list[tuple[Verdict, str, str]]:
    """Verdict, file and message of each finding about latents or embeddings."""
    findings = [
        (finding.verdict, sample.file, finding.words)
        for sample in judged
        for finding in sample.findings
        if finding.code.startswith(("latent_", "embedding_"))
    ]
    return sorted(findings)


def _duplicates(judged: Sequence[JudgedSample]) -> list[str]:
    """File names of each group of duplicate clips, as one line per group, the largest first."""
    files = {sample.file for sample in judged}
    # The finding's text ends with the name of the file that this one duplicates.
    parents = {
        sample.file: original
        for sample in judged
        for finding in sample.findings
        if finding.code in ("duplicate_clip", "near_duplicate_clip")
        and (original := _named_last(finding.words, files))
    }
    groups: dict[str, list[str]] = {}
    for file in parents:
        root, visited = file, {file}
        # Follow the chain of duplicates to its first file; `visited` guards against cycles.
        while (previous_file := parents.get(root)) and previous_file not in visited:
            visited.add(previous_file)
            root = previous_file
        groups.setdefault(root, [root]).append(file)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return [_names(dict.fromkeys(members)) for members in ordered]


def _named_last(words: str, files: Collection[str]) -> str | None:
    """The file name that this text ends with, or None. A name may contain spaces."""
    parts = words.split(" ")
    # Longest first, so that a name with spaces wins over its last word.
    tails = (" ".join(parts[start:]) for start in range(len(parts)))
    return next((tail for tail in tails if tail in files), None)


def bucket_rows(report: Mapping[str, Any]) -> Buckets:
    """Rows for buckets.html, from `BucketReport.as_dict()`."""
    rows = []
    for row in report["buckets"]:
        # Keys of `BucketReport.as_dict()`.
        shape = row["shape"]
        cells = [
            str(shape["frames"]),
            f"{shape['width']} x {shape['height']}",
            f"{row['clips']:,}",
            f"{row['samples']:,}",
            f"{row['share']:.1%}",
            f"{row['mean_crop']:.0%}",
            f"{row['worst_crop']:.0%}",
            f"{row['upscaled']:,}",
        ]
        rows.append((cells, not row["samples"]))
    dropped = [
        (sample["id"], sample["code"], clipped(sample["words"])) for sample in report["dropped"]
    ]
    return Buckets(report["advice"], rows, dropped)


def _names(files: Iterable[str]) -> str:
    listed = list(files)
    more = f" and {len(listed) - _NAMES:,} more" if len(listed) > _NAMES else ""
    return ", ".join(listed[:_NAMES]) + more


def _number(value: Any) -> float | None:
    """A media property as a finite float, else None."""
    # bool is a subclass of int, but not a measurement.
    real = isinstance(value, Real) and not isinstance(value, bool)
    return float(value) if real and math.isfinite(value) else None
