"""Folders named as for kohya's sd-scripts: pictures in `10_sks dog` have the caption `sks dog`, 10 times per epoch."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from dit_lora.data.sources.listing import FolderListing

# A name with leading zeros, such as 007_car, is a numbered class and not a number of repeats.
_FOLDER_PATTERN = re.compile(r"([1-9][0-9]{0,3})_(.*\S.*)")
_MAX_LISTED = 5
"""Maximum number of folders in a note."""


class KohyaFolder(NamedTuple):
    """Caption and repeats of the pictures in a folder, parsed from the folder's name as kohya's trainer does."""

    caption: str
    """Caption of the pictures without one of their own, unchanged from the folder's name."""
    repeats: int


def parse_kohya_folders(listing: FolderListing) -> dict[str, KohyaFolder]:
    """Parse folder names of kohya's form (`10_sks dog`: repeats, caption).

    Empty if some media are in other folders.
    """
    tops = dict.fromkeys(name.partition("/")[0] for name in listing.media)
    matches = {top: _FOLDER_PATTERN.fullmatch(top) for top in tops}
    # One folder that is named differently means that the names are classes after all.
    if not all("/" in name for name in listing.media) or not all(matches.values()):
        return {}
    return {top: KohyaFolder(match[2].strip(), int(match[1])) for top, match in matches.items() if match}


def describe_kohya_folders(folders: Mapping[str, KohyaFolder]) -> list[str]:
    """Note about how kohya's folder names were interpreted; empty without such folders."""
    if not folders:
        return []
    descriptions = [
        f"{top!r} is the caption {folder.caption!r}, {folder.repeats} times an epoch"
        for top, folder in list(folders.items())[:_MAX_LISTED]
    ]
    more = ", ..." if len(folders) > _MAX_LISTED else ""
    return [f"folder names are read as in kohya's scripts: {', '.join(descriptions)}{more}"]
