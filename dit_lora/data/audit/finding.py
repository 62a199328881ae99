"""Findings of the audit about a sample, and the sample's verdict: that of its worst finding."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warn", "reject"]
VERDICTS: tuple[Verdict, ...] = ("ok", "warn", "reject")


@dataclass(frozen=True)
class Finding:
    """One finding of the audit about a sample: a problem, or something worth a look."""

    code: str
    """A short name that tools may rely on, for instance `too_short`."""
    message: str
    """Message for people, with the numbers."""
    verdict: Verdict
    remedy: str = ""
    """Advice on what to do; a command where there is one."""


def make_warning(code: str, message: str, remedy: str) -> Finding:
    """Create a finding about a sample that can be used, but is worth a look."""
    return Finding(code, message, "warn", remedy)


@dataclass(frozen=True)
class AuditedSample:
    """Audit result of one sample: its findings, measurements and thumbnails."""

    file: str
    """The sample's id: its path below the data folder."""
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Measured facts: fps, frames, seconds, height, width, codec, pixel format ..."""
    thumbnail: bytes | None = None
    """A JPEG of a few frames side by side."""
    references: tuple[bytes | None, ...] = ()
    """Thumbnail of each reference, in order; None if it could not be decoded."""
    mask: bytes | None = None
    """A JPEG of the mask."""

    @property
    def verdict(self) -> Verdict:
        """Severity of a sample's worst finding; "ok" without findings."""
        # `VERDICTS` is sorted from harmless to severe, so the largest index is the worst verdict.
        ranks = [VERDICTS.index(finding.verdict) for finding in self.findings]
        return VERDICTS[max(ranks, default=0)]

    @property
    def reasons(self) -> list[str]:
        """Code and message of each of a sample's findings, one line each."""
        return [f"{finding.code}: {finding.message}" for finding in self.findings]
