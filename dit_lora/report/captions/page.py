"""A folder's clips and pictures with their captions, and what the audit says of each caption."""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from dit_lora.data.audit.captions import check_captions
from dit_lora.data.audit.finding import Finding
from dit_lora.data.chat.frames import frame_seconds
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import ClipError, read_header
from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.data.sources.caption_text import has_word
from dit_lora.data.sources.clips import Clip
from dit_lora.report.film_strip import film_strip
from dit_lora.report.pages import PagePictures, render, write_page

SHOWN = 60
"""Files on one page of those that are served; a page that is written has as many as it has pictures for."""
_WRITTEN = 200
_FRAMES, _HEIGHT = 3, 160  # of a thumbnail, and their pixels
_SCRIPT = "captions.js"


@dataclass(frozen=True)
class TextRules:
    """Rules for captions beside those for all: a text encoder's limit, and a word that each must have."""

    tokenizer: Any = None
    max_tokens: int | None = None
    trigger: str | None = None


@dataclass(frozen=True)
class CaptionCard:
    """One file with its caption."""

    name: str
    address: str
    """The name as a URL's path, which can hold names that are not UTF-8."""
    caption: str
    findings: Sequence[Finding]
    is_video: bool
    source: str
    """The file's address on a served page; the data URI of a picture on one that is written, or nothing."""
    link: str
    version: str

    @property
    def caption_json(self) -> str:
        """The caption for a script, exact: HTML would alter line ends, NUL and lone surrogates."""
        return json.dumps(self.caption)


class CaptionFindings:
    """Findings by file, kept between requests: only captions that changed are judged again."""

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._judged: dict[str, str | None] = {}
        self._found: dict[str, list[Finding]] = {}

    def update(self, table: CaptionTable) -> dict[str, list[Finding]]:
        """Return `judged_captions` of the table as it is now."""
        before, now = self._judged, {name: table.captions.get(name) for name in table.media}
        changed = {
            name
            for name in before.keys() | now.keys()
            if name not in before or name not in now or before[name] != now[name]
        }
        if changed:
            # The audit counts equal captions: the other files of such a caption are judged again too.
            texts = {_words(captions.get(name)) for name in changed for captions in (before, now)}
            affected = {name for name in now if name in changed or _words(now[name]) in texts}
            for name in changed | affected:
                self._found.pop(name, None)
            self._found |= judged_captions(table, self._rules, affected)
            self._judged = now
        return self._found


def _words(caption: str | None) -> str:
    return " ".join((caption or "").split())


def caption_version(caption: str) -> str:
    """Return a digest by which a page says which caption it has edited."""
    return hashlib.sha256(caption.encode("utf-8", errors="surrogatepass")).hexdigest()[:24]


def judged_captions(
    table: CaptionTable, rules: TextRules, names: Collection[str] | None = None
) -> dict[str, list[Finding]]:
    """Return the audit's findings by file, of `names` or of all files; files without a finding are absent."""
    media = [name for name in table.media if names is None or name in names]
    captions = {name: table.captions.get(name, "").strip() for name in media}  # as training does
    described = [
        Clip(name, MediaFile(table.root / name), caption)
        for name, caption in captions.items()
        if caption
    ]
    found = check_captions(described, rules.tokenizer, rules.max_tokens)
    for name in (name for name, caption in captions.items() if not caption):
        words = "it has no caption, and training would refuse it"
        found[name] = [Finding("caption_missing", words, "reject", "write one")]
    for clip in described:
        if rules.trigger and not has_word(clip.caption, rules.trigger):
            words = f"its caption has no {rules.trigger}"
            finding = Finding("trigger_missing", words, "warn", "write it in")
            found[clip.id] = [*found.get(clip.id, ()), finding]
    return found


def write_captions_page(path: Path, table: CaptionTable, rules: TextRules) -> Path:
    """Write the page, self-contained but for links to the files; those that the audit speaks of come first."""
    found = judged_captions(table, rules)
    ordered = sorted(table.media, key=lambda name: name not in found)
    pictures = PagePictures()
    cards = [
        _card(table, name, found, pictures.uri(_thumbnail(table.root / name)), path.parent)
        for name in ordered[:_WRITTEN]
    ]
    page = render("captions_page.html", **_facts(table, found), cards=cards, live=None)
    return write_page(path, page)


def served_page(
    table: CaptionTable, found: dict[str, list[Finding]], token: str, number: int, only: bool
) -> str:
    """Return page `number` (from 1) of the files, or of those `only` with findings, to be edited.

    Nothing on it is redacted: a caption that is saved must be the caption that was written.
    """
    names = [name for name in table.media if name in found] if only else table.media
    pages = max(1, -(-len(names) // SHOWN))
    number = min(max(1, number), pages)
    shown = names[(number - 1) * SHOWN : number * SHOWN]
    cards = [_card(table, name, found, f"media/{address_of(name)}", None) for name in shown]
    live = {"token": token, "number": number, "pages": pages, "only": only}
    return render(
        "captions_page.html",
        scripts=[_SCRIPT],
        sources="img-src 'self' data:; media-src 'self'; connect-src 'self'",
        redact=False,
        **_facts(table, found),
        cards=cards,
        live=live,
    )


def _thumbnail(file: Path) -> bytes:
    """Return some frames of a clip, or a picture; empty if it cannot be read."""
    media, seconds = MediaFile(file), [0.0]
    try:
        header = read_header(media)
        if not header.is_image and header.seconds and header.fps:
            seconds = list(frame_seconds(header.seconds, header.fps, _FRAMES))
    except ClipError:
        return b""
    return film_strip(media, seconds, _HEIGHT)


def _facts(table: CaptionTable, found: dict[str, list[Finding]]) -> dict[str, Any]:
    missing = len(table.missing)
    return {
        "title": table.root.resolve().name,
        "total": len(table.media),
        "missing": missing,
        "flagged": len(found) - missing,
    }


def _card(
    table: CaptionTable,
    name: str,
    found: dict[str, list[Finding]],
    source: str,
    beside: Path | None,
) -> CaptionCard:
    own = table.captions.get(name, "")
    file = table.root / name
    link = "" if beside is None else _relative(file, beside)
    # A GIF that moves is a video to training, and a picture to a browser.
    is_video = not (file.suffix.lower() == ".gif" or is_image(MediaFile(file)))
    address = address_of(name)
    version = caption_version(own)
    return CaptionCard(name, address, own, found.get(name, []), is_video, source, link, version)


def address_of(name: str) -> str:
    """Return a file's name as a URL's path. Names that are not UTF-8 hold their bytes as surrogate escapes."""
    return quote(name.encode(errors="surrogateescape"))


def name_of(address: str) -> str:
    """Return the file's name of `address_of`."""
    return unquote(address, errors="surrogateescape")


def _relative(file: Path, folder: Path) -> str:
    """Return a link from a page in that folder; nothing where the file lies elsewhere."""
    whole, root = file.resolve(), folder.resolve()
    return address_of(whole.relative_to(root).as_posix()) if whole.is_relative_to(root) else ""
