"""`guard.json`, which says what the guards of a folder watch, and how many steps each has seen taken and lost.

A folder may have had several: a script that was started again, or one with several loops.
"""

import logging
import secrets
import sys
import time
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Any

from dit_lora.files import read_inside, write_whole
from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.bundles import versions
from dit_lora.guard.attach.find_models import Models
from dit_lora.guard.gate import ACCELERATED
from dit_lora.numerics.dtensors import stock_class
from dit_lora.parsing import parse_json
from dit_lora.patching import is_a

_LOG = logging.getLogger("dit_lora")
NAME = "guard.json"
FORMAT = 1


class GuardFile:
    """The part of one guard in its folder's guard.json; the main process writes it."""

    def __init__(self, host: Host, folder: Path | None) -> None:
        self.id = secrets.token_hex(4)
        """Tells this guard's events from those of others in the same folder."""
        self._host = host
        self._path = folder / NAME if folder is not None else None
        self._part: dict[str, Any] = {
            "id": self.id,
            "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "script": Path(sys.argv[0]).name if sys.argv else "",
            "loop": "Accelerate" if host.accelerator is not None else "plain PyTorch",
            "device": str(host.device),
            "versions": versions(),
            "taken": 0,
            "lost": 0,
            "switched_off": [],
            "ended": False,
        }

    def note(self, **facts: Any) -> None:
        """Write what has become known. A folder that cannot be written is said once, and costs no run."""
        self._part |= {"ranks": self._host.ranks, **facts}
        if self._path is None or self._host.rank != 0:
            return
        starts = [one for one in starts_in(self._path.parent) if one["id"] != self.id]
        whole = {"format": FORMAT, "starts": [*starts, self._part]}
        try:
            write_whole(self._path, dumps(whole, indent=1) + "\n")
        except OSError as error:
            _LOG.warning("guard: cannot write %s: %s", self._path, error.strerror)
            self._path = None


def starts_in(folder: Path) -> list[dict[str, Any]]:
    """Return what guard.json says of each guard, in the order of their last word; nothing where it cannot be read."""
    try:
        whole = parse_json(read_inside(folder, folder / NAME))
    except (OSError, ValueError):
        return []
    starts = whole.get("starts") if isinstance(whole, dict) else None
    if not isinstance(starts, list):
        return []
    return [one for one in starts if isinstance(one, dict) and isinstance(one.get("id"), str)]


def models_in_words(models: Models) -> list[dict[str, Any]]:
    """Return each model by its class, with how many numbers it has and trains, in which dtypes."""
    told = []
    for prefix, model in models.items():
        parameters = list(model.parameters())
        trained = [one for one in parameters if one.requires_grad]
        dtypes = {str(one.dtype).removeprefix("torch."): None for one in trained or parameters}
        told.append(
            {
                "name": prefix.removesuffix(".") or stock_class(model).__name__,
                "class": stock_class(model).__name__,
                "parameters": sum(one.numel() for one in parameters),
                "trained": sum(one.numel() for one in trained),
                "dtypes": list(dtypes),
            }
        )
    return told


def optimizers_in_words(optimizers: Sequence[Any]) -> list[str]:
    bare = (one.optimizer if is_a(one, ACCELERATED) else one for one in optimizers)
    return [type(one).__name__ for one in bare]
