"""Writes status.json and data.json, for programs and people who look at a run's folder."""

import contextlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dit_lora.data.loading.training_set import TrainingData
from dit_lora.errors import InterruptedRunError
from dit_lora.files import read_json, write_atomically, write_json
from dit_lora.guard.finite_gate import NonFiniteError
from dit_lora.training.session.session import Session

# Number of rejected samples in the list; counts are of all.
_MAX_LISTED = 500
_MAX_STATE_LENGTH = len("interrupted")


@contextmanager
def record_run_status(session: Session, recipe_file: str) -> Iterator[None]:
    """Write `running` to status.json; at the end `finished`, `interrupted`, `stopped` (by the guard) or `failed`.

    The recipe's file is named without its folder. A killed process leaves `running` and a lock that nobody holds
    (`dit_lora.training.session.run_lock.is_run_active`).
    """
    _write_status(session, recipe_file, "running")
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
        _write_status(session, recipe_file, state)


def _write_status(session: Session, recipe_file: str, state: str) -> None:
    """Write the run's status.json.

    If the disk is full, overwrite the old file, which has enough bytes for any state.
    """
    if not session.is_main:
        return
    path = session.dir / "status.json"
    record = json.dumps({"state": state, "recipe": Path(recipe_file).name}, indent=2)
    # Padded, so that the file of any state has room for any other state.
    text = f"{record:<{len(record) - len(state) + _MAX_STATE_LENGTH}}\n"
    try:
        write_atomically(path, text)
    except OSError:
        # No run should end because of this file.
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.write(text.encode())


def write_data_record(session: Session, data: TrainingData) -> None:
    """Write data.json on the main process: samples per epoch, rejected and held-out samples by name, and buckets."""
    if not session.is_main:
        return
    rejected = dict(data.rejected)
    held_out = [entry.id for entry in data.validation_set.entries] if data.validation_set is not None else []
    record: dict[str, Any] = {
        "samples": len(data.training_set.entries),
        "rejected": dict(list(rejected.items())[:_MAX_LISTED]),
        "rejected_count": len(rejected),
        "held_out": held_out[:_MAX_LISTED],
        "held_out_count": len(held_out),
        "buckets": None,
    }
    if data.bucket_report is not None:
        # Long lists are cut, as above.
        record["buckets"] = data.bucket_report.as_dict()
        record["buckets"]["dropped"] = record["buckets"]["dropped"][:_MAX_LISTED]
    write_json(session.dir / "data.json", record)


def build_tracker_config(session: Session) -> dict[str, Any]:
    """The run's configuration for trackers: the recipe, and the environment it runs in."""
    environment = read_json(session.dir / "environment.json")
    return {**session.recipe.model_dump(mode="json"), "environment": environment}
