"""Writes checkpoints aside with digests, renames them once, and reads them bit for bit on any number of ranks.

A checkpoint holds the trained weights, the optimizer's state, their averages and the step, whole: how they were
spread over ranks does not show in it. Nothing else has state: random draws, data order and learning rates are
functions of the step. It never holds the frozen base.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dit_lora.adapters.lora_file import AVERAGES_FILE, STATE_FILE, WEIGHTS_FILE
from dit_lora.config.records import CheckpointState, Manifest, read_typed
from dit_lora.errors import DitLoraError, listed
from dit_lora.families import CHAT_FAMILIES
from dit_lora.files import open_regular, share_weights
from dit_lora.parsing import parse_json
from dit_lora.training.checkpoints.compatibility import samples_remedy

MANIFEST = "manifest.json"
_WEIGHTS, _OPTIMIZER, _STATE = WEIGHTS_FILE, "optimizer.safetensors", STATE_FILE
_EMA = AVERAGES_FILE
_NAME = re.compile(r"step_(\d{6,})")
_ASIDE = (".step_*.partial", ".step_*.removed")
"""Patterns of the folders that a killed process leaves of a checkpoint that it was writing or removing."""

Identity = Mapping[str, Any]
"""Everything that makes a run this run and no other; flat, with names as in the recipe."""
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class SavedState:
    """Everything that training changes: whole tensors by name, however they are spread over ranks."""

    weights: Tensors
    """Trained weights, named by `trainable_state`."""
    optimizer: Tensors
    """Optimizer state, named by `optimizer_state`."""
    averages: Tensors = field(default_factory=dict)
    """Moving averages, named by `TrainedEMA.tensors`; empty for a run that takes none."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that has been read, and checked to be this run's."""

    path: Path
    step: int
    guard: dict[str, Any]
    """The record of what recovery had changed of the run."""
    place: dict[str, Any]
    """The place where it was written, by `place.place_of`; empty if the checkpoint does not say."""
    state: SavedState
    """The tensors, in host memory and mapped from the files: copy what is to be changed."""


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def save_checkpoint(
    run_dir: Path,
    step: int,
    state: SavedState,
    identity: Identity,
    *,
    keep: int,
    best: Collection[int] = (),
    guard: Mapping[str, Any] | None = None,
    place: Mapping[str, Any] | None = None,
) -> Path:
    """Write the checkpoint of a step beside its place, sync it, rename it, then drop the oldest; return its folder.

    `guard` is what recovery has changed of the run, `place` where it runs; `best` are steps that stay whatever
    `keep` says. Raises `DitLoraError` if it cannot be written, or if a value is not finite; earlier checkpoints
    are as they were.
    """
    final = checkpoint_path(run_dir, step)
    # The same step of the same trajectory has the same bits; another's checkpoints were removed.
    if is_whole(final):
        return final
    # Here and not at the caller: nothing that is not finite may become the newest checkpoint, whoever saves.
    _require_finite(run_dir, step, {**state.weights, **state.optimizer, **state.averages})
    staged = final.with_name(f".{final.name}.partial")
    about = {"step": step, "identity": dict(identity), "guard": dict(guard or {})}
    contents: dict[str, bytes | Tensors] = {
        _WEIGHTS: state.weights,
        _OPTIMIZER: state.optimizer,
        **({_EMA: state.averages} if state.averages else {}),
        _STATE: json.dumps(about | {"place": dict(place or {})}, indent=2, sort_keys=True).encode(),
    }
    try:
        # Left by a killed process; this one holds the run's lock, so nobody else is writing there.
        _clear_leftovers(final.parent)
        staged.mkdir(parents=True)
        for name, data in contents.items():
            _write_synced(staged / name, data)
        share_weights(staged)
        # Read back from the files: a digest of what was meant would vouch for bytes that never arrived.
        digests = {name: _digest(staged / name) for name in contents}
        # The manifest comes last: a folder without it is torn, whatever else is in it.
        _write_synced(staged / MANIFEST, json.dumps({"sha256": digests}, indent=2).encode())
        if final.exists():
            _remove(final)  # torn: it has no manifest, or is not what the manifest says
        # The rename is atomic, but on the disk only with its folder: without the sync a power cut may undo it.
        staged.rename(final)
        _sync_folder(final.parent)
        # Only now that a newer one is safe.
        prune(run_dir, step, keep, best)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staged, ignore_errors=True)
        earlier = newest_checkpoint(run_dir)
        resort = f"the newest whole one is {earlier}" if earlier else "there is no earlier one"
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DitLoraError(
            f"cannot save the checkpoint of step {step} to {final}: {reason}; {resort}. "
            "Free space and continue with train.resume=auto"
        ) from error
    return final


def find_checkpoint(resume: str, run_dir: Path) -> Path | None:
    """Return the checkpoint that `train.resume` names; None for `none`, or for `auto` in a fresh folder.

    It is whole: its digests have been read, once, and those of newer ones that `auto` passes over.
    Raises `DitLoraError` if the one that is named is torn, or if `auto` finds none of several whole.
    """
    if resume == "none":
        return None
    if resume == "auto":
        newest = newest_checkpoint(run_dir)
        damaged = checkpoint_steps(run_dir)
        if newest is None and damaged:
            raise DitLoraError(
                listed(
                    "train.resume=auto: none of this run's checkpoints is whole; start afresh with "
                    "train.resume=none in another run.dir",
                    [f"{path} is torn or altered" for path in damaged.values()],
                )
            )
        return newest
    path = Path(resume)
    if not is_whole(path):
        newest = newest_checkpoint(run_dir)
        hint = f"the newest whole one is {newest}" if newest else f"{run_dir} has none"
        problem = "is torn or altered" if path.exists() else "does not exist"
        raise DitLoraError(f"train.resume: {resume} {problem}; {hint}")
    return path


def checkpoint_steps(run_dir: Path) -> dict[int, Path]:
    """Return every checkpoint of a run by its step, ascending, whole or torn; nothing is read."""
    matched = (
        (_NAME.fullmatch(path.name), path) for path in (run_dir / "checkpoints").glob("step_*")
    )
    return dict(sorted((int(match[1]), path) for match, path in matched if match))


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest whole checkpoint, or None; torn ones, left by a killed process, are passed over."""
    candidates = reversed(checkpoint_steps(run_dir).values())
    return next((path for path in candidates if is_whole(path)), None)


def load_checkpoint(
    path: Path, identity: Identity, place: Mapping[str, Any] | None = None
) -> Loaded:
    """Read a whole checkpoint and check that it is this run's; nothing is changed, nothing is collective.

    Raises what `require_same_recipe` does.
    """
    about = require_same_recipe(path, identity, place)
    averages = load_file(path / _EMA) if (path / _EMA).exists() else {}
    state = SavedState(load_file(path / _WEIGHTS), load_file(path / _OPTIMIZER), averages)
    return Loaded(path, about["step"], about["guard"], about.get("place", {}), state)


def require_same_recipe(
    path: Path, identity: Identity, place: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what a checkpoint says of itself; raise, listing every difference, if it is another recipe's.

    No weight is read. With `place`, where this run runs, the error says which train.accumulate restores the samples
    of a step.
    """
    about: dict[str, Any] = {**read_typed(path / _STATE, CheckpointState)}
    # Through JSON as the stored one went: a tuple would differ from the list that it became.
    stored, own = about["identity"], parse_json(json.dumps(dict(identity)))
    different = [
        f"{key}: {stored.get(key)!r} in the checkpoint, {own.get(key)!r} in the recipe"
        + samples_remedy(key, stored.get(key), place or {})
        + _steps_remedy(key, own, path)
        for key in sorted({*stored, *own})
        if stored.get(key) != own.get(key)
    ]
    if different:
        raise DitLoraError(
            listed(
                f"train.resume: {path} belongs to another recipe; restore these values, or start afresh "
                "with train.resume=none in another run.dir",
                different,
            )
        )
    return about


def _steps_remedy(key: str, own: Mapping[str, Any], path: Path) -> str:
    """Return how to train on after the end of a schedule, which the number of steps decides."""
    # Only LoRAs of diffusion models start from a file.
    if (
        key != "train.steps"
        or own.get("train.mode") != "lora"
        or own.get("model.family") in CHAT_FAMILIES
    ):
        return ""
    run = path.absolute().parents[1]
    return (
        " (the schedule ends there); for more steps after the end, "
        f"start a new run with lora.init={run} and another run.dir"
    )


def remove_checkpoints_after(run_dir: Path, step: int) -> list[Path]:
    """Delete the checkpoints of later steps, which another trajectory wrote, and name them."""
    later = [path for number, path in checkpoint_steps(run_dir).items() if number > step]
    for path in later:
        _remove(path)
    return later


def prune(run_dir: Path, step: int, keep: int, best: Collection[int] = ()) -> None:
    """Remove all but the `keep` newest checkpoints up to `step` and those of `best`; later ones stay."""
    # Later ones lie there after a resume from an earlier step.
    earlier = [number for number in checkpoint_steps(run_dir) if number <= step]
    for number in earlier[:-keep]:
        if number not in best:
            _remove(checkpoint_path(run_dir, number))


def is_whole(path: Path) -> bool:
    """Return true if every file is there with the digest that the manifest, written last, gives it."""
    try:
        digests = read_typed(path / MANIFEST, Manifest)["sha256"]
        return all(_digest(path / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, KeyError):
        return False


def _require_finite(run_dir: Path, step: int, tensors: Tensors) -> None:
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        earlier = newest_checkpoint(run_dir)
        error = DitLoraError(
            f"step {step} is not saved: {len(bad)} of {len(tensors)} tensors are not finite, {bad[0]} "
            f"first; {f'the newest whole checkpoint is {earlier}' if earlier else 'there is no earlier one'}"
        )
        error.exit_code = 3
        raise error


def _remove(path: Path) -> None:
    """Rename the folder, then delete its files: a kill in between leaves nothing that looks like a checkpoint."""
    # An unlink at a time could be stopped between two files.
    aside = path.rename(path.with_name(f".{path.name}.removed"))
    shutil.rmtree(aside)


def _clear_leftovers(folder: Path) -> None:
    for pattern in _ASIDE:
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)
    # Of best.json, by `write_whole`: this process may be writing its own at the moment.
    for half in folder.glob(".*.json.*.partial"):
        if not half.name.endswith(f".{os.getpid()}.partial"):
            half.unlink(missing_ok=True)


def _write_synced(path: Path, data: bytes | Tensors) -> None:
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        # safetensors takes no strided views.
        save_file({name: tensor.cpu().contiguous() for name, tensor in data.items()}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    # A rename is an entry of the folder: it lasts once the folder is synced.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
