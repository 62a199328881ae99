"""Notes about files of a folder that are left out, with their number and the reason."""

import os
from collections import Counter
from collections.abc import Set
from pathlib import Path

from dit_lora.data.media.media import HEIC
from dit_lora.data.media.opened import HEIC_REASON
from dit_lora.data.sources.listing import FolderListing

_UNREAD_IMAGE_SUFFIXES = (
    *(".jxl", ".psd", ".svg", ".exr", ".hdr", ".tga", ".ico", ".eps", ".pcx", ".dng", ".cr2", ".cr3"),
    *(".nef", ".arw", ".orf", ".rw2", ".raf"),
)
_UNREAD_VIDEO_SUFFIXES = (
    *(".mpg", ".mpeg", ".m2v", ".ts", ".mts", ".m2ts", ".wmv", ".asf", ".flv", ".f4v", ".3gp", ".ogv"),
    *(".vob", ".mxf", ".rm", ".rmvb", ".y4m"),
)
_REASONS = {
    **dict.fromkeys((HEIC, ".heif", ".hif"), HEIC_REASON),
    **dict.fromkeys(_UNREAD_IMAGE_SUFFIXES, "convert to PNG or JPEG"),
    **dict.fromkeys(_UNREAD_VIDEO_SUFFIXES, "convert to mp4"),
}
_MAX_LISTED = 3
"""Maximum number of names in a note."""


def describe_unread_files(listing: FolderListing, listed_names: Set[str] = frozenset()) -> list[str]:
    """Notes about files in unsupported formats, and files with a caption that are not named as a picture or video.

    Files in `listed_names`, which a table lists, are reported as problems instead.
    """
    media_stems = {os.path.splitext(name)[0] for name in listing.media}
    unread: list[str] = []
    reasons: dict[str, str] = {}
    for name in listing.other_files:
        if name in listed_names:
            continue
        stem, end = os.path.splitext(name)
        end = end.lower()
        # A caption suggests that the file was meant to be a sample.
        has_caption = f"{stem}.txt" in listing.texts and stem not in media_stems
        if end in _REASONS or has_caption:
            reasons[end] = _REASONS.get(end, "next to a caption, but without the name of a picture or a video")
            unread.append(name)
    if not unread:
        return []
    counts = Counter(os.path.splitext(name)[1].lower() for name in unread)
    kinds = "; ".join(f"{count:,} {end or 'without a suffix'} ({reasons[end]})" for end, count in counts.most_common())
    return [
        f"{_format_file_count(len(unread))} left out, because their format is not supported: "
        f"{kinds}{_format_examples(unread)}"
    ]


def describe_orphans(listing: FolderListing) -> list[str]:
    """Notes about .txt files in a folder of captions without a picture or video of the same name."""
    stems = {os.path.splitext(name)[0] for name in (*listing.media, *listing.other_files)}
    orphans = sorted(name for name in listing.texts if os.path.splitext(name)[0] not in stems)
    if not orphans:
        return []
    return [
        f"{_format_file_count(len(orphans))} left out, because no picture or video has their "
        f"name{_format_examples(orphans)}"
    ]


def describe_media_missing_from_table(
    listing: FolderListing, table: str, listed_names: Set[str], extra_folders: Set[Path]
) -> list[str]:
    """Notes about media that a table names in no column; `extra_folders` are the folders of references and masks."""
    # References and masks in their own folders are not samples, so a table need not list them.
    unlisted = []
    for name in listing.media:
        path = listing.root / name
        if name not in listed_names and not any(path.is_relative_to(folder) for folder in extra_folders):
            unlisted.append(name)
    if not unlisted:
        return []
    return [
        f"{_format_file_count(len(unlisted))} left out, because {table} does not list "
        f"them{_format_examples(unlisted)}; add a row for each, such as with dit-lora caption"
    ]


def _format_file_count(count: int) -> str:
    return f"{count:,} file is" if count == 1 else f"{count:,} files are"


def _format_examples(names: list[str]) -> str:
    more = ", ..." if len(names) > _MAX_LISTED else ""
    return f": {', '.join(names[:_MAX_LISTED])}{more}"
