"""Write a data set audit as a self-contained page: rejected samples, warnings, and statistics of the data."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from dit_lora.data.audit.finding import VERDICTS, AuditedSample, Verdict
from dit_lora.errors import join_first_items
from dit_lora.report.audit.charts import (
    ChannelChart,
    Histogram,
    make_aspect_ratio_chart,
    make_count_chart,
    make_histogram,
)
from dit_lora.report.audit.pairs import choose_edit_samples, make_sample_card
from dit_lora.report.charts.bars import BarChart, format_number
from dit_lora.report.pages import PagePictures, choose_evenly, render_page, truncate_text, write_page

MAX_CARDS = 200
"""Maximum number of samples shown; the JSON file lists all of them."""
_MAX_REJECT_CARDS = 140  # the other cards are reserved for warnings, however many rejects there are
_MAX_NAMES = 24  # file names in one line
_MAX_LINES = 50  # lines of one list
_MAX_FINDINGS = 6  # findings on one card
_MAX_CHANNELS = 128


@dataclass(frozen=True)
class BucketTable:
    """A bucket report as rows of text for the audit page."""

    advice: Sequence[str]
    rows: Sequence[tuple[Sequence[str], bool]]
    """For each bucket its cells, and whether it is empty."""
    dropped: Sequence[tuple[str, str, str]]


def write_audit_page(
    path: Path,
    samples: Sequence[AuditedSample],
    *,
    title: str,
    totals: Mapping[str, Any],
    buckets: Mapping[str, Any] | None = None,
    encoded: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write the audit page atomically. It loads no external content, and all text from the data is escaped.

    At most `MAX_CARDS` samples are shown.

    Args:
        path: The HTML file.
        samples: All audited samples.
        title: The page's title.
        totals: The result of `audit.summary.totals`.
        buckets: A `BucketReport.as_dict()`, or None.
        encoded: The statistics of `audit.encoded.check_encoded`, or None.
        notes: Lines of text shown on the page.

    Raises:
        DitLoraError: If the file cannot be written.
    """
    pictures = PagePictures()
    shown_samples = _choose_samples(samples)
    hidden = Counter(sample.verdict for sample in samples) - Counter(sample.verdict for sample in shown_samples)
    # Findings about latents or embeddings.
    outliers = [
        (finding.verdict, sample.file, finding.message)
        for sample in samples
        for finding in sample.findings
        if finding.code.startswith(("latent_", "embedding_"))
    ]
    page = render_page(
        "audit_page.html",
        scripts=("viewer.js", "audit_page.js"),
        title=title,
        totals=totals,
        notes=notes,
        cards=[make_sample_card(sample, pictures) for sample in shown_samples],
        hidden=hidden,
        findings_of_a_card=_MAX_FINDINGS,
        # VERDICTS are in order of severity.
        worst_first=partial(sorted, key=lambda finding: -VERDICTS.index(finding.verdict)),
        facts=_format_facts,
        codes=_list_codes(samples),
        charts=_build_charts(samples),
        buckets=build_bucket_rows(buckets) if buckets else None,
        encoded=encoded or {},
        drawn_channels=_MAX_CHANNELS,
        channel_chart=ChannelChart,
        number=format_number,
        outliers=sorted(outliers) if encoded else [],
        duplicates=_list_duplicates(samples),
        lines=_MAX_LINES,
    )
    return write_page(path, page)


def _choose_samples(samples: Sequence[AuditedSample]) -> list[AuditedSample]:
    """Choose the samples that the page shows, the worst first, up to its limit and with some of every code."""
    rejected, warned = _group_by_first_code(samples, "reject"), _group_by_first_code(samples, "warn")
    # Rejected samples may use the cards that warnings leave free.
    num_reject_cards = max(_MAX_REJECT_CARDS, MAX_CARDS - sum(map(len, warned.values())))
    max_cards = _divide_cards(rejected, num_reject_cards)
    chosen = [sample for code, group in rejected.items() for sample in group[: max_cards[code]]]
    # Warnings share what is left, and samples without findings what is left after them.
    max_cards = _divide_cards(warned, MAX_CARDS - len(chosen))
    chosen += [sample for code, group in warned.items() for sample in group[: max_cards[code]]]
    chosen += choose_edit_samples(samples, MAX_CARDS - len(chosen))
    files = {sample.file for sample in chosen}
    good_samples = [sample for sample in samples if sample.verdict == "ok" and sample.file not in files]
    return chosen + choose_evenly(good_samples, MAX_CARDS - len(chosen))


def _group_by_first_code(samples: Sequence[AuditedSample], verdict: Verdict) -> dict[str, list[AuditedSample]]:
    """Group the samples that have this verdict (reject or warning) by the code of their first finding with it."""
    groups: dict[str, list[AuditedSample]] = {}
    for sample in samples:
        if sample.verdict == verdict:
            code = next(finding.code for finding in sample.findings if finding.verdict == verdict)
            groups.setdefault(code, []).append(sample)
    return groups


def _divide_cards(groups: Mapping[str, Sequence[AuditedSample]], num_cards: int) -> dict[str, int]:
    """Divide `num_cards` sample cards evenly between the groups.

    Cards that a small group does not need go to the others.
    """
    shares: dict[str, int] = {}
    # Smallest groups first: the cards that they leave unused are divided among the larger ones.
    ordered = sorted(groups.items(), key=lambda item: len(item[1]))
    for index, (code, group) in enumerate(ordered):
        shares[code] = min(len(group), num_cards // (len(ordered) - index))
        num_cards -= shares[code]
    return shares


def _list_codes(samples: Sequence[AuditedSample]) -> list[tuple[Verdict, str, int, str]]:
    """Rows of the findings table: verdict, code, number of samples and remedy, the worst and most frequent first."""
    remedies: dict[str, str] = {}
    counts: Counter[tuple[Verdict, str]] = Counter()
    for sample in samples:
        # A code counts once per sample, however many findings have it.
        counts.update({(finding.verdict, finding.code): 1 for finding in sample.findings})
        for finding in sample.findings:
            remedies[finding.code] = remedies.get(finding.code) or finding.remedy
    verdicts: tuple[Verdict, ...] = ("reject", "warn")
    return [
        (verdict, code, count, remedies[code])
        for verdict in verdicts
        for (counted_verdict, code), count in counts.most_common()
        if counted_verdict == verdict
    ]


def _format_facts(facts: Mapping[str, Any]) -> str:
    """Media properties of a clip as text, such as `1280 x 720, 25 fps, 4 s, h264`."""
    height, width = _to_number(facts.get("height")), _to_number(facts.get("width"))
    fps, seconds = _to_number(facts.get("fps")), _to_number(facts.get("seconds"))
    parts = [
        f"{width:g} x {height:g}" if height and width else "",
        f"{fps:.4g} fps" if fps else "",
        f"{seconds:.3g} s" if seconds else "",
        truncate_text(str(facts.get("codec") or "")),
    ]
    return ", ".join(part for part in parts if part)


def _build_charts(samples: Sequence[AuditedSample]) -> list[BarChart | Histogram]:
    """Charts of the data set's properties; unmeasured properties are left out."""

    def read_column(key: str) -> list[float]:
        numbers = (_to_number(sample.facts.get(key)) for sample in samples)
        return [value for value in numbers if value is not None]

    sizes = [
        (width, height)
        for sample in samples
        if (width := _to_number(sample.facts.get("width"))) and (height := _to_number(sample.facts.get("height")))
    ]
    charts = [
        make_histogram("Duration", read_column("seconds"), "seconds"),
        make_histogram("Frame rate", read_column("fps"), "frames per second"),
        make_count_chart("Resolution", (f"{width:g}x{height:g}" for width, height in sizes)),
        make_aspect_ratio_chart(sizes),
        make_histogram("Caption length", read_column("caption_tokens"), "tokens"),
    ]
    return [chart for chart in charts if chart is not None]


def _list_duplicates(samples: Sequence[AuditedSample]) -> list[str]:
    """File names of each group of duplicate clips, as one line per group, the largest first."""
    files = {sample.file for sample in samples}
    # The finding's text ends with the name of the file that this one duplicates.
    parents = {
        sample.file: original
        for sample in samples
        for finding in sample.findings
        if finding.code in ("duplicate_clip", "near_duplicate_clip")
        and (original := _find_trailing_name(finding.message, files))
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
    return [join_first_items(dict.fromkeys(members), _MAX_NAMES) for members in ordered]


def _find_trailing_name(text: str, files: Collection[str]) -> str | None:
    """The file name at the end of this text, or None if there is none. A name may contain spaces."""
    parts = text.split(" ")
    # Longest first, so that a name with spaces wins over its last word.
    tails = (" ".join(parts[start:]) for start in range(len(parts)))
    return next((tail for tail in tails if tail in files), None)


def build_bucket_rows(report: Mapping[str, Any]) -> BucketTable:
    """Rows of a bucket report for the template buckets.html, from `BucketReport.as_dict()`."""
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
    dropped = [(sample["id"], sample["code"], truncate_text(sample["words"])) for sample in report["dropped"]]
    return BucketTable(report["advice"], rows, dropped)


def _to_number(value: Any) -> float | None:
    """A media property of a sample as a finite float, else None."""
    # bool is a subclass of int, but not a measurement.
    real = isinstance(value, Real) and not isinstance(value, bool)
    return float(value) if real and math.isfinite(value) else None
