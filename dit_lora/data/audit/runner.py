"""Audit of media: every clip and image is decoded once, in parallel, and judged."""

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
    """Judge the media of every clip, in the order given; a file that breaks the decoder costs itself alone.

    Without `data`, nothing is asked of length and shape. `shapes` are the buckets that the model can train,
    by default all of the recipe's, and `reference_shape` says in which it is given references. What `memo` knows is not decoded again; it is saved as the audit goes
    on, and when it is interrupted. `workers` is the number of processes, by default one a core; `progress`
    shows a bar.
    """
    digests = digests or Digests(Path(os.devnull))
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
                # Probes that the memo had are put into `known` without being yielded.
                bar.update(len(probes) - bar.n)
            bar.update(len(probes) - bar.n)
    finally:
        if memo is not None:
            memo.save()
    wanted = Requirements.of(data, shapes, reference_shape) if data else None
    return _judged(clips, probes, hashed, wanted)


def remembered(
    clips: Sequence[Clip],
    data: DataConfig | None,
    *,
    memo: AuditMemo,
    digests: Digests,
    shapes: Sequence[VideoShape] = (),
) -> list[JudgedSample]:
    """Return `audit_media` of those clips that the memo knows, decoding nothing."""
    hashed: dict[Probed, str] = {}
    probes: _Known = {}
    for medium in dict.fromkeys(medium for clip in clips for medium in _media_of(clip)):
        probe = _look_up(medium, hashed, memo, digests)
        if probe is not None:
            probes[medium] = probe
    known_clips = [clip for clip in clips if all(medium in probes for medium in _media_of(clip))]
    return _judged(known_clips, probes, hashed, Requirements.of(data, shapes) if data else None)


def _probed(
    media: Sequence[Probed],
    known: _Known,
    hashed: dict[Probed, str],
    memo: AuditMemo | None,
    digests: Digests,
    workers: int | None,
) -> Generator[tuple[Probed, ProbedFile]]:
    """Yield each medium that the memo lacks with its new probe; put the others into `known` on the way."""

    def jobs() -> Iterator[tuple[int, Probed]]:
        for number, medium in enumerate(media):
            probe = _look_up(medium, hashed, memo, digests)
            # A crash that is blamed on the file may have been for want of memory, or the disk's.
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
    try:
        # A pipe would wait for a writer.
        if not file_of(media).exists():
            return None
        hashed[media] = digests.media(file_of(media))
    except OSError:
        # The probe will say why.
        return None
    return memo.get(media, hashed[media]) if memo else None


def _judged(
    clips: Sequence[Clip], probes: _Known, hashed: dict[Probed, str], wanted: Requirements | None
) -> list[JudgedSample]:
    judged = {clip.id: _judge_clip(clip, probes, hashed, wanted) for clip in clips}
    for file, findings in _compared(clips, judged, probes, hashed).items():
        judged[file] = replace(judged[file], findings=(*judged[file].findings, *findings))
    return [_shown(clip, judged[clip.id], probes) for clip in clips]


def _compared(
    clips: Sequence[Clip],
    judged: Mapping[str, JudgedSample],
    probes: _Known,
    hashed: Mapping[Probed, str],
) -> dict[str, list[Finding]]:
    """Return what is found by comparing samples with each other."""
    # Rejected files may have no pictures to compare.
    sound = [clip for clip in clips if judged[clip.id].verdict != "reject"]
    contents = {clip.id: tuple(hashed[one] for one in _made_from(clip)) for clip in sound}
    same = exact_duplicates(contents)
    signatures = {
        clip.id: Signature.parse(probes[clip.media].facts["hash"])
        for clip in sound
        # Edits of one picture look alike.
        if clip.id not in same and not clip.references
    }
    findings = unlike_references([judged[clip.id] for clip in sound])
    for file, finding in {**same, **near_duplicates(signatures)}.items():
        findings.setdefault(file, []).append(finding)
    return findings


def _made_from(clip: Clip) -> list[Media]:
    return [clip.media, *clip.references]


def _shown(clip: Clip, judged: JudgedSample, probes: _Known) -> JudgedSample:
    """Return a sample with pictures, if there is something to look at: a finding, or a pair."""
    if judged.verdict == "ok" and not clip.references and clip.mask is None:
        return judged
    return replace(
        judged,
        thumbnail=probes[clip.media].thumbnail,
        references=tuple(probes[one].thumbnail for one in clip.references),
        mask=probes[clip.mask].thumbnail if clip.mask else None,
    )


def _judge_clip(
    clip: Clip, probes: _Known, hashed: Mapping[Probed, str], wanted: Requirements | None
) -> JudgedSample:
    findings = judge(clip.media, probes[clip.media], wanted)
    if clip.mask is not None and clip.mask.alpha:
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
    # They are long, and of use in comparing pictures alone.
    facts.pop("outlines", None)
    return JudgedSample(clip.id, tuple(findings), facts)


def _media_of(clip: Clip) -> list[Probed]:
    image, mask = clip.image, clip.mask
    return [clip.media, *([image] if image else []), *clip.references, *([mask] if mask else [])]


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
