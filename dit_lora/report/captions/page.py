"""A page of a folder's clips and pictures with their captions, and the audit's findings about each caption."""

import hashlib
import io
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from PIL import Image

from dit_lora.data.audit.captions import check_captions
from dit_lora.data.audit.finding import Finding
from dit_lora.data.chat.frames import read_frames_at, sample_frame_times
from dit_lora.data.media.kind import is_image
from dit_lora.data.media.media import MediaFile
from dit_lora.data.media.video import ClipError, read_header
from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.data.sources.caption_text import has_word
from dit_lora.data.sources.clips import Clip
from dit_lora.report.pages import PagePictures, render_page, write_page

CARDS_PER_PAGE = 60
"""Number of files on one served page. A written page shows up to `_MAX_WRITTEN_CARDS`."""
_MAX_WRITTEN_CARDS = 200
_FRAMES, _HEIGHT = 3, 160  # number of frames of a thumbnail, and its height in pixels
_SCRIPT = "captions.js"


@dataclass(frozen=True)
class TextRules:
    """Additional rules for captions: a text encoder's token limit, and a trigger word that each must contain."""

    tokenizer: Any = None
    max_tokens: int | None = None
    trigger: str | None = None


@dataclass(frozen=True)
class CaptionCard:
    """One row of the captions page: a file with its caption."""

    name: str
    address: str
    """The name as a URL path, which can also represent names that are not UTF-8."""
    caption: str
    findings: Sequence[Finding]
    is_video: bool
    source: str
    """The file's URL on a served page; on a written page, a picture's data URI or an empty string."""
    link: str
    version: str

    @property
    def caption_json(self) -> str:
        """The exact caption as JSON for a script: HTML would change line ends, NUL and lone surrogates."""
        return json.dumps(self.caption)


class CaptionFindings:
    """The caption audit's findings by file, cached between requests: only changed captions are checked again."""

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._checked_captions: dict[str, str | None] = {}
        self._findings_by_file: dict[str, list[Finding]] = {}

    def update(self, table: CaptionTable) -> dict[str, list[Finding]]:
        """Update the findings to the table's current captions.

        The result equals a full check of the table with `check_table_captions`.
        """
        old_captions = self._checked_captions
        # None for a file without a caption.
        current_captions = {name: table.captions.get(name) for name in table.media}
        # Files that are new, were removed, or have another caption.
        changed = {name for name, _ in old_captions.items() ^ current_captions.items()}
        if changed:
            # The audit counts equal captions, without regard to whitespace, so other files with a changed caption's
            # text are checked again too. Every changed file's current text is among these.
            texts = {_normalize_caption(old_captions.get(name)) for name in changed}
            texts |= {_normalize_caption(current_captions.get(name)) for name in changed}
            affected = {name for name, caption in current_captions.items() if _normalize_caption(caption) in texts}
            for name in changed | affected:
                self._findings_by_file.pop(name, None)
            self._findings_by_file |= check_table_captions(table, self._rules, affected)
            self._checked_captions = current_captions
        return self._findings_by_file


def _normalize_caption(caption: str | None) -> str:
    return " ".join((caption or "").split())


def compute_caption_version(caption: str) -> str:
    """Digest of a caption, by which a page identifies the version that it has edited."""
    return hashlib.sha256(caption.encode("utf-8", errors="surrogatepass")).hexdigest()[:24]


def check_table_captions(
    table: CaptionTable, rules: TextRules, names: Collection[str] | None = None
) -> dict[str, list[Finding]]:
    """The audit's findings about captions by file, for `names` or all files. Files without findings are absent."""
    media = [name for name in table.media if names is None or name in names]
    captions = {name: table.captions.get(name, "").strip() for name in media}  # as training does
    described = [Clip(name, MediaFile(table.root / name), caption) for name, caption in captions.items() if caption]
    findings = check_captions(described, rules.tokenizer, rules.max_tokens)
    for name in (name for name, caption in captions.items() if not caption):
        # The audit's check only takes files that have a caption, so missing ones are reported here.
        message = "it has no caption; training refuses it"
        findings[name] = [Finding("caption_missing", message, "reject", "write a caption")]
    for clip in described:
        if rules.trigger and not has_word(clip.caption, rules.trigger):
            message = f"its caption does not contain {rules.trigger}"
            finding = Finding("trigger_missing", message, "warn", "add the word to the caption")
            findings[clip.id] = [*findings.get(clip.id, ()), finding]
    return findings


def write_captions_page(path: Path, table: CaptionTable, rules: TextRules) -> Path:
    """Write a page of captions that links to the media files. Files with findings come first.

    Raises:
        DitLoraError: If the file cannot be written.
    """
    findings = check_table_captions(table, rules)
    # False sorts before True; the sort is stable, so both halves keep the table's order.
    ordered = sorted(table.media, key=lambda name: name not in findings)
    pictures = PagePictures()
    cards = [
        _build_card(table, name, findings, pictures.make_uri(_make_thumbnail(table.root / name)), path.parent)
        for name in ordered[:_MAX_WRITTEN_CARDS]
    ]
    page = render_page("captions_page.html", **_build_facts(table, findings), cards=cards, live=None)
    return write_page(path, page)


def render_served_page(
    table: CaptionTable, findings: dict[str, list[Finding]], token: str, page_number: int, only_flagged: bool
) -> str:
    """Render page `page_number` (from 1) for editing; with `only_flagged`, of the files with findings.

    Nothing on it is redacted, since saving an unedited caption must not change it.
    """
    names = [name for name in table.media if name in findings] if only_flagged else table.media
    # Ceiling division; an empty folder still has one page.
    pages = max(1, -(-len(names) // CARDS_PER_PAGE))
    page_number = min(max(1, page_number), pages)
    page_names = names[(page_number - 1) * CARDS_PER_PAGE : page_number * CARDS_PER_PAGE]
    cards = [_build_card(table, name, findings, f"media/{encode_address(name)}", None) for name in page_names]
    # The page's script sends the token with each edit.
    live = {"token": token, "number": page_number, "pages": pages, "only": only_flagged}
    return render_page(
        "captions_page.html",
        scripts=[_SCRIPT],
        sources="img-src 'self' data:; media-src 'self'; connect-src 'self'",
        redact=False,
        **_build_facts(table, findings),
        cards=cards,
        live=live,
    )


def _make_thumbnail(file: Path) -> bytes:
    """JPEG of some frames of a clip in a row, or of a picture; empty if it cannot be read."""
    media, seconds = MediaFile(file), [0.0]
    try:
        header = read_header(media)
        # A picture has only the frame at 0 seconds.
        if not header.is_image and header.seconds and header.fps:
            seconds = list(sample_frame_times(header.seconds, header.fps, _FRAMES))
        # Limit the aspect ratio of the thumbnail to between 1:4 and 4:1.
        width = round(min(4.0, max(0.25, header.width / header.height)) * _HEIGHT)
        # uint8 (F, 3, H, W), cropped to the thumbnail's aspect ratio.
        pixels = read_frames_at(media, seconds, height=_HEIGHT, width=width, fit="cover")
    except ClipError:
        return b""
    stream = io.BytesIO()
    # Frames of (3, H, W) side by side, then (H, W of all frames, 3).
    row = torch.cat(list(pixels), dim=-1).permute(1, 2, 0).contiguous()
    Image.fromarray(row.numpy()).save(stream, "JPEG", quality=75)
    return stream.getvalue()


def _build_facts(table: CaptionTable, findings: dict[str, list[Finding]]) -> dict[str, Any]:
    missing = len(table.uncaptioned)
    return {
        "title": table.root.resolve().name,
        "total": len(table.media),
        "missing": missing,
        "flagged": len(findings) - missing,
    }


def _build_card(
    table: CaptionTable, name: str, findings: dict[str, list[Finding]], source: str, page_dir: Path | None
) -> CaptionCard:
    caption = table.captions.get(name, "")
    file = table.root / name
    link = ""
    if page_dir is not None:
        # Both resolved: a link to a file outside of the page's folder would not work for readers elsewhere.
        target, root = file.resolve(), page_dir.resolve()
        if target.is_relative_to(root):
            link = encode_address(target.relative_to(root).as_posix())
    # Training treats an animated GIF as a video, and a browser treats it as a picture.
    is_video = not (file.suffix.lower() == ".gif" or is_image(MediaFile(file)))
    address = encode_address(name)
    version = compute_caption_version(caption)
    return CaptionCard(name, address, caption, findings.get(name, []), is_video, source, link, version)


def encode_address(name: str) -> str:
    """A file name as a URL path. Names that are not UTF-8 hold their bytes as surrogate escapes."""
    return quote(name.encode(errors="surrogateescape"))


def decode_address(address: str) -> str:
    """Decode a URL path made by `encode_address` to the file name."""
    return unquote(address, errors="surrogateescape")
