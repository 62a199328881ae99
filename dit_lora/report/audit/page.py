"""The audit of a data set as one self-contained page: what cannot be used, what is worth a look, what there is."""

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
"""Samples that are shown; the others are in the JSON file."""
_REJECT_CARDS = 140  # warnings keep the rest, however many rejects there are
_NAMES = 24  # in one line
_LINES = 50  # of a list
_PAIRS = 12  # sound samples with references or masks
_FINDINGS = 6  # of one card
_CHANNELS = 128


@dataclass(frozen=True)
class AuditGroup:
    """Samples with one code before all others, and the names of those shown under another."""

    code: str
    count: int
    cards: Sequence[Card]
    """The samples that are shown."""
    hidden: int
    elsewhere: str = ""


@dataclass(frozen=True)
class Buckets:
    """A bucket report, its rows in words."""

    advice: Sequence[str]
    rows: Sequence[tuple[Sequence[str], bool]]
    """The cells of each, and whether no sample is in it."""
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
    """Write the page in one rename; it fetches and runs nothing, and everything from the data is escaped.

    `totals` are `audit.summary.totals`, `buckets` a `BucketReport.as_dict()`, `encoded` the statistics of
    `audit.encoded.check_encoded`. At most `CARDS` samples are shown. Raises `DitLoraError` if it cannot be written.
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
        pairs=[card(one, pictures) for one in some_pairs(judged, _PAIRS)],
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
    """Return the rejected samples, and those with warnings by their first code, within the page's room."""
    rejected, warned = _by_first_code(judged, "reject"), _by_first_code(judged, "warn")
    count, warnings = sum(map(len, rejected.values())), sum(map(len, warned.values()))
    room = _even(rejected, max(_REJECT_CARDS, CARDS - warnings))
    shown = [one for code, ones in rejected.items() for one in ones[: room[code]]]
    cards = [card(one, pictures) for one in shown]
    rejects = AuditGroup("reject", count, cards, count - len(cards))
    room = _even(warned, CARDS - len(cards))
    groups = []
    for code, count in _counts(judged, "warn").most_common():
        own = warned.get(code, [])
        files = {one.file for one in own}
        having = [one.file for one in judged if any(f.code == code for f in one.findings)]
        elsewhere = _names(file for file in having if file not in files)
        cards = [card(one, pictures) for one in own[: room.get(code, 0)]]
        groups.append(AuditGroup(code, count, cards, len(own) - len(cards), elsewhere))
    return rejects, groups


def _by_first_code(
    judged: Sequence[JudgedSample], verdict: Verdict
) -> dict[str, list[JudgedSample]]:
    """Group the samples with this verdict by the first finding that gives it."""
    groups: dict[str, list[JudgedSample]] = {}
    for one in judged:
        if one.verdict == verdict:
            code = next(finding.code for finding in one.findings if finding.verdict == verdict)
            groups.setdefault(code, []).append(one)
    return groups


def _worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: -VERDICTS.index(finding.verdict))


def _even(groups: Mapping[str, Sequence[JudgedSample]], room: int) -> dict[str, int]:
    """Return how many of each may be shown: all alike, and what one does not need the others get."""
    shares: dict[str, int] = {}
    ordered = sorted(groups.items(), key=lambda item: len(item[1]))
    for index, (code, group) in enumerate(ordered):
        shares[code] = min(len(group), room // (len(ordered) - index))
        room -= shares[code]
    return shares


def _counts(judged: Sequence[JudgedSample], verdict: Verdict) -> Counter[str]:
    """Count samples by code."""
    return Counter(
        code
        for one in judged
        for code in dict.fromkeys(f.code for f in one.findings if f.verdict == verdict)
    )


def _codes(judged: Sequence[JudgedSample]) -> list[tuple[Verdict, str, int, str]]:
    """Return verdict, code, samples and remedy, the worst and most frequent first."""
    remedies: dict[str, str] = {}
    for one in judged:
        for finding in one.findings:
            remedies[finding.code] = remedies.get(finding.code) or finding.remedy
    verdicts: tuple[Verdict, ...] = ("reject", "warn")
    return [
        (verdict, code, count, remedies[code])
        for verdict in verdicts
        for code, count in _counts(judged, verdict).most_common()
    ]


def _facts(facts: Mapping[str, Any]) -> str:
    """Return what is known of a clip, such as `1280 x 720, 25 fps, 4 s, h264`."""
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
    """Return charts of what the set is made of; what nobody measured is left out."""

    def column(key: str) -> list[float]:
        numbers = (_number(one.facts.get(key)) for one in judged)
        return [value for value in numbers if value is not None]

    sizes = [
        (width, height)
        for one in judged
        if (width := _number(one.facts.get("width")))
        and (height := _number(one.facts.get("height")))
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
    """Return verdict, file and words of what the encoders' output showed."""
    findings = [
        (finding.verdict, one.file, finding.words)
        for one in judged
        for finding in one.findings
        if finding.code.startswith(("latent_", "embedding_"))
    ]
    return sorted(findings)


def _duplicates(judged: Sequence[JudgedSample]) -> list[str]:
    """Return the files of each group that is one clip, the largest group first."""
    files = {one.file for one in judged}
    parents = {
        one.file: other
        for one in judged
        for finding in one.findings
        if finding.code in ("duplicate_clip", "near_duplicate_clip")
        and (other := _named_last(finding.words, files))
    }
    groups: dict[str, list[str]] = {}
    for file in parents:
        first, seen = file, {file}
        while (before := parents.get(first)) and before not in seen:
            seen.add(before)
            first = before
        groups.setdefault(first, [first]).append(file)
    ordered = sorted(groups.values(), key=len, reverse=True)
    return [_names(dict.fromkeys(members)) for members in ordered]


def _named_last(words: str, files: Collection[str]) -> str | None:
    """Return the file whose name these words end with; a name may have spaces."""
    parts = words.split(" ")
    tails = (" ".join(parts[start:]) for start in range(len(parts)))
    return next((tail for tail in tails if tail in files), None)


def bucket_rows(report: Mapping[str, Any]) -> Buckets:
    """Return what buckets.html shows, from `BucketReport.as_dict`."""
    rows = []
    for row in report["buckets"]:
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
    dropped = [(one["id"], one["code"], clipped(one["words"])) for one in report["dropped"]]
    return Buckets(report["advice"], rows, dropped)


def _names(files: Iterable[str]) -> str:
    listed = list(files)
    more = f" and {len(listed) - _NAMES:,} more" if len(listed) > _NAMES else ""
    return ", ".join(listed[:_NAMES]) + more


def _number(value: Any) -> float | None:
    """Return a fact as a number, None where it cannot be drawn."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    return float(value) if real and math.isfinite(value) else None
