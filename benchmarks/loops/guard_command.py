"""The guard's command, called in a process that is forked; the only place of this folder that imports the guard."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = "dit_lora_guard"
"""The guard's folder, below the working directory."""
_MODULES = ("dit_lora.guard.attach.run_script", "dit_lora.guard.plugin.script")


def import_guard() -> Any:
    """Import what `dit-lora guard` imports; its module moved once."""
    installed = [name for name in _MODULES if importlib.util.find_spec(name.rpartition(".")[0])]
    return importlib.import_module(installed[0])


def run_guarded(script: str, arguments: Sequence[str]) -> None:
    """Run a script as `dit-lora guard SCRIPT ARGUMENTS` does."""
    from dit_lora.config.recovery_settings import LoopConfig
    from dit_lora.errors import report_errors_and_exit

    with report_errors_and_exit():
        import_guard().run_script(script, arguments, config=LoopConfig(), folder=Path(FOLDER))


def is_guards_file(path: str) -> bool:
    """True for a file that the guard itself writes: in its folder, or, as a callback, in the trainer's."""
    parts = path.split("/")
    is_known = parts[-1] in ("events.jsonl", "guard.json") or parts[-1].startswith("last_good_step_")
    return parts[0] == FOLDER or "bundles" in parts or is_known
