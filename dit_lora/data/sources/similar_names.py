"""Finds files whose names differ from a wanted name only in case or in the form of Unicode characters."""

import os
import unicodedata
from functools import lru_cache
from pathlib import Path


def describe_similar_name(path: Path) -> str | None:
    """Message about a file with a similar name, if the requested one does not exist; None if there is none."""
    try:
        names = _list_file_names(str(path.parent), path.parent.stat().st_mtime_ns)
    except OSError:
        return None
    match = names.get(_normalise_name(path.name))
    if match is None or match == path.name:
        return None
    # macOS stores accents as separate characters (NFD), most other systems as one (NFC).
    same_case = unicodedata.normalize("NFC", match) == unicodedata.normalize("NFC", path.name)
    difference = "in another Unicode form" if same_case else "in upper and lower case"
    return f"found {match!r}, which differs {difference}; rename it to {path.name!r}"


@lru_cache(maxsize=64)
def _list_file_names(folder: str, changed_ns: int) -> dict[str, str]:
    """File names in a folder by their Unicode-normalized form; `changed_ns` makes the cache notice changes."""
    return {_normalise_name(name): name for name in os.listdir(folder)}


def _normalise_name(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
