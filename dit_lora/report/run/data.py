"""Lists a run's training data from its folder: samples, buckets, rejected samples, and the findings of an audit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dit_lora.report.audit.page import Buckets, bucket_rows
from dit_lora.report.run.files import RunFiles
from dit_lora.report.run.history import mapping
from dit_lora.report.run.recipe_diff import in_words

ROWS = 200
"""Rows of one table that are shown."""


@dataclass(frozen=True)
class Data:
    """`counts` are names and numbers; `rejected` samples and why."""

    counts: Sequence[tuple[str, str]]
    buckets: Buckets | None
    rejected: Sequence[tuple[str, str]]
    rejected_count: int
    codes: Sequence[tuple[str, str]]
    """The audit's codes, each with the number of samples."""
    notes: Sequence[str]


def run_data(run: RunFiles) -> Data | None:
    """Read it from facts.json, data.json and audit.json; None where none of them is there."""
    if not run.data and not run.audit and not run.facts:
        return None
    totals, rejected = mapping(run.audit.get("totals")), mapping(run.data.get("rejected"))
    counts = [
        (name.replace("_", " "), _in_words(value))
        for name, value in list(mapping(run.facts.get("data")).items())[:ROWS]
    ]
    if not counts:
        counts = [("samples", _count(run.data.get("samples")))]
    counts += [(f"Audit: {name}", _count(totals.get(name))) for name in ("ok", "warn", "reject")]
    notes = run.audit.get("notes")
    notes = notes[:ROWS] if isinstance(notes, list) else []
    rejected_count = run.data.get("rejected_count")
    return Data(
        counts=[(name, count) for name, count in counts if count],
        buckets=_buckets(run.data.get("buckets")) or _buckets(run.audit.get("buckets")),
        rejected=[(name, in_words(why)) for name, why in list(rejected.items())[:ROWS]],
        rejected_count=rejected_count if isinstance(rejected_count, int) else len(rejected),
        codes=[(code, _count(n)) for code, n in list(mapping(totals.get("codes")).items())[:ROWS]],
        notes=[in_words(note) for note in notes],
    )


def _in_words(value: Any) -> str:
    """Return a fact of facts.json in words, a spread as a range."""
    if isinstance(value, dict) and value.keys() >= {"least", "median", "most"}:
        return f"{value['least']} to {value['most']}, median {value['median']}"
    return in_words(value) or "none"


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


def _buckets(report: Any) -> Buckets | None:
    """Return a bucket report in words, None where it is none: the file may be of another version."""
    if not isinstance(report, Mapping):
        return None
    try:
        return bucket_rows(report)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
