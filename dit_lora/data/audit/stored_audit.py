"""The last audit of a folder, read from its JSON file, and filters of samples by findings, shape and length."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dit_lora.data.audit.finding import VERDICTS, Finding, Verdict
from dit_lora.errors import DitLoraError
from dit_lora.files import read_file_inside_folder
from dit_lora.parsing import parse_json

AUDIT_FILE = ".captions/audit.json"
"""Where the pages of a folder look for its audit: `dit-lora audit DIR --json DIR/.captions/audit.json`."""
SHAPES = ("portrait", "square", "landscape")
LENGTHS = {"picture": (0.0, 0.0), "under 2 s": (0.0, 2.0), "2 to 5 s": (2.0, 5.0), "over 5 s": (5.0, float("inf"))}
"""Names of lengths, each with its seconds; the end is not included."""
ANY_FINDING = "any"
_SQUARE_RATIO = 1.05  # largest ratio of the sides of a picture that counts as square


@dataclass(frozen=True)
class StoredSample:
    """What an audit has found about one file, without its caption."""

    findings: Sequence[Finding] = ()
    width: float = 0
    """0 if it was not measured; so are the others."""
    height: float = 0
    seconds: float = 0
    frames: float = 0

    @property
    def shape(self) -> str:
        """Shape of the picture, a name in `SHAPES`; empty if it was not measured."""
        if not (self.width and self.height):
            return ""
        if max(self.width, self.height) <= _SQUARE_RATIO * min(self.width, self.height):
            return "square"
        return "landscape" if self.width > self.height else "portrait"

    @property
    def length(self) -> str:
        """Duration of the clip, a name in `LENGTHS`; empty if it was not measured."""
        if not self.frames:
            return ""
        if self.frames == 1:
            return "picture"
        return next((name for name, (low, high) in LENGTHS.items() if low <= self.seconds < high), "")


@dataclass(frozen=True)
class StoredAudit:
    """An audit of a folder's media. Captions are not part of it, because they may have been edited since."""

    samples: Mapping[str, StoredSample] = field(default_factory=dict)
    time: float = 0.0
    """When it was written, in seconds since 1970; 0 if there is none."""

    @classmethod
    def read(cls, root: Path, previous: "StoredAudit | None" = None) -> "StoredAudit":
        """Read the audit of a folder; `previous`, an earlier result, is returned if the file is the same.

        A file that is damaged, or not an audit, counts as none.
        """
        path = root / AUDIT_FILE
        with suppress(OSError, ValueError, KeyError, TypeError):
            # Without following a link, which could lead to a file of another folder.
            written = path.lstat().st_mtime
            if previous is not None and previous.time == written:
                return previous
            rows = parse_json(read_file_inside_folder(root, path))["samples"]
            return cls({str(row["file"]): _parse_sample(row) for row in rows}, written)
        return cls()


@dataclass(frozen=True)
class SampleFilter:
    """Which files of a folder are shown or changed; an empty value lets all pass."""

    finding: str = ""
    """Code of a finding, such as `caption_missing` or `caption_long`, or `any`."""
    shape: str = ""
    """One of `SHAPES`."""
    length: str = ""
    """A name in `LENGTHS`."""
    text: str = ""
    """Text that the caption or the file name contains, in upper or lower case."""

    @classmethod
    def from_values(cls, values: Mapping[str, str]) -> "SampleFilter":
        """Build a filter from named values; unknown names are ignored.

        Raises:
            DitLoraError: If the shape or the length is not a known name.
        """
        chosen = {name: values[name] for name in cls.list_names() if values.get(name)}
        for name, choices in (("shape", SHAPES), ("length", tuple(LENGTHS))):
            if chosen.get(name, choices[0]) not in choices:
                raise DitLoraError(f"{name} must be {', '.join(choices)}; got {chosen[name][:80]!r}")
        return cls(**chosen)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> "SampleFilter":
        """A filter from texts `name=value`, as on the command line. Raises `DitLoraError` for any other text."""
        pairs = [text.partition("=") for text in texts]
        unknown = next((name + sign + value for name, sign, value in pairs if name not in cls.list_names()), None)
        if unknown is not None:
            raise DitLoraError(f"--only must be {', '.join(cls.list_names())} and =value; got {unknown!r}")
        return cls.from_values({name: value for name, _, value in pairs})

    @property
    def needs_audit_results(self) -> bool:
        """True if it depends on findings or on the audit, and not only on names and captions."""
        return bool(self.finding or self.shape or self.length)

    @classmethod
    def list_names(cls) -> list[str]:
        return [value.name for value in fields(cls)]

    def matches(self, name: str, caption: str, findings: Sequence[Finding], sample: StoredSample) -> bool:
        """True if a file passes. `findings` are all of its findings, those of its caption included."""
        codes = {finding.code for finding in findings}
        if self.finding and not (codes if self.finding == ANY_FINDING else self.finding in codes):
            return False
        if (self.shape and sample.shape != self.shape) or (self.length and sample.length != self.length):
            return False
        # Names count too, because folders of many data sets name their contents.
        text = self.text.lower()
        return not text or text in caption.lower() or text in name.lower()


def _parse_sample(row: Mapping[str, Any]) -> StoredSample:
    # Files of earlier versions have no verdict for each finding.
    verdicts = row.get("verdicts") or [row["verdict"]] * len(row["reasons"])
    findings = []
    for reason, verdict in zip(row["reasons"], verdicts, strict=True):
        code, _, message = str(reason).partition(": ")
        # Findings about captions are computed from the captions as they are now.
        if not code.startswith("caption_"):
            # The file may have been edited, so a verdict that does not exist is replaced.
            severity: Verdict = next((name for name in VERDICTS if name == verdict), "warn")
            findings.append(Finding(code, message, severity))
    # Damaged files have no measurements.
    numbers = {name: row["facts"].get(name) for name in ("width", "height", "seconds", "frames")}
    return StoredSample(
        findings, **{name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
    )
