"""Audits media: decodes every clip and image once, in parallel, and collects the findings."""

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.audit.duplicates import find_exact_duplicates, find_near_duplicates
from dit_lora.data.audit.finding import AuditedSample, Finding
from dit_lora.data.audit.judge import ReferenceShape, SampleRequirements, collect_media_findings
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.pairs import check_references_and_mask, compute_pair_facts, find_mismatched_references
from dit_lora.data.audit.probe import ProbedFile, get_media
from dit_lora.data.audit.signature import MediaSignature
from dit_lora.data.audit.workers import probe_all
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.media import Media
from dit_lora.data.sources.clips import Clip, LossMask
from dit_lora.environment.operating_system import count_usable_cpus
from dit_lora.environment.progress_bar import ProgressBar

MediaOrMask = Media | LossMask
_Probes = dict[MediaOrMask, ProbedFile]
_MAX_GOOD_THUMBNAILS = 2000
"""Number of good samples up to which their thumbnails are kept: about 20 MB."""


def audit_media(
    clips: Sequence[Clip],
    data: DataConfig | None,
    *,
    shapes: Sequence[VideoShape] = (),
    reference_shape: ReferenceShape | None = None,
    workers: int | None = None,
    memo: AuditMemo | None = None,
    digests: Digests | None = None,
    show_progress: bool = False,
) -> list[AuditedSample]:
    """Audit the media of every clip, in order. A file that crashes the decoder affects only its own sample.

    Args:
        clips: The samples.
        data: The recipe's data section; None to check nothing that depends on length and shape.
        shapes: Buckets that the model can train; by default all of the recipe's.
        reference_shape: Gives the shape in which the model encodes a reference.
        workers: Number of processes; by default one per core.
        memo: Measurements of earlier audits, which are not decoded again. It is saved from time to time, and on
            an interrupt.
        digests: Content digests of the files; by default computed without a memo.
        show_progress: Whether to show a progress bar.
    """
    digests = digests or Digests(Path(os.devnull))
    # A file that several clips use is decoded once.
    media = list(dict.fromkeys(medium for clip in clips for medium in _list_media(clip)))
    hashed: dict[MediaOrMask, str] = {}
    probes: _Probes = {}
    bar = ProgressBar(total=len(media), desc="auditing", unit="file", disable=not show_progress)
    try:
        with bar, closing(_probe_missing(media, probes, hashed, memo, digests, workers)) as probed:
            for medium, probe in probed:
                if memo is not None and medium in hashed:
                    memo.store(medium, hashed[medium], probe)
                probes[medium] = probe
                # Probes from the memo are added to `probes` without being yielded, so the bar counts `probes`.
                bar.update(len(probes) - bar.n)
            bar.update(len(probes) - bar.n)
    finally:
        if memo is not None:
            memo.save()
    requirements = SampleRequirements.from_config(data, shapes, reference_shape) if data else None
    return _audit_clips(clips, probes, hashed, requirements)


def audit_from_stored_measurements(
    clips: Sequence[Clip],
    data: DataConfig | None,
    *,
    memo: AuditMemo,
    digests: Digests,
    shapes: Sequence[VideoShape] = (),
) -> list[AuditedSample]:
    """Audit the clips whose files all have stored measurements in the memo, as `audit_media` does; decodes nothing."""
    hashed: dict[MediaOrMask, str] = {}
    probes: _Probes = {}
    for medium in dict.fromkeys(medium for clip in clips for medium in _list_media(clip)):
        probe = _look_up_probe(medium, hashed, memo, digests)
        if probe is not None:
            probes[medium] = probe
    probed_clips = [clip for clip in clips if all(medium in probes for medium in _list_media(clip))]
    return _audit_clips(probed_clips, probes, hashed, SampleRequirements.from_config(data, shapes) if data else None)


def _probe_missing(
    media: Sequence[MediaOrMask],
    known_probes: _Probes,
    media_digests: dict[MediaOrMask, str],
    memo: AuditMemo | None,
    digests: Digests,
    workers: int | None,
) -> Generator[tuple[MediaOrMask, ProbedFile]]:
    """Yield each file without stored measurements, with its new ones; add the others to `known_probes`."""

    def iter_probe_jobs() -> Iterator[tuple[int, MediaOrMask]]:
        for number, medium in enumerate(media):
            probe = _look_up_probe(medium, media_digests, memo, digests)
            # Try a file that crashed the decoder again: the reason may have been lack of memory, or the disk.
            if probe is None or probe.broke:
                yield number, medium
            else:
                known_probes[medium] = probe

    if not workers:
        # The cores that this process may use.
        workers = count_usable_cpus()
    with closing(probe_all(iter_probe_jobs(), workers)) as probes:
        for number, probe in probes:
            yield media[number], probe


def _look_up_probe(
    medium: MediaOrMask, media_digests: dict[MediaOrMask, str], memo: AuditMemo | None, digests: Digests
) -> ProbedFile | None:
    """Stored measurements of a file, or None. Its digest is added to `media_digests` if it can be read."""
    try:
        # Opening a named pipe would block until somebody writes to it; `exists` is False for it.
        if not get_media(medium).exists():
            return None
        media_digests[medium] = digests.hash_media(get_media(medium))
    except OSError:
        # The probe will report the reason.
        return None
    # The digest is needed without a memo too, to find exact duplicates.
    return memo.get(medium, media_digests[medium]) if memo else None


def _audit_clips(
    clips: Sequence[Clip],
    probes: _Probes,
    media_digests: dict[MediaOrMask, str],
    requirements: SampleRequirements | None,
) -> list[AuditedSample]:
    by_id = {clip.id: _audit_clip(clip, probes, media_digests, requirements) for clip in clips}
    for file, findings in _compare_samples(clips, by_id, probes, media_digests).items():
        by_id[file] = replace(by_id[file], findings=(*by_id[file].findings, *findings))
    result = []
    num_good = sum(sample.verdict == "ok" for sample in by_id.values())
    for clip in clips:
        sample = by_id[clip.id]
        # The report shows few good samples: thumbnails of a large set would fill the memory.
        if sample.verdict != "ok" or num_good <= _MAX_GOOD_THUMBNAILS or clip.references or clip.mask is not None:
            sample = replace(
                sample,
                thumbnail=probes[clip.media].thumbnail,
                references=tuple(probes[reference].thumbnail for reference in clip.references),
                mask=probes[clip.mask].thumbnail if clip.mask else None,
            )
        result.append(sample)
    return result


def _compare_samples(
    clips: Sequence[Clip],
    samples: Mapping[str, AuditedSample],
    probes: _Probes,
    media_digests: Mapping[MediaOrMask, str],
) -> dict[str, list[Finding]]:
    # Rejected files may have no pictures to compare.
    usable_clips = [clip for clip in clips if samples[clip.id].verdict != "reject"]
    # A mask and a first image do not make a sample different, so only the media and the references count.
    contents = {
        clip.id: tuple(media_digests[medium] for medium in (clip.media, *clip.references)) for clip in usable_clips
    }
    exact = find_exact_duplicates(contents)
    signatures = {
        clip.id: MediaSignature.from_text(probes[clip.media].facts["hash"])
        for clip in usable_clips
        # Edits of one picture look alike, so samples with references are not compared.
        if clip.id not in exact and not clip.references
    }
    findings = find_mismatched_references([samples[clip.id] for clip in usable_clips])
    for file, finding in {**exact, **find_near_duplicates(signatures)}.items():
        findings.setdefault(file, []).append(finding)
    return findings


def _audit_clip(
    clip: Clip, probes: _Probes, media_digests: Mapping[MediaOrMask, str], requirements: SampleRequirements | None
) -> AuditedSample:
    findings = collect_media_findings(clip.media, probes[clip.media], requirements)
    if clip.mask is not None and clip.mask.alpha:
        # The transparency is used as the mask here, so it is not reported as lost.
        findings = [finding for finding in findings if finding.code != "alpha"]
    if clip.image is not None:
        for finding in collect_media_findings(clip.image, probes[clip.image], None):
            findings.append(replace(finding, message=f"its first image: {finding.message}"))
    findings += check_references_and_mask(clip, probes, media_digests, requirements)
    facts = probes[clip.media].facts | compute_pair_facts(clip, probes)
    if clip.media in media_digests:
        facts["digest"] = media_digests[clip.media]
    # Outlines are long, and needed only to compare pictures.
    facts.pop("outlines", None)
    return AuditedSample(clip.id, tuple(findings), facts)


def _list_media(clip: Clip) -> list[MediaOrMask]:
    image, mask = clip.image, clip.mask
    return [clip.media, *([image] if image else []), *clip.references, *([mask] if mask else [])]
