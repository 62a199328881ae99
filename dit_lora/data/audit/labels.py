"""Checks of class labels: labels missing from the class table, and classes of very different sizes."""

import statistics
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from dit_lora.data.audit.finding import Finding
from dit_lora.data.sources.clips import Clip
from dit_lora.errors import join_first_items

MAX_IMBALANCE = 10
"""Maximum ratio of a class's size to the median class, in either direction.

Beyond about this ratio, training needs special care: a small class is mostly forgotten, and a large one dominates.
"""
_MAX_LISTED = 20
# Number of unknown labels for which the nearest name is searched: each search takes milliseconds.
_MAX_NEAREST_SEARCHES = 200


def check_labels(
    clips: Sequence[Clip], class_table: Sequence[str] | None
) -> tuple[dict[str, list[Finding]], list[str]]:
    """Check class labels against the class table and for balance. A clip's caption is its class.

    Args:
        clips: The samples. Each counts as often as it comes in an epoch.
        class_table: Class names that the model knows, with synonyms separated by commas as in ImageNet's table. None
            if the data defines the classes.

    Returns:
        Findings by sample id, and notes on the whole set. A class out of balance is one finding, on its first
        sample, and part of a note.
    """
    labels = dict.fromkeys(clip.caption for clip in clips)
    if class_table is None:
        # Without a table, the labels of the data make it.
        names = {label: label for label in labels}
    else:
        # ImageNet's entries list synonyms, such as `tench, Tinca tinca`. A whole entry takes precedence over these.
        names = {part.strip(): entry for entry in class_table for part in entry.split(",")}
        names |= {entry: entry for entry in class_table}
    unknown = [label for label in labels if label not in names or not label.strip()]
    outside = {
        label: _reject_unknown_label(label, names, len(class_table or ()), should_suggest=rank < _MAX_NEAREST_SEARCHES)
        for rank, label in enumerate(unknown)
    }
    findings = {clip.id: [outside[clip.caption]] for clip in clips if clip.caption in outside}
    counts: dict[str, float] = {}
    first_ids: dict[str, str] = {}
    for clip in clips:
        if clip.caption not in outside:
            name = names[clip.caption]
            counts[name] = counts.get(name, 0) + clip.times_per_epoch
            first_ids.setdefault(name, clip.id)
    # The median is robust: one huge class does not make all others look small.
    median = statistics.median(counts.values()) if counts else 0.0
    imbalanced = []
    for label, count in sorted(counts.items(), key=lambda item: item[1]):
        if MAX_IMBALANCE * count < median or count > MAX_IMBALANCE * median:
            imbalanced.append(label)
            side = "less than a tenth" if count < median else "more than ten times"
            samples = f"{count:,.5g} sample{'' if count == 1 else 's'}"
            message = f"class {label!r} has {samples}, {side} of the median class's {median:,.5g}"
            remedy = "add samples to small classes, or lower the number or weight of large ones"
            findings.setdefault(first_ids[label], []).append(Finding("label_imbalance", message, "warn", remedy))
    notes = []
    if imbalanced:
        class_counts = [f"{label!r} ({counts[label]:,.5g})" for label in imbalanced]
        notes.append(
            f"{len(imbalanced):,} of {len(counts):,} classes have less than a tenth or more than ten times the "
            f"median class's {median:,.5g} samples: {join_first_items(class_counts, _MAX_LISTED)}."
        )
    # Classes without samples are not an error: the table may belong to a larger set.
    unused = [label for label in dict.fromkeys(class_table or ()) if label not in counts]
    if unused:
        notes.append(
            f"{len(unused):,} of {len(set(class_table or ())):,} classes of the table have no sample: "
            f"{join_first_items(unused, _MAX_LISTED)}."
        )
    return findings, notes


def _reject_unknown_label(label: str, names: Mapping[str, str], num_classes: int, *, should_suggest: bool) -> Finding:
    """Finding that rejects a class label missing from the table.

    With `should_suggest`, it names the most similar class.
    """
    if not label.strip():
        return Finding("label_unknown", "it has no class", "reject", "give it one, or remove it")
    # Labels usually differ from the table only in case and separators.
    by_plain_name = {_normalise_name(name): name for name in reversed(list(names))} if should_suggest else {}
    # Below a similarity of 0.6, a suggestion would be misleading.
    close = get_close_matches(_normalise_name(label), by_plain_name, n=1, cutoff=0.6)
    nearest = f"; the nearest is {by_plain_name[close[0]]!r}" if close else ""
    message = f"class {label!r} is not among the {num_classes:,} of the table{nearest}"
    remedy = "rename the class, remove the sample, or add the class to data.classes"
    return Finding("label_unknown", message, "reject", remedy)


def _normalise_name(name: str) -> str:
    return " ".join(name.replace("_", " ").replace("-", " ").lower().split())
