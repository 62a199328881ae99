"""Audit of media: every clip and image is decoded once, in parallel, and judged."""

import os
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from dit_lora.config.data import DataConfig, VideoShape
from dit_lora.data.audit.duplicates import exact_duplicates, near_duplicates
from dit_lora.data.audit.finding import JudgedSample
from dit_lora.data.audit.judge import Requirements, judge
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.probe import ProbedFile
from dit_lora.data.audit.signature import Signature
from dit_lora.data.audit.workers import probe_all
from dit_lora.data.cache.digests import Digests
from dit_lora.data.media.media import Media
from dit_lora.data.sources.clips import Clip

_Known = dict[Media, ProbedFile]


def audit_media(
    clips: Sequence[Clip],
    data: DataConfig | None,
    *,
    shapes: Sequence[VideoShape] = (),
    workers: int | None = None,
    memo: AuditMemo | None = None,
    digests: Digests | None = None,
    progress: bool = False,
) -> list[JudgedSample]:
    """Judge the media of every clip, in the order given; a file that breaks the decoder costs itself alone.

    Without `data`, nothing is asked of length and shape. `shapes` are the buckets that the model can train,
    by default all of the recipe's. What `memo` knows is not decoded again; it is saved as the audit goes
    on, and when it is interrupted. `workers` is the number of processes, by default one a core; `progress`
    shows a bar.
    """
    digests = digests or Digests(Path(os.devnull))
    media = list(dict.fromkeys(medium for clip in clips for medium in _media_of(clip)))
    hashed: dict[Media, str] = {}
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
    return _judged(clips, probes, hashed, Requirements.of(data, shapes) if data else None)


def remembered(
    clips: Sequence[Clip],
    data: DataConfig | None,
    *,
    memo: AuditMemo,
    digests: Digests,
    shapes: Sequence[VideoShape] = (),
) -> list[JudgedSample]:
    """Return `audit_media` of those clips that the memo knows, decoding nothing."""
    hashed: dict[Media, str] = {}
    probes: _Known = {}
    for medium in dict.fromkeys(medium for clip in clips for medium in _media_of(clip)):
        probe = _look_up(medium, hashed, memo, digests)
        if probe is not None:
            probes[medium] = probe
    known_clips = [clip for clip in clips if all(medium in probes for medium in _media_of(clip))]
    return _judged(known_clips, probes, hashed, Requirements.of(data, shapes) if data else None)


def _probed(
    media: Sequence[Media],
    known: _Known,
    hashed: dict[Media, str],
    memo: AuditMemo | None,
    digests: Digests,
    workers: int | None,
) -> Generator[tuple[Media, ProbedFile]]:
    """Yield each medium that the memo lacks with its new probe; put the others into `known` on the way."""

    def jobs() -> Iterator[tuple[int, Media]]:
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
    media: Media, hashed: dict[Media, str], memo: AuditMemo | None, digests: Digests
) -> ProbedFile | None:
    try:
        # A pipe would wait for a writer.
        if not media.exists():
            return None
        hashed[media] = digests.media(media)
    except OSError:
        # The probe will say why.
        return None
    return memo.get(media, hashed[media]) if memo else None


def _judged(
    clips: Sequence[Clip], probes: _Known, hashed: dict[Media, str], wanted: Requirements | None
) -> list[JudgedSample]:
    judged = {clip.id: _judge_clip(clip, probes, hashed, wanted) for clip in clips}
    # Rejected files may have no pictures to compare.
    media = {clip.id: clip.media for clip in clips if judged[clip.id].verdict != "reject"}
    same = exact_duplicates({file: hashed[medium] for file, medium in media.items()})
    signatures = {
        file: Signature.parse(probes[medium].facts["hash"])
        for file, medium in media.items()
        if file not in same
    }
    alike = near_duplicates(signatures)
    for file, finding in {**same, **alike}.items():
        findings = (*judged[file].findings, finding)
        judged[file] = replace(judged[file], findings=findings)
    thumbnails = {clip.id: probes[clip.media].thumbnail for clip in clips}
    return [
        replace(sample, thumbnail=thumbnails[file]) if sample.verdict != "ok" else sample
        for file, sample in judged.items()
    ]


def _judge_clip(
    clip: Clip, probes: _Known, hashed: dict[Media, str], wanted: Requirements | None
) -> JudgedSample:
    findings = judge(clip.media, probes[clip.media], wanted)
    if clip.image is not None:
        findings += [
            replace(finding, words=f"its first image: {finding.words}")
            for finding in judge(clip.image, probes[clip.image], None)
        ]
    facts = dict(probes[clip.media].facts)
    if clip.media in hashed:
        facts["digest"] = hashed[clip.media]
    return JudgedSample(clip.id, tuple(findings), facts)


def _media_of(clip: Clip) -> list[Media]:
    return [clip.media, *([clip.image] if clip.image is not None else [])]


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
