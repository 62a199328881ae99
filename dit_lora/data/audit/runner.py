"""Audits media: decodes every clip and image once, in parallel, and collects the findings."""

import os
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.audit.duplicates import exact_duplicates, near_duplicates
from dit_lora.data.audit.finding import Finding, JudgedSample
from dit_lora.data.audit.judge import ReferenceShape, Requirements, judge
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.pairs import facts_beside, judge_beside, unlike_references
from dit_lora.data.audit.probe import ProbedFile, file_of
from dit_lora.data.audit.signature import Signature
from dit_lora.data.audit.workers import probe_all
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.media import Media
from dit_lora.data.sources.clips import Clip, LossMask

Probed = Media | LossMask
_Known = dict[Probed, ProbedFile]


def audit_media(
    clips: Sequence[Clip],
    data: DataConfig | None,
    *,
    shapes: Sequence[VideoShape] = (),
    reference_shape: ReferenceShape | None = None,
    workers: int | None = None,
    memo: AuditMemo | None = None,
    digests: Digests | None = None,
    progress: bool = False,
) -> list[JudgedSample]:
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
        progress: Whether to show a progress bar.
    """
    digests = digests or Digests(Path(os.devnull))
    # A file that several clips use is decoded once.
    media = list(dict.fromkeys(medium for clip in clips for medium in _media_of(clip)))
    hashed: dict[Probed, str] = {}
    probes: _Known = {}
    bar = tqdm(
        total=len(media), desc="auditing", unit="file", disable=not progress, dynamic_ncols=True
    )
    try:
        with bar, closing(_probed(media, probes, hashed, memo, digests, workers)) as probed:
            for medium, probe in probed:
                if memo is not None and medium in hashed:
                    memo.put(medium, hashed[medium], probe)
                probes[medium] = probe
                # Probes from the memo are added to `probes` without being yielded, so the bar counts `probes`.
                bar.update(len(probes) - bar.n)
            bar.update(len(probes) - bar.n)
    finally:
        if memo is not None:
            memo.save()
    requirements = Requirements.of(data, shapes, reference_shape) if data else None
    return _judged(clips, probes, hashed, requirements)


def remembered(
    clips: Sequence[Clip],
    data: DataConfig | None,
    *,
    memo: AuditMemo,
    digests: Digests,
    shapes: Sequence[VideoShape] = (),
) -> list[JudgedSample]:
    """The result of `audit_media` for those clips whose files are all in the memo; decodes nothing."""
    hashed: dict[Probed, str] = {}
    probes: _Known = {}
    for medium in dict.fromkeys(medium for clip in clips for medium in _media_of(clip)):
        probe = _look_up(medium, hashed, memo, digests)
        if probe is not None:
            probes[medium] = probe
    probed_clips = [clip for clip in clips if all(medium in probes for medium in _media_of(clip))]
    return _judged(probed_clips, probes, hashed, Requirements.of(data, shapes) if data else None)


def _probed(
    media: Sequence[Probed],
    known: _Known,
    hashed: dict[Probed, str],
    memo: AuditMemo | None,
    digests: Digests,
    workers: int | None,
) -> Generator[tuple[Probed, ProbedFile]]:
    """Yield each medium that is not in the memo with its new probe; add the others to `known` on the way."""

    def jobs() -> Iterator[tuple[int, Probed]]:
        for number, medium in enumerate(media):
            probe = _look_up(medium, hashed, memo, digests)
            # Try a file that crashed the decoder again: the reason may have been lack of memory, or the disk.
            if probe is None or probe.broke:
                yield number, medium
            else:
                known[medium] = probe

    with closing(probe_all(jobs(), workers or _cores())) as probes:
        for number, probe in probes:
            yield media[number], probe


def _look_up(
    media: Probed, hashed: dict[Probed, str], memo: AuditMemo | None, digests: Digests
) -> ProbedFile | None:
    """The memo's probe of a medium, whose digest is added to `hashed`; None if it has none or cannot be read."""
    try:
        # Opening a named pipe would block until somebody writes to it; `exists` is False for it.
        if not file_of(media).exists():
            return None
        hashed[media] = digests.media(file_of(media))
    except OSError:
        # The probe will report the reason.
        return None
    # The digest is needed without a memo too, to find exact duplicates.
    return memo.get(media, hashed[media]) if memo else None


def _judged(
    clips: Sequence[Clip], probes: _Known, hashed: dict[Probed, str], wanted: Requirements | None
) -> list[JudgedSample]:
    """Findings of each clip, including those from comparing clips with each other."""
    by_id = {clip.id: _judge_clip(clip, probes, hashed, wanted) for clip in clips}
    for file, findings in _compared(clips, by_id, probes, hashed).items():
        by_id[file] = replace(by_id[file], findings=(*by_id[file].findings, *findings))
    return [_shown(clip, by_id[clip.id], probes) for clip in clips]


def _compared(
    clips: Sequence[Clip],
    judged: Mapping[str, JudgedSample],
    probes: _Known,
    hashed: Mapping[Probed, str],
) -> dict[str, list[Finding]]:
    """Findings, by sample id, from comparing samples with each other."""
    # Rejected files may have no pictures to compare.
    usable_clips = [clip for clip in clips if judged[clip.id].verdict != "reject"]
    # A mask and a first image do not make a sample different, so only the media and the references count.
    contents = {
        clip.id: tuple(hashed[medium] for medium in _made_from(clip)) for clip in usable_clips
    }
    exact = exact_duplicates(contents)
    signatures = {
        clip.id: Signature.parse(probes[clip.media].facts["hash"])
        for clip in usable_clips
        # Edits of one picture look alike, so samples with references are not compared.
        if clip.id not in exact and not clip.references
    }
    findings = unlike_references([judged[clip.id] for clip in usable_clips])
    for file, finding in {**exact, **near_duplicates(signatures)}.items():
        findings.setdefault(file, []).append(finding)
    return findings


def _made_from(clip: Clip) -> list[Media]:
    return [clip.media, *clip.references]


def _shown(clip: Clip, judged: JudgedSample, probes: _Known) -> JudgedSample:
    """Add thumbnails to a sample that has a finding, references or a mask."""
    if judged.verdict == "ok" and not clip.references and clip.mask is None:
        return judged
    # Thumbnails are kept only where the report shows them: a large set would fill the memory.
    return replace(
        judged,
        thumbnail=probes[clip.media].thumbnail,
        references=tuple(probes[reference].thumbnail for reference in clip.references),
        mask=probes[clip.mask].thumbnail if clip.mask else None,
    )


def _judge_clip(
    clip: Clip, probes: _Known, hashed: Mapping[Probed, str], wanted: Requirements | None
) -> JudgedSample:
    """All findings about one clip by itself, its first image, references and mask."""
    findings = judge(clip.media, probes[clip.media], wanted)
    if clip.mask is not None and clip.mask.alpha:
        # The transparency is used as the mask here, so it is not reported as lost.
        findings = [finding for finding in findings if finding.code != "alpha"]
    if clip.image is not None:
        findings += [
            replace(finding, words=f"its first image: {finding.words}")
            for finding in judge(clip.image, probes[clip.image], None)
        ]
    findings += judge_beside(clip, probes, hashed, wanted)
    facts = probes[clip.media].facts | facts_beside(clip, probes)
    if clip.media in hashed:
        facts["digest"] = hashed[clip.media]
    # Outlines are long, and needed only to compare pictures.
    facts.pop("outlines", None)
    return JudgedSample(clip.id, tuple(findings), facts)


def _media_of(clip: Clip) -> list[Probed]:
    """All files of a clip: its media, first image, references and mask."""
    image, mask = clip.image, clip.mask
    return [clip.media, *([image] if image else []), *clip.references, *([mask] if mask else [])]


def _cores() -> int:
    """Number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
