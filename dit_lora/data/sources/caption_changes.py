"""Changes of many captions at once: find and replace, and a trigger word in front."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dit_lora.data.sources.caption_table import CaptionTable
from dit_lora.data.sources.caption_text import find_caption_fault, has_word
from dit_lora.errors import DitLoraError


@dataclass(frozen=True)
class CaptionChange:
    """What to do with captions: replace a text, then add a trigger word. Either may be empty."""

    find: str = ""
    replacement: str = ""
    trigger: str = ""

    def apply(self, caption: str) -> str:
        """The changed caption. Upper and lower case differ in the text to find."""
        if self.find:
            caption = caption.replace(self.find, self.replacement)
        return add_trigger(caption, self.trigger)

    def find_changes(self, table: CaptionTable, names: Iterable[str]) -> dict[str, str]:
        """The new captions of those files that have a caption which changes.

        Raises:
            DitLoraError: If a changed caption could not be trained on.
        """
        changes = {}
        for name in names:
            caption = table.captions.get(name, "")
            # A file without a caption needs a description, not only a trigger word.
            changed = self.apply(caption) if caption.strip() else caption
            if changed == caption:
                continue
            fault = find_caption_fault(changed)
            if fault is not None:
                raise DitLoraError(f"no caption is changed, because {name} would be refused: {fault[1]}")
            changes[name] = changed
        return changes


def add_trigger(caption: str, trigger: str | None) -> str:
    """Put the trigger word in front of a caption that does not contain it as a word."""
    return caption if not trigger or has_word(caption, trigger) else f"{trigger}, {caption}"


def compute_change_version(table: CaptionTable, changes: Mapping[str, str]) -> str:
    """Digest of captions as they are and as they will be: differs if the change that was shown is another one."""
    digest = hashlib.sha256()
    for name, changed in changes.items():
        digest.update(repr((name, table.captions.get(name, ""), changed)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:24]
