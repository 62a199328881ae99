"""The audit of media: every clip and image decoded once, in parallel, and judged."""

import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from dit_lora.data.audit.duplicates import exact_duplicates, near_duplicates
from dit_lora.data.audit.finding import Judged
from dit_lora.data.audit.judge import Wanted, judge
from dit_lora.data.audit.memo import AuditMemo
from dit_lora.data.audit.probe import Probe
from dit_lora.data.audit.signature import Signature
from dit_lora.data.audit.workers import probe_all
from dit_lora.data.clips import Clip
from dit_lora.data.digest import Digests
from dit_lora.data.media import Media
from dit_lora.data_config import DataConfig, VideoShape

_SAVED_EVERY = 20.0  # seconds; a kill loses no more

_Known = dict[Media, Probe]


def audit_media(
    clips: Sequence[Clip],
    data: DataConfig | None,
    *,
    shapes: Sequence[VideoShape] = (),
    workers: int | None = None,
    memo: AuditMemo | None = None,
    digests: Digests | None = None,
    progress: bool = False,
) -> list[Judged]:
    """Judge the media of every clip, in the order given; a file that breaks the decoder costs itself alone.

    Without `data`, nothing is asked of length and shape. `shapes` are the buckets that the model can train, by
    default all of the recipe's. What `memo` knows is not decoded again; it is saved as the audit goes on, and when
    it is interrupted. `workers` is the number of processes, by default one a core; `progress` shows a bar.
    """
    digests = digests or _forgetful()
    media = list(dict.fromkeys(one for clip in clips for one in _media_of(clip)))
    hashed: dict[Media, str] = {}
    known: _Known = {}
    bar = tqdm(
        total=len(media), desc="auditing", unit="file", disable=not progress, dynamic_ncols=True
    )
    keeper = _Keeper(memo, hashed)
    try:
        with bar, closing(_probed(media, known, hashed, memo, digests, workers)) as probed:
            for one, found in probed:
                keeper.keep(one, found)
                known[one] = found
                bar.update(len(known) - bar.n)
            bar.update(len(known) - bar.n)
    finally:
        keeper.save()
    return _judged(clips, known, hashed, Wanted.of(data, shapes) if data else None)


def remembered(
    clips: Sequence[Clip],
    data: DataConfig | None,
    *,
    memo: AuditMemo,
    digests: Digests,
    shapes: Sequence[VideoShape] = (),
) -> list[Judged]:
    """`audit_media` of those clips that the memo knows, decoding nothing."""
    hashed: dict[Media, str] = {}
    known: _Known = {}
    for one in dict.fromkeys(one for clip in clips for one in _media_of(clip)):
        found = _look_up(one, hashed, memo, digests)
        if found is not None:
            known[one] = found
    there = [clip for clip in clips if all(one in known for one in _media_of(clip))]
    return _judged(there, known, hashed, Wanted.of(data, shapes) if data else None)


class _Keeper:
    """Puts what is new into the memo, and saves that now and then."""

    def __init__(self, memo: AuditMemo | None, hashed: dict[Media, str]) -> None:
        self._memo = memo
        self._hashed = hashed
        self._saved_at = time.monotonic()

    def keep(self, media: Media, found: Probe) -> None:
        if self._memo is not None and media in self._hashed:
            self._memo.put(media, self._hashed[media], found)
            if time.monotonic() - self._saved_at > _SAVED_EVERY:
                self.save()

    def save(self) -> None:
        if self._memo is not None:
            self._memo.save()
            self._saved_at = time.monotonic()


def _probed(
    media: Sequence[Media],
    known: _Known,
    hashed: dict[Media, str],
    memo: AuditMemo | None,
    digests: Digests,
    workers: int | None,
) -> Generator[tuple[Media, Probe]]:
    """What is not known yet, probed; what is, put into `known` on the way."""

    def jobs() -> Iterator[tuple[int, Media]]:
        for number, one in enumerate(media):
            found = _look_up(one, hashed, memo, digests)
            # What is blamed on a file may have been the machine's memory or disk.
            if found is None or found.broke:
                yield number, one
            else:
                known[one] = found

    with closing(probe_all(jobs(), workers or _cores())) as probes:
        for number, found in probes:
            yield media[number], found


def _look_up(
    media: Media, hashed: dict[Media, str], memo: AuditMemo | None, digests: Digests
) -> Probe | None:
    try:
        if not media.exists():  # a pipe would wait for a writer
            return None
        hashed[media] = digests.media(media)
    except OSError:
        return None  # the probe says why
    return memo.get(media, hashed[media]) if memo else None


def _judged(
    clips: Sequence[Clip], known: _Known, hashed: dict[Media, str], wanted: Wanted | None
) -> list[Judged]:
    judged = {clip.id: _judge_clip(clip, known, hashed, wanted) for clip in clips}
    media = {clip.id: clip.media for clip in clips if judged[clip.id].verdict != "reject"}
    same = exact_duplicates({file: hashed[one] for file, one in media.items()})
    alike = near_duplicates(
        {
            file: Signature.parse(known[one].facts["hash"])
            for file, one in media.items()
            if file not in same
        }
    )
    for file, finding in {**same, **alike}.items():
        findings = (*judged[file].findings, finding)
        judged[file] = replace(judged[file], findings=findings)
    thumbnails = {clip.id: known[clip.media].thumbnail for clip in clips}
    return [
        replace(one, thumbnail=thumbnails[file]) if one.verdict != "ok" else one
        for file, one in judged.items()
    ]


def _judge_clip(
    clip: Clip, known: _Known, hashed: dict[Media, str], wanted: Wanted | None
) -> Judged:
    findings = judge(clip.media, known[clip.media], wanted)
    if clip.image is not None:
        findings += [
            replace(finding, words=f"its first image: {finding.words}")
            for finding in judge(clip.image, known[clip.image], None)
        ]
    facts = dict(known[clip.media].facts)
    if clip.media in hashed:
        facts["digest"] = hashed[clip.media]
    return Judged(clip.id, tuple(findings), facts)


def _media_of(clip: Clip) -> list[Media]:
    return [clip.media, *([clip.image] if clip.image is not None else [])]


def _forgetful() -> Digests:
    return Digests(Path(os.devnull))


def _cores() -> int:
    """That this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
