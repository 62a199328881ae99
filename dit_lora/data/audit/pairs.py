"""Findings about a sample's references and mask, each on its own and compared with the sample."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dit_lora.data.audit.finding import AuditedSample, Finding, make_warning
from dit_lora.data.audit.judge import (
    MAX_UPSCALE,
    SampleRequirements,
    collect_media_findings,
    display_size,
    find_bucket,
)
from dit_lora.data.audit.outline import ALIKE, UNLIKE, compare_outlines, is_same_picture
from dit_lora.data.audit.probe import ProbedFile
from dit_lora.data.buckets.buckets import DroppedClip
from dit_lora.data.media.media import Media
from dit_lora.data.media.pictures import find_mask_mismatch
from dit_lora.data.sources.clips import Clip, LossMask

# Minimum area relative to the sample, a quarter of the side: references for upscaling have 1/4 of the pixels or 1/16.
_MIN_AREA_SHARE = 1 / 16
# Findings that are dropped for references, since a drawing of few lines is a valid one, and rejections that become
# warnings, since training accepts an empty reference.
_IGNORED_CODES = ("near_constant", "low_range")
_WARNING_CODES = ("black", "constant")
# Share of similar pairs from which on a dissimilar pair is suspicious, and below which the set is not one of edits.
_MOST_ALIKE, _FEW_ALIKE = 0.75, 0.25
_MIN_COPY_LIKENESS = 0.98

Probes = Mapping[Media | LossMask, ProbedFile]


def check_references_and_mask(
    clip: Clip, probes: Probes, media_digests: Mapping[Media | LossMask, str], requirements: SampleRequirements | None
) -> Iterator[Finding]:
    """Yield findings about a sample's references and mask; `media_digests` has the digests of all readable files."""
    target = probes[clip.media]
    for number, reference in enumerate(clip.references, start=1):
        reference_name = _format_reference(number, len(clip.references))
        probed_reference = probes[reference]
        for finding in collect_media_findings(reference, probed_reference, None):
            if finding.code in _IGNORED_CODES:
                continue
            # The missing file is the reference and not the sample, so it gets a code of its own.
            code = "reference_missing" if finding.code == "missing" else finding.code
            message = f"{reference_name} {reference.name}: {finding.message}"
            verdict = "warn" if code in _WARNING_CODES else finding.verdict
            yield Finding(code, message, verdict, finding.remedy)
        if not (_has_pictures(target) and _has_pictures(probed_reference)):
            continue
        yield from _check_reference_size(target.facts, probed_reference.facts, requirements, reference_name)
        # Equal bytes are certain; a copy in another format needs the thumbnails.
        if media_digests[clip.media] == media_digests[reference] or _is_copy(target, probed_reference):
            message = f"{reference_name} is the same picture, from which the model learns to change nothing"
            yield make_warning("reference_same", message, "remove it, unless it is intended")
    if clip.mask is not None:
        yield from _check_mask(clip.mask, probes[clip.mask], target)


def compute_pair_facts(clip: Clip, probes: Probes) -> dict[str, Any]:
    """Likeness of a sample to each reference, and the share of it that its mask trains on.

    Empty without references and mask.
    """
    facts: dict[str, Any] = {}
    outlines = probes[clip.media].facts.get("outlines")
    if clip.references:
        facts["likeness"] = []
        for reference in clip.references:
            reference_outlines = probes[reference].facts.get("outlines")
            value = compare_outlines(outlines, reference_outlines) if outlines and reference_outlines else None
            facts["likeness"].append(None if value is None else round(value, 3))
    if clip.mask is not None:
        facts["learned"] = probes[clip.mask].facts.get("learned")
    return facts


def find_mismatched_references(samples: Sequence[AuditedSample]) -> dict[str, list[Finding]]:
    """Findings, by file, about references that differ completely from their samples although most others do not.

    Nothing is reported for sets that place a subject in other scenes, where few pairs are similar in place.
    """
    findings: dict[str, list[Finding]] = {}
    count = _find_max_references(samples)
    for number, by_file in _group_similarities(samples).items():
        if _compute_similar_share(by_file) < _MOST_ALIKE:
            continue
        for file, value in by_file.items():
            if value < UNLIKE:
                name = _format_reference(number, count)
                message = f"{name} has nothing in common with it (likeness {value:.2f}), as most others have"
                remedy = "check whether it belongs to another sample"
                findings.setdefault(file, []).append(make_warning("reference_unlike", message, remedy))
    return findings


def summarise_pairs(samples: Sequence[AuditedSample]) -> list[str]:
    """Notes about all references together, and about all masks together."""
    notes = []
    for number, by_file in _group_similarities(samples).items():
        # Unlike references may be intended, so this is a note on the whole set and not a finding per sample.
        if _compute_similar_share(by_file) < _FEW_ALIKE:
            num_similar = sum(value >= ALIKE for value in by_file.values())
            reference_name = _format_reference(number, _find_max_references(samples))
            notes.append(
                f"In {num_similar:,} of {len(by_file):,} pairs, a sample looks like {reference_name} in place, as "
                "edited pictures do. Few do if a subject is put into another scene; otherwise check the pairs."
            )
    paired = [sample for sample in samples if sample.facts.get("likeness") is not None]
    if paired and len(paired) < len(samples):
        notes.append(f"{len(samples) - len(paired):,} of {len(samples):,} samples have no reference.")
    masks = [sample.facts["learned"] for sample in samples if sample.facts.get("learned") is not None]
    # 1 means that a mask is white everywhere.
    if masks and min(masks) == 1:
        notes.append(f"The masks of all {len(masks):,} samples that have one are white: nothing is masked.")
    return notes


def _find_max_references(samples: Sequence[AuditedSample]) -> int:
    return max((len(sample.facts.get("likeness") or ()) for sample in samples), default=0)


def _group_similarities(samples: Sequence[AuditedSample]) -> dict[int, dict[str, float]]:
    """Likenesses of samples to references, where known, by the reference's number (from 1) and the sample's file."""
    by_number: dict[int, dict[str, float]] = {}
    for sample in samples:
        for number, value in enumerate(sample.facts.get("likeness") or (), start=1):
            if value is not None:
                by_number.setdefault(number, {})[sample.file] = value
    return by_number


def _compute_similar_share(likenesses: Mapping[str, float]) -> float:
    return sum(value >= ALIKE for value in likenesses.values()) / len(likenesses)


def _format_reference(number: int, num_references: int) -> str:
    return "its reference" if num_references == 1 else f"its reference {number}"


def _is_copy(target: ProbedFile, reference: ProbedFile) -> bool:
    """True if two files are known to have the same frames; False also if they could not be compared."""
    if target.thumbnail is None or reference.thumbnail is None:
        return False
    value = compare_outlines(target.facts["outlines"], reference.facts["outlines"])
    # The outlines rule out most pairs, so that few thumbnails need to be decoded.
    is_near = value is None or value >= _MIN_COPY_LIKENESS
    return is_near and is_same_picture(target.thumbnail, reference.thumbnail)


def _check_reference_size(
    target_facts: Mapping[str, Any],
    reference_facts: Mapping[str, Any],
    requirements: SampleRequirements | None,
    reference_name: str,
) -> Iterator[Finding]:
    (height, width), (full_height, full_width) = display_size(reference_facts), display_size(target_facts)
    size = f"{reference_name} has {width:g} x {height:g} pixels"
    if height * width < _MIN_AREA_SHARE * full_height * full_width:
        message = f"{size}, and the sample {full_width:g} x {full_height:g}"
        yield make_warning("reference_small", message, "use a larger version")
    if requirements is None or requirements.reference_shape is None:
        return
    # The size in which a reference is encoded may depend on the shape of the sample.
    placement = find_bucket(target_facts, requirements)
    if isinstance(placement, DroppedClip):
        return
    shape = requirements.reference_shape(round(height), round(width), placement.shape)
    # Only a reference that is enlarged on both sides is reported, so take the smaller factor.
    factor = min(shape.height / height, shape.width / width)
    if factor > MAX_UPSCALE:
        message = f"{size}, and is encoded in {shape.width} x {shape.height}: it is enlarged {factor:.2f} times"
        yield make_warning("reference_upscaled", message, "use a larger version, or lower the size of the samples")


def _check_mask(mask: LossMask, probed_mask: ProbedFile, target: ProbedFile) -> Iterator[Finding]:
    for finding in probed_mask.faults:
        code = "mask_missing" if finding.code == "missing" else finding.code
        yield replace(finding, code=code, message=f"its mask {mask.media.name}: {finding.message}")
    if not _has_pictures(probed_mask):
        return
    facts = probed_mask.facts
    # A black mask would give a loss of 0 for the sample.
    if facts["most"] == 0:
        problem = "it is completely transparent" if mask.alpha else "its mask is black"
        message = f"{problem}: nothing of it is learned"
        yield Finding("mask_black", message, "reject", "paint the learned part white, or remove it")
    # An alpha mask is part of its picture, so it always has the same shape.
    if _has_pictures(target) and not mask.alpha:
        height, width = display_size(target.facts)
        mismatch = find_mask_mismatch((facts["height"], facts["width"]), (round(height), round(width)))
        if mismatch:
            yield Finding("mask_shape", mismatch, "reject", "save it in the shape of its picture")


def _has_pictures(probed_file: ProbedFile) -> bool:
    return not probed_file.faults and "frames" in probed_file.facts
