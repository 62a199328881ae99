"""The save of a run that a user has marked as best, next to the best ones by measured loss in best.json."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from dit_lora.errors import DitLoraError
from dit_lora.files import read_file_inside_folder, write_json
from dit_lora.parsing import parse_json

_MARK_FILE = "marked.json"
_MEASURED_FILE = "best.json"
_ADAPTER_NAMES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "trainable.safetensors")


def read_best_marked_step(run_dir: Path) -> int | None:
    """The step of the marked save; None if none is marked, or the file is damaged."""
    # A run is read while it is written, and users edit files: anything else counts as no mark.
    record = _read_best_json(run_dir, _MARK_FILE)
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def mark_step_as_best(run_dir: Path, step: int | None) -> None:
    """Mark the save of a step as best; None removes the mark. best.json stays as it is.

    A marked save is not deleted by the run, and is what `export --best` takes.

    Raises:
        DitLoraError: If the step has no save with an adapter, or the mark cannot be written.
    """
    folder = run_dir / "checkpoints"
    if step is not None and not _has_adapter(_get_save_folder(run_dir, step)):
        raise DitLoraError(f"step {step} of {run_dir} has no save with an adapter; choose one that the report lists")
    # Through a link, the mark would be written to another run.
    if folder.is_symlink():
        raise DitLoraError(f"{folder} is a link; remove it")
    try:
        if step is None:
            (folder / _MARK_FILE).unlink(missing_ok=True)
        else:
            write_json(folder / _MARK_FILE, {"step": step, "checkpoint": _get_save_folder(run_dir, step).name})
    except OSError as error:
        raise DitLoraError(f"cannot write {folder / _MARK_FILE}: {error.strerror}") from error


def find_best_save(run_dir: Path) -> Path:
    """The folder of the marked save, or without a mark that of the lowest measured loss.

    Raises:
        DitLoraError: If the run has neither, or the save was deleted.
    """
    step, measured = read_best_marked_step(run_dir), _read_best_json(run_dir, _MEASURED_FILE)
    # best.json is sorted, with the lowest loss first.
    if step is None and isinstance(measured, list) and measured and isinstance(measured[0], dict):
        step = measured[0].get("step")
    if not isinstance(step, int):
        raise DitLoraError(
            f"{run_dir} has no best save: mark one with dit-lora report {run_dir} --mark-best STEP, or train with "
            "train.keep_best"
        )
    folder = _get_save_folder(run_dir, step)
    # Its state may have been deleted; the adapter is enough.
    if not _has_adapter(folder):
        raise DitLoraError(f"the best save of {run_dir}, step {step}, was deleted; mark another one")
    return folder


def _get_save_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def _has_adapter(folder: Path) -> bool:
    # At least six digits, as runs write them; a negative step has none.
    return re.fullmatch(r"step_\d{6,12}", folder.name) is not None and any(
        (folder / name).is_file() for name in _ADAPTER_NAMES
    )


def _read_best_json(run_dir: Path, name: str) -> Any:
    with suppress(OSError, ValueError):
        return parse_json(read_file_inside_folder(run_dir, run_dir / "checkpoints" / name))
    return None
