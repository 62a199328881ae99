"""Findings of the audit about a sample, and the verdict that the worst of them makes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warn", "reject"]
VERDICTS: tuple[Verdict, ...] = ("ok", "warn", "reject")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a sample, or worth a look."""

    code: str
    """A short name that tools may rely on, for instance `too_short`."""
    words: str
    """The finding in words, with the numbers."""
    verdict: Verdict
    remedy: str = ""
    """Advice on what to do; a command where there is one."""


@dataclass(frozen=True)
class JudgedSample:
    """One sample of the data, judged."""

    file: str
    """The sample's id: its path below the data folder."""
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Measured facts: fps, frames, seconds, height, width, codec, pixel format ..."""
    thumbnail: bytes | None = None
    """A JPEG of a few frames side by side."""
    references: tuple[bytes | None, ...] = ()
    """The same of each reference, in their order; None where it has no pictures."""
    mask: bytes | None = None
    """A JPEG of the mask."""

    @property
    def verdict(self) -> Verdict:
        ranks = [VERDICTS.index(finding.verdict) for finding in self.findings]
        return VERDICTS[max(ranks, default=0)]

    @property
    def reasons(self) -> list[str]:
        return [f"{finding.code}: {finding.words}" for finding in self.findings]
