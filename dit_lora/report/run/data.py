"""Describe a run's training data from its folder: samples, buckets, rejected samples and audit findings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dit_lora.report.audit.page import BucketTable, build_bucket_rows
from dit_lora.report.run.files import RunFiles
from dit_lora.report.run.history import ensure_dict
from dit_lora.report.run.recipe_diff import format_value

MAX_ROWS = 200
"""Maximum number of rows of one table."""


@dataclass(frozen=True)
class DataDescription:
    """Description of a run's training data as text: `counts` by name, and `rejected` samples with their reasons."""

    counts: Sequence[tuple[str, str]]
    buckets: BucketTable | None
    rejected: Sequence[tuple[str, str]]
    rejected_count: int
    codes: Sequence[tuple[str, str]]
    """The audit's codes, each with the number of samples."""
    notes: Sequence[str]


def describe_data(run: RunFiles) -> DataDescription | None:
    """Read the data description from facts.json, data.json and audit.json; None if there is none of them."""
    if not run.data and not run.audit and not run.facts:
        return None
    # The files may be damaged or of another version, so every value is checked for its type.
    totals, rejected = ensure_dict(run.audit.get("totals")), ensure_dict(run.data.get("rejected"))
    counts = []
    for name, value in list(ensure_dict(run.facts.get("data")).items())[:MAX_ROWS]:
        text = format_value(value) or "none"
        # facts.json describes distributions by these three values and a sum.
        if isinstance(value, dict) and value.keys() >= {"least", "median", "most"}:
            text = f"{value['least']} to {value['most']}, median {value['median']}"
            if value["least"] == value["most"]:
                text = format_value(value["least"])
        counts.append((name.replace("_", " "), text))
    # Without facts.json, use the sample count of data.json.
    if not counts:
        counts = [("samples", _format_count(run.data.get("samples")))]
    counts += [(f"Audit: {name}", _format_count(totals.get(name))) for name in ("ok", "warn", "reject")]
    notes = run.audit.get("notes")
    notes = notes[:MAX_ROWS] if isinstance(notes, list) else []
    # data.json may list fewer samples than were rejected.
    rejected_count = run.data.get("rejected_count")
    return DataDescription(
        counts=[(name, count) for name, count in counts if count],
        buckets=_read_buckets(run.data.get("buckets")) or _read_buckets(run.audit.get("buckets")),
        rejected=[(name, format_value(reason)) for name, reason in list(rejected.items())[:MAX_ROWS]],
        rejected_count=rejected_count if isinstance(rejected_count, int) else len(rejected),
        codes=[(code, _format_count(n)) for code, n in list(ensure_dict(totals.get("codes")).items())[:MAX_ROWS]],
        notes=[format_value(note) for note in notes],
    )


def _format_count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _read_buckets(report: Any) -> BucketTable | None:
    """A bucket report as rows of text; None if it is missing or of another version."""
    if not isinstance(report, Mapping):
        return None
    try:
        return build_bucket_rows(report)
    # A report of another version may lack keys or have other types.
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
