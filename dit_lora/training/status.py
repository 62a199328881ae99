"""Writes status.json and data.json, for programs and people who look at a run's folder."""

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dit_lora.data.loading.training_set import Prepared
from dit_lora.errors import InterruptedRunError
from dit_lora.files import read_json, write_whole
from dit_lora.guard.gate import NonFiniteError
from dit_lora.training.session.session import Session

# Number of rejected samples in the list; counts are of all.
_LISTED = 500
_LONGEST = len("interrupted")


@contextmanager
def status_noted(session: Session, recipe_file: str) -> Iterator[None]:
    """Write `running` to status.json; at the end `finished`, `interrupted`, `stopped` (by the guard) or `failed`.

    The recipe's file is named without its folder. A killed process leaves `running` and a lock that nobody holds
    (`dit_lora.training.session.run_lock.is_live`).
    """
    _note(session, recipe_file, "running")
    state = "failed"
    try:
        yield
        state = "finished"
    except NonFiniteError:
        state = "stopped"
        raise
    except (InterruptedRunError, KeyboardInterrupt, SystemExit):
        state = "interrupted"
        raise
    finally:
        _note(session, recipe_file, state)


def _note(session: Session, recipe_file: str, state: str) -> None:
    """Write status.json. If the disk is full, overwrite the old file, which has enough bytes for any state."""
    if not session.is_main:
        return
    path = session.dir / "status.json"
    record = json.dumps({"state": state, "recipe": Path(recipe_file).name}, indent=2)
    # Padded, so that the file of any state has room for any other state.
    text = f"{record:<{len(record) - len(state) + _LONGEST}}\n"
    try:
        write_whole(path, text)
    except OSError:
        # No run should end because of this file.
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.write(text.encode())


def write_data_record(session: Session, data: Prepared) -> None:
    """Write data.json on the main process: samples per epoch, rejected samples with reasons, and buckets."""
    if not session.is_main:
        return
    rejected = dict(data.rejected)
    record: dict[str, Any] = {
        "samples": len(data.clips.entries),
        "rejected": dict(list(rejected.items())[:_LISTED]),
        "rejected_count": len(rejected),
        "buckets": None,
    }
    if data.report is not None:
        # Long lists are cut, as above.
        record["buckets"] = data.report.as_dict()
        record["buckets"]["dropped"] = record["buckets"]["dropped"][:_LISTED]
    write_whole(session.dir / "data.json", json.dumps(record, indent=2) + "\n")


def told_to_trackers(session: Session) -> dict[str, Any]:
    """The run's configuration for trackers: the recipe, and the environment it runs in."""
    environment = read_json(session.dir / "environment.json")
    return {**session.recipe.model_dump(mode="json"), "environment": environment}
