"""Finds files whose names differ from a wanted one only in case or in the form of their Unicode characters."""

import os
import unicodedata
from functools import lru_cache
from pathlib import Path


def similar_name(path: Path) -> str | None:
    """Return why the file is not there although one like it is, with the remedy; None if there is none like it."""
    try:
        names = _names(str(path.parent), path.parent.stat().st_mtime_ns)
    except OSError:
        return None
    found = names.get(_key(path.name))
    if found is None or found == path.name:
        return None
    same_case = unicodedata.normalize("NFC", found) == unicodedata.normalize("NFC", path.name)
    why = "in another Unicode form" if same_case else "in upper and lower case"
    return f"{found!r} is there, whose name differs {why}; rename it to {path.name!r}"


@lru_cache(maxsize=64)
def _names(folder: str, changed_ns: int) -> dict[str, str]:
    return {_key(name): name for name in os.listdir(folder)}


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
