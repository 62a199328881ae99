"""Findings about a sample's references and mask, each on its own and compared with the sample."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dit_lora.data.audit.finding import Finding, JudgedSample
from dit_lora.data.audit.judge import (
    MOST_ENLARGED,
    Requirements,
    judge,
    placed_in,
    shown_size,
)
from dit_lora.data.audit.outline import ALIKE, UNLIKE, likeness, looks_copied
from dit_lora.data.audit.probe import ProbedFile
from dit_lora.data.buckets.buckets import Dropped
from dit_lora.data.media.media import Media
from dit_lora.data.media.references import wrong_mask
from dit_lora.data.sources.clips import Clip, LossMask

# Minimum area relative to the sample, a quarter of the side: references for upscaling have 1/4 of the pixels or 1/16.
_SMALL = 1 / 16
# Findings that are dropped for references, since a drawing of few lines is a valid one, and rejections that become
# warnings, since training accepts an empty reference.
_NOT_OF_REFERENCES = ("near_constant", "low_range")
_ONLY_WARNED = ("black", "constant")
# Share of similar pairs from which on a dissimilar pair is suspicious, and below which the set is not one of edits.
_MOST_ALIKE, _FEW_ALIKE = 0.75, 0.25

_NEARLY_EQUAL = 0.98

Probes = Mapping[Media | LossMask, ProbedFile]


def judge_beside(
    clip: Clip, probes: Probes, hashed: Mapping[Media | LossMask, str], wanted: Requirements | None
) -> Iterator[Finding]:
    """Yield findings about a sample's references and its mask; `hashed` has the digests of all readable files."""
    target = probes[clip.media]
    for number, reference in enumerate(clip.references, start=1):
        reference_name = _which(number, len(clip.references))
        probed_reference = probes[reference]
        yield from _judge_reference(reference, probed_reference, reference_name)
        if not (_has_pictures(target) and _has_pictures(probed_reference)):
            continue
        yield from _sizes(target.facts, probed_reference.facts, wanted, reference_name)
        # Equal bytes are certain; a copy in another format needs the thumbnails.
        if hashed[clip.media] == hashed[reference] or _is_copy(target, probed_reference):
            message = (
                f"{reference_name} is the same picture: from it the model learns to change nothing"
            )
            yield _warn("reference_same", message, "remove it, unless it is meant")
    if clip.mask is not None:
        yield from _judge_mask(clip.mask, probes[clip.mask], target)


def facts_beside(clip: Clip, probes: Probes) -> dict[str, Any]:
    """Likeness of the sample to each reference, and the learned share of its mask; {} without references and mask."""
    facts: dict[str, Any] = {}
    outlines = probes[clip.media].facts.get("outlines")
    if clip.references:
        outlines_by_reference = [
            probes[reference].facts.get("outlines") for reference in clip.references
        ]
        values = [
            likeness(outlines, reference_outlines) if outlines and reference_outlines else None
            for reference_outlines in outlines_by_reference
        ]
        facts["likeness"] = [None if value is None else round(value, 3) for value in values]
    if clip.mask is not None:
        facts["learned"] = probes[clip.mask].facts.get("learned")
    return facts


def unlike_references(judged: Sequence[JudgedSample]) -> dict[str, list[Finding]]:
    """Findings, by file, about references that differ completely from their samples although most others do not.

    Nothing is reported for sets that place a subject in other scenes, where few pairs are similar in place.
    """
    findings: dict[str, list[Finding]] = {}
    count = _most_references(judged)
    for number, by_file in _likenesses(judged).items():
        # In a set of subjects placed in other scenes, a dissimilar pair is normal.
        if _share_alike(by_file) < _MOST_ALIKE:
            continue
        for file, value in by_file.items():
            if value < UNLIKE:
                message = (
                    f"{_which(number, count)} has nothing in common with it (likeness {value:.2f}), "
                    "as most others have"
                )
                remedy = "look whether it belongs to another sample"
                findings.setdefault(file, []).append(_warn("reference_unlike", message, remedy))
    return findings


def pair_notes(judged: Sequence[JudgedSample]) -> list[str]:
    """Notes about all references together, and about all masks together."""
    notes = []
    for number, by_file in _likenesses(judged).items():
        # Unlike references may be intended, so this is a note on the whole set and not a finding per sample.
        if _share_alike(by_file) < _FEW_ALIKE:
            num_similar = sum(value >= ALIKE for value in by_file.values())
            reference_name = _which(number, _most_references(judged))
            notes.append(
                f"In {num_similar:,} of {len(by_file):,} pairs, a sample looks like {reference_name} in place, "
                "as an edited picture does. "
                "Where a subject is put into another scene, few do; else look whether the pairs are the right ones."
            )
    paired = [sample for sample in judged if sample.facts.get("likeness") is not None]
    if paired and len(paired) < len(judged):
        notes.append(f"{len(judged) - len(paired):,} of {len(judged):,} samples have no reference.")
    masks = [
        sample.facts["learned"] for sample in judged if sample.facts.get("learned") is not None
    ]
    # 1 means that a mask is white everywhere.
    if masks and min(masks) == 1:
        notes.append(
            f"The masks of all {len(masks):,} samples that have one are white: nothing is masked."
        )
    return notes


def _most_references(judged: Sequence[JudgedSample]) -> int:
    """Largest number of references of any sample."""
    return max((len(sample.facts.get("likeness") or ()) for sample in judged), default=0)


def _likenesses(judged: Sequence[JudgedSample]) -> dict[int, dict[str, float]]:
    """Known likenesses by the reference's number (from 1) and the sample's file."""
    by_number: dict[int, dict[str, float]] = {}
    for sample in judged:
        for number, value in enumerate(sample.facts.get("likeness") or (), start=1):
            if value is not None:
                by_number.setdefault(number, {})[sample.file] = value
    return by_number


def _share_alike(found: Mapping[str, float]) -> float:
    return sum(value >= ALIKE for value in found.values()) / len(found)


def _which(number: int, of: int) -> str:
    return "its reference" if of == 1 else f"its reference {number}"


def _is_copy(own: ProbedFile, other: ProbedFile) -> bool:
    """Whether two files certainly hold the same pictures."""
    if own.thumbnail is None or other.thumbnail is None:
        return False
    value = likeness(own.facts["outlines"], other.facts["outlines"])
    # The outlines rule out most pairs, so that few thumbnails need to be decoded.
    is_near = value is None or value >= _NEARLY_EQUAL
    return is_near and looks_copied(own.thumbnail, other.thumbnail)


def _judge_reference(reference: Media, probed: ProbedFile, which: str) -> Iterator[Finding]:
    """Yield the findings that a reference has on its own."""
    for finding in judge(reference, probed, None):
        if finding.code in _NOT_OF_REFERENCES:
            continue
        # The missing file is the reference and not the sample, so it gets a code of its own.
        code = "reference_missing" if finding.code == "missing" else finding.code
        message = f"{which} {reference.name}: {finding.words}"
        verdict = "warn" if code in _ONLY_WARNED else finding.verdict
        yield Finding(code, message, verdict, finding.remedy)


def _sizes(
    own: Mapping[str, Any], other: Mapping[str, Any], wanted: Requirements | None, which: str
) -> Iterator[Finding]:
    """Yield findings about a reference that is much smaller than the sample, or enlarged when encoded."""
    (height, width), (full_height, full_width) = shown_size(other), shown_size(own)
    size = f"{which} has {width:g} x {height:g} pixels"
    if height * width < _SMALL * full_height * full_width:
        message = f"{size}, and the sample {full_width:g} x {full_height:g}"
        yield _warn("reference_small", message, "find it in its full size")
    if wanted is None or wanted.reference_shape is None:
        return
    # The size in which a reference is encoded may depend on the shape of the sample.
    placement = placed_in(own, wanted)
    if isinstance(placement, Dropped):
        return
    shape = wanted.reference_shape(round(height), round(width), placement.shape)
    # Only a reference that is enlarged on both sides is reported, so take the smaller factor.
    factor = min(shape.height / height, shape.width / width)
    if factor > MOST_ENLARGED:
        message = f"{size}, and is encoded in {shape.width} x {shape.height}: it is enlarged {factor:.2f} times"
        remedy = "find it in its full size, or lower the size of the samples"
        yield _warn("reference_upscaled", message, remedy)


def _judge_mask(mask: LossMask, probed: ProbedFile, own: ProbedFile) -> Iterator[Finding]:
    """Yield findings about a mask: unreadable, black, or of another shape than the picture."""
    for finding in probed.faults:
        code = "mask_missing" if finding.code == "missing" else finding.code
        yield replace(finding, code=code, words=f"its mask {mask.media.name}: {finding.words}")
    if not _has_pictures(probed):
        return
    facts = probed.facts
    # A black mask would give a loss of 0 for the sample.
    if facts["most"] == 0:
        problem = "it is wholly transparent" if mask.alpha else "its mask is black"
        message = f"{problem}: nothing of it is learned"
        yield Finding("mask_black", message, "reject", "paint white what is learned, or remove it")
    # An alpha mask is part of its picture, so it always has the same shape.
    if _has_pictures(own) and not mask.alpha:
        height, width = shown_size(own.facts)
        mismatch = wrong_mask((facts["height"], facts["width"]), (round(height), round(width)))
        if mismatch:
            remedy = "save it in the shape of its picture"
            yield Finding("mask_shape", mismatch, "reject", remedy)


def _has_pictures(probed: ProbedFile) -> bool:
    return not probed.faults and "frames" in probed.facts


def _warn(code: str, message: str, remedy: str) -> Finding:
    return Finding(code, message, "warn", remedy)
