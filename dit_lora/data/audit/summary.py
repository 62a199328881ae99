"""Summary of an audit: one verdict per sample, totals, a JSON file and a list of what to fix."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dit_lora.data.audit.finding import VERDICTS, AuditedSample, Finding
from dit_lora.files import write_atomically

_COLUMNS = ("verdict", "file", "reason", "what to do")
# Control characters and those that change the writing direction: a terminal that shows the list would obey them.
_CONTROL_CHARS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def merge_audits(
    samples: Iterable[AuditedSample],
    *parts: Mapping[str, Sequence[Finding]],
    facts: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[AuditedSample]:
    """Merge the data audit of `samples` with further audits, `parts`: one entry per sample, in the order of `samples`.

    An entry has the measurements and findings of all audits, the worst findings first; equal findings are kept once. A
    sample that only `parts` has is added at the end.
    """
    merged: dict[str, AuditedSample] = {}
    for sample in samples:
        earlier = merged.get(sample.file, AuditedSample(sample.file))
        merged[sample.file] = AuditedSample(
            sample.file,
            (*earlier.findings, *sample.findings),
            {**earlier.facts, **sample.facts},
            sample.thumbnail if earlier.thumbnail is None else earlier.thumbnail,
            earlier.references or sample.references,
            earlier.mask or sample.mask,
        )
    for part in parts:
        for file, new in part.items():
            sample = merged.get(file, AuditedSample(file))
            merged[file] = replace(sample, findings=(*sample.findings, *new))
    for file in merged.keys() & facts.keys():
        merged[file] = replace(merged[file], facts={**merged[file].facts, **facts[file]})
    result = []
    for sample in merged.values():
        # The sort is stable: findings of the same verdict keep their order.
        findings = sorted(dict.fromkeys(sample.findings), key=lambda finding: -VERDICTS.index(finding.verdict))
        result.append(replace(sample, findings=tuple(findings)))
    return result


def compute_totals(samples: Sequence[AuditedSample]) -> dict[str, Any]:
    """Numbers of samples in an audit: in all, by severity, and by code of finding with the most frequent first."""
    verdicts = Counter(sample.verdict for sample in samples)
    # A set per sample: a code that occurs twice in one sample counts once.
    codes = Counter(code for sample in samples for code in {f.code for f in sample.findings})
    sorted_codes = sorted(codes.items(), key=lambda item: (-item[1], item[0]))
    by_verdict: dict[str, int] = {verdict: verdicts[verdict] for verdict in VERDICTS}
    return {"samples": len(samples), **by_verdict, "codes": dict(sorted_codes)}


def build_audit_json(
    audited_samples: Sequence[AuditedSample],
    *,
    notes: Sequence[str] = (),
    buckets: Mapping[str, Any] | None = None,
    encoded: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Convert a whole audit to plain values: `samples`, `totals`, and `notes`, `buckets`, `encoded` if not empty.

    A number that is not finite becomes null, and a value of another type, such as a path, becomes text.
    """
    samples = [
        {
            "file": sample.file,
            "verdict": sample.verdict,
            "reasons": sample.reasons,
            "verdicts": [finding.verdict for finding in sample.findings],
            "codes": list(dict.fromkeys(finding.code for finding in sample.findings)),
            "facts": sample.facts,
        }
        for sample in audited_samples
    ]
    optional = {"notes": list(notes), "buckets": buckets, "encoded": encoded}
    filled = {name: value for name, value in optional.items() if value}
    return _to_strict_json({"samples": samples, "totals": compute_totals(audited_samples), **filled})


def write_json(path: Path, audit: Mapping[str, Any]) -> None:
    """Write an audit's JSON, from `build_audit_json`, atomically, with one sample per line."""
    # One line per sample keeps the file readable and easy to compare with a line-based diff.
    samples = ",\n".join(json.dumps(sample, allow_nan=False) for sample in audit["samples"])
    texts = {name: json.dumps(value, allow_nan=False) for name, value in audit.items() if name != "samples"}
    other_parts = "".join(f',\n"{name}": {text}' for name, text in texts.items())
    write_atomically(path, f'{{"samples": [\n{samples}\n]{other_parts}}}\n')


def write_fix_list(path: Path, samples: Sequence[AuditedSample]) -> None:
    """Write one line per sample that is not ok, rejects first: verdict, file, reason, what to do.

    Columns are separated by tabs; a tab, a line end or a backslash in a column is escaped with a backslash.
    """
    lines = [_COLUMNS]
    for verdict in ("reject", "warn"):
        for sample in samples:
            if sample.verdict == verdict:
                remedies = dict.fromkeys(finding.remedy for finding in sample.findings if finding.remedy)
                lines.append((verdict, sample.file, "; ".join(sample.reasons), "; ".join(remedies)))
    write_atomically(path, "".join("\t".join(map(_escape_cell, line)) + "\n" for line in lines))


def _escape_cell(text: str) -> str:
    text = text.replace("\\", "\\\\")
    return _CONTROL_CHARS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _to_strict_json(value: Any) -> Any:
    """Convert a value to one that strict JSON can hold; a number that is not finite becomes None."""
    if value is None or isinstance(value, bool | int | str):
        return value
    # NumPy integers are not instances of int, and json cannot write them.
    if isinstance(value, Integral):
        return int(value)
    # This includes Fraction, as which PyAV gives rates.
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _to_strict_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_strict_json(inner) for inner in value]
    return str(value)
