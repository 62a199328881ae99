"""Folders in the layout of kohya's sd-scripts: `10_sks dog` holds pictures of the caption `sks dog`, each 10 times an epoch."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from dit_lora.data.sources.listing import Listing

# Names such as 007_car number classes, and repeat nothing.
_NAME = re.compile(r"([1-9][0-9]{0,3})_(.*\S.*)")
_SHOWN = 5
"""Folders in a note."""


class KohyaFolder(NamedTuple):
    """Caption and repeats that the name of a folder gives to the pictures in it."""

    caption: str
    """The caption of pictures that have none of their own, as it is written."""
    repeats: int


def kohya_folders(listing: Listing) -> dict[str, KohyaFolder]:
    """Return the folders directly in the root, if all media lie in such folders; empty otherwise."""
    tops = dict.fromkeys(name.partition("/")[0] for name in listing.media)
    matches = {top: _NAME.fullmatch(top) for top in tops}
    if not all("/" in name for name in listing.media) or not all(matches.values()):
        return {}
    return {
        top: KohyaFolder(match[2].strip(), int(match[1])) for top, match in matches.items() if match
    }


def kohya_notes(folders: Mapping[str, KohyaFolder]) -> list[str]:
    """Say how the names of the folders were taken."""
    if not folders:
        return []
    shown = [
        f"{top!r} is the caption {folder.caption!r}, {folder.repeats} times an epoch"
        for top, folder in list(folders.items())[:_SHOWN]
    ]
    more = ", ..." if len(folders) > _SHOWN else ""
    return [f"folders are named as kohya's: {', '.join(shown)}{more}"]
