"""Checks of class labels: those that the class table lacks, and how evenly the classes are filled."""

import statistics
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from dit_lora.data.audit.finding import Finding
from dit_lora.data.sources.clips import Clip

IMBALANCE = 10
"""Factor to the median class within which a class may have more or fewer samples.

Long-tailed sets are trained on with less care up to about here; beyond it a class is mostly forgotten or
drowns the others.
"""
_LISTED = 20
# Labels whose nearest name is looked for: each takes milliseconds.
_NEAREST = 200


def check_labels(
    clips: Sequence[Clip], table: Sequence[str] | None
) -> tuple[dict[str, list[Finding]], list[str]]:
    """Return findings by sample id, and notes on the whole set; a clip's caption is its class.

    `table` has the names that the model knows, synonyms of one separated by commas as ImageNet's are, or is
    None where the data makes the table. A class out of balance is one finding, on its first sample, and a
    note; a sample counts as often as it comes in an epoch.
    """
    labels = dict.fromkeys(clip.caption for clip in clips)
    # Without a table, the labels of the data make it.
    names = {label: label for label in labels} if table is None else _names(table)
    unknown = [label for label in labels if label not in names or not label.strip()]
    outside = {
        label: _unknown(label, names, len(table or ()), near=rank < _NEAREST)
        for rank, label in enumerate(unknown)
    }
    findings = {clip.id: [outside[clip.caption]] for clip in clips if clip.caption in outside}
    counts: dict[str, float] = {}
    first: dict[str, str] = {}
    for clip in clips:
        if clip.caption not in outside:
            name = names[clip.caption]
            counts[name] = counts.get(name, 0) + clip.times
            first.setdefault(name, clip.id)
    odd = _out_of_balance(counts)
    for label, message in odd.items():
        remedy = "add samples to the small classes, or thin out or weigh down the large ones"
        finding = Finding("label_imbalance", message, "warn", remedy)
        findings.setdefault(first[label], []).append(finding)
    notes = []
    if odd:
        shown = [f"{label!r} ({counts[label]:,.5g})" for label in odd]
        notes.append(
            f"{len(odd):,} of {len(counts):,} classes have less than a tenth or more than ten times the "
            f"median class's {_median(counts):,.5g} samples: {_some(shown)}."
        )
    unused = [label for label in dict.fromkeys(table or ()) if label not in counts]
    if unused:
        notes.append(
            f"{len(unused):,} of {len(set(table or ())):,} classes of the table have no sample: "
            f"{_some(unused)}."
        )
    return findings, notes


def _names(table: Sequence[str]) -> dict[str, str]:
    """Return each name and synonym with the entry that it stands for; whole entries go before synonyms."""
    parts = {part.strip(): entry for entry in table for part in entry.split(",")}
    return parts | {entry: entry for entry in table}


def _unknown(label: str, names: Mapping[str, str], count: int, *, near: bool) -> Finding:
    if not label.strip():
        return Finding("label_unknown", "it has no class", "reject", "give it one, or remove it")
    # Labels differ most often in case and separators.
    plain = {_plain(name): name for name in reversed(list(names))} if near else {}
    close = get_close_matches(_plain(label), plain, n=1, cutoff=0.6)
    nearest = f"; the nearest is {plain[close[0]]!r}" if close else ""
    message = f"class {label!r} is not among the {count:,} of the table{nearest}"
    remedy = "rename the class, remove the sample, or add the class to data.classes"
    return Finding("label_unknown", message, "reject", remedy)


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").replace("-", " ").lower().split())


def _out_of_balance(counts: Mapping[str, float]) -> dict[str, str]:
    """Return the labels with far fewer or more samples than the median class, smallest first, each with a message."""
    median, messages = _median(counts), {}
    for label, count in sorted(counts.items(), key=lambda item: item[1]):
        if IMBALANCE * count < median or count > IMBALANCE * median:
            side = "less than a tenth" if count < median else "more than ten times"
            samples = f"{count:,.5g} sample{'' if count == 1 else 's'}"
            messages[label] = (
                f"class {label!r} has {samples}, {side} of the median class's {median:,.5g}"
            )
    return messages


def _median(counts: Mapping[str, float]) -> float:
    return statistics.median(counts.values()) if counts else 0.0


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
