"""Judgement of what a sample has beside its own media: references, alone and against the sample, and its mask."""

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

# A quarter of the side: references for enlarging have a quarter of the pixels, at times a sixteenth.
_SMALL = 1 / 16
# A drawing of few lines is a sound reference, and training takes one of nothing.
_NOT_OF_REFERENCES = ("near_constant", "low_range")
_ONLY_WARNED = ("black", "constant")
# Share of the pairs that have to be alike before the others stand out, and below which the set is of another kind.
_MOST_ALIKE, _FEW_ALIKE = 0.75, 0.25

_NEARLY_EQUAL = 0.98

Probes = Mapping[Media | LossMask, ProbedFile]


def judge_beside(
    clip: Clip, probes: Probes, hashed: Mapping[Media | LossMask, str], wanted: Requirements | None
) -> Iterator[Finding]:
    """Yield what is wrong with a sample's references and its mask; `hashed` are digests of files that can be read."""
    own = probes[clip.media]
    for number, reference in enumerate(clip.references, start=1):
        which = _which(number, len(clip.references))
        other = probes[reference]
        yield from _judge_reference(reference, other, which)
        if not (_has_pictures(own) and _has_pictures(other)):
            continue
        yield from _sizes(own.facts, other.facts, wanted, which)
        if hashed[clip.media] == hashed[reference] or _is_copy(own, other):
            message = f"{which} is the same picture: from it the model learns to change nothing"
            yield _warn("reference_same", message, "remove it, unless it is meant")
    if clip.mask is not None:
        yield from _judge_mask(clip.mask, probes[clip.mask], own)


def facts_beside(clip: Clip, probes: Probes) -> dict[str, Any]:
    """Return how alike a sample and each reference are, and how much of it is learned; only of what it has."""
    facts: dict[str, Any] = {}
    own = probes[clip.media].facts.get("outlines")
    if clip.references:
        of_references = [probes[one].facts.get("outlines") for one in clip.references]
        found = [likeness(own, other) if own and other else None for other in of_references]
        facts["likeness"] = [None if one is None else round(one, 3) for one in found]
    if clip.mask is not None:
        facts["learned"] = probes[clip.mask].facts.get("learned")
    return facts


def unlike_references(judged: Sequence[JudgedSample]) -> dict[str, list[Finding]]:
    """Return findings about references that have nothing in common with their samples, where most others have, by file.

    Nothing is said of sets in which a subject is put into other scenes: there, few are alike in place.
    """
    findings: dict[str, list[Finding]] = {}
    most = _most_references(judged)
    for number, found in _likenesses(judged).items():
        if _share_alike(found) < _MOST_ALIKE:
            continue
        for file, value in found.items():
            if value < UNLIKE:
                message = f"{_which(number, most)} has nothing in common with it (likeness {value:.2f}), as most others have"
                remedy = "look whether it belongs to another sample"
                findings.setdefault(file, []).append(_warn("reference_unlike", message, remedy))
    return findings


def pair_notes(judged: Sequence[JudgedSample]) -> list[str]:
    """Return what is to be said of all references, or of all masks, together."""
    notes = []
    for number, found in _likenesses(judged).items():
        if _share_alike(found) < _FEW_ALIKE:
            few = sum(value >= ALIKE for value in found.values())
            which = _which(number, _most_references(judged))
            notes.append(
                f"In {few:,} of {len(found):,} pairs, a sample looks like {which} in place, as an edited picture does. "
                "Where a subject is put into another scene, few do; else look whether the pairs are the right ones."
            )
    given = [one for one in judged if one.facts.get("likeness") is not None]
    if given and len(given) < len(judged):
        notes.append(f"{len(judged) - len(given):,} of {len(judged):,} samples have no reference.")
    masks = [one.facts["learned"] for one in judged if one.facts.get("learned") is not None]
    if masks and min(masks) == 1:
        notes.append(
            f"The masks of all {len(masks):,} samples that have one are white: nothing is masked."
        )
    return notes


def _most_references(judged: Sequence[JudgedSample]) -> int:
    return max((len(one.facts.get("likeness") or ()) for one in judged), default=0)


def _likenesses(judged: Sequence[JudgedSample]) -> dict[int, dict[str, float]]:
    """Return each likeness that is known, by the reference's place and the sample's file."""
    found: dict[int, dict[str, float]] = {}
    for one in judged:
        for number, value in enumerate(one.facts.get("likeness") or (), start=1):
            if value is not None:
                found.setdefault(number, {})[one.file] = value
    return found


def _share_alike(found: Mapping[str, float]) -> float:
    return sum(value >= ALIKE for value in found.values()) / len(found)


def _which(number: int, of: int) -> str:
    return "its reference" if of == 1 else f"its reference {number}"


def _is_copy(own: ProbedFile, other: ProbedFile) -> bool:
    """Return True if two files surely hold the same pictures."""
    if own.thumbnail is None or other.thumbnail is None:
        return False
    alike = likeness(own.facts["outlines"], other.facts["outlines"])
    # Few thumbnails need to be decoded.
    is_near = alike is None or alike >= _NEARLY_EQUAL
    return is_near and looks_copied(own.thumbnail, other.thumbnail)


def _judge_reference(reference: Media, probed: ProbedFile, which: str) -> Iterator[Finding]:
    for finding in judge(reference, probed, None):
        if finding.code in _NOT_OF_REFERENCES:
            continue
        code = "reference_missing" if finding.code == "missing" else finding.code
        words = f"{which} {reference.name}: {finding.words}"
        verdict = "warn" if code in _ONLY_WARNED else finding.verdict
        yield Finding(code, words, verdict, finding.remedy)


def _sizes(
    own: Mapping[str, Any], other: Mapping[str, Any], wanted: Requirements | None, which: str
) -> Iterator[Finding]:
    (height, width), (full_height, full_width) = shown_size(other), shown_size(own)
    size = f"{which} has {width:g} x {height:g} pixels"
    if height * width < _SMALL * full_height * full_width:
        message = f"{size}, and the sample {full_width:g} x {full_height:g}"
        yield _warn("reference_small", message, "find it in its full size")
    if wanted is None or wanted.reference_shape is None:
        return
    placed = placed_in(own, wanted)
    if isinstance(placed, Dropped):
        return
    shape = wanted.reference_shape(round(height), round(width), placed.shape)
    factor = min(shape.height / height, shape.width / width)
    if factor > MOST_ENLARGED:
        message = f"{size}, and is encoded in {shape.width} x {shape.height}: it is enlarged {factor:.2f} times"
        remedy = "find it in its full size, or lower the size of the samples"
        yield _warn("reference_upscaled", message, remedy)


def _judge_mask(mask: LossMask, probed: ProbedFile, own: ProbedFile) -> Iterator[Finding]:
    for finding in probed.faults:
        code = "mask_missing" if finding.code == "missing" else finding.code
        yield replace(finding, code=code, words=f"its mask {mask.media.name}: {finding.words}")
    if not _has_pictures(probed):
        return
    facts = probed.facts
    if facts["most"] == 0:
        what = "it is wholly transparent" if mask.alpha else "its mask is black"
        message = f"{what}: nothing of it is learned"
        yield Finding("mask_black", message, "reject", "paint white what is learned, or remove it")
    if _has_pictures(own) and not mask.alpha:
        height, width = shown_size(own.facts)
        wrong = wrong_mask((facts["height"], facts["width"]), (round(height), round(width)))
        if wrong:
            remedy = "save it in the shape of its picture"
            yield Finding("mask_shape", wrong, "reject", remedy)


def _has_pictures(probed: ProbedFile) -> bool:
    return not probed.faults and "frames" in probed.facts


def _warn(code: str, message: str, remedy: str) -> Finding:
    return Finding(code, message, "warn", remedy)
