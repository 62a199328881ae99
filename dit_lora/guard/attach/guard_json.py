"""Write and read `guard.json`: what the guards of a folder watch, and how many steps each saw taken and lost.

A folder may have several guards: from a script that was restarted, or from a script with several loops.
"""

import logging
import secrets
import sys
import time
from importlib import metadata
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dit_lora.files import read_file_inside_folder, write_atomically
from dit_lora.parsing import parse_json

if TYPE_CHECKING:  # the report reads these files without torch
    from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext

_LOG = logging.getLogger("dit_lora")
FILE_NAME = "guard.json"
STATISTICS_FILE = "statistics.jsonl"
FORMAT_VERSION = 1
_PACKAGES = ("torch", "accelerate", "diffusers", "peft", "transformers", "safetensors", "triton")


class GuardJsonFile:
    """Writes one guard's entry in guard.json of its folder. Only the main process writes."""

    def __init__(self, host: "LoopProcessContext", folder: Path | None) -> None:
        self.id = secrets.token_hex(4)
        """Identifies this guard's events among those of other guards in the same folder."""
        self._host = host
        self._path = folder / FILE_NAME if folder is not None else None
        self._entry: dict[str, Any] = {
            "id": self.id,
            "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "script": Path(sys.argv[0]).name if sys.argv else "",
            "loop": "Accelerate" if host.accelerator is not None else "plain PyTorch",
            "device": str(host.device),
            "versions": list_package_versions(),
            "taken": 0,
            "lost": 0,
            "switched_off": [],
            "ended": False,
        }

    def write_guard_entry(self, **facts: Any) -> None:
        """Update the guard's entry in guard.json and write it.

        If the folder cannot be written, logs that once and goes on.
        """
        self._entry |= {"ranks": self._host.num_ranks, **facts}
        if self._path is None or self._host.rank != 0:
            return
        # Keep what other guards of this folder have written; this guard's entry moves to the end.
        other_entries = [entry for entry in read_guard_entries(self._path.parent) if entry["id"] != self.id]
        content = {"format": FORMAT_VERSION, "starts": [*other_entries, self._entry]}
        try:
            write_atomically(self._path, dumps(content, indent=1) + "\n")
        except OSError as error:
            _LOG.warning("guard: cannot write %s: %s", self._path, error.strerror)
            # Later updates are skipped, so the warning is not repeated.
            self._path = None


def read_guard_entries(folder: Path) -> list[dict[str, Any]]:
    """The entries of guard.json, the most recently written last; empty if the file cannot be read."""
    try:
        content = parse_json(read_file_inside_folder(folder, folder / FILE_NAME))
    except (OSError, ValueError):
        return []
    # A file of another program or a torn one counts as empty.
    entries = content.get("starts") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def list_package_versions() -> dict[str, str]:
    """Installed versions of the packages that a guard records, by name."""
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed
