"""Writes checkpoints to a staging folder with digests, renames it once, and reads them on any number of ranks.

A checkpoint holds the trained weights, the optimizer state, the weights' averages and the step, unsharded: it is
independent of the number of ranks. Nothing else has state: random numbers, data order and learning rates are functions
of the step. It never holds the frozen base. The launch that wrote it is recorded, so that a resume on another machine
layout can say what differs.

Its folder also has the adapter of that step, in the form of the run's result. Pruning deletes the state and leaves the
adapter. The state does not depend on the adapter's files, which users may move.
"""

import difflib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.adapters.lora_file import AVERAGES_FILE, STATE_FILE, WEIGHTS_FILE
from dit_lora.adapters.marked_save import read_best_marked_step
from dit_lora.config.records import CheckpointState, Manifest, read_typed_json
from dit_lora.environment.safetensors_files import read_tensors
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families import CHAT_FAMILIES
from dit_lora.files import compute_sha256, fsync_folder, set_shared_permissions
from dit_lora.parsing import parse_json

if TYPE_CHECKING:
    from dit_lora.training.session.session import Session

# The other files have their names in `adapters.lora_file`, which also reads a checkpoint as a LoRA to start from.
MANIFEST = "manifest.json"
_OPTIMIZER_FILE = "optimizer.safetensors"
# A checkpoint's folder, with at least six digits as `checkpoint_path` writes them.
_FOLDER_PATTERN = re.compile(r"step_(\d{6,})")
_LEFTOVER_PATTERNS = (".step_*.partial", ".step_*.removed")
"""Patterns of the folders that a killed process leaves behind while writing or removing a checkpoint."""
SAMPLES_PER_STEP_KEY = "train.batch_size x accumulate x processes"
"""Key of a run's identity for the number of samples per optimizer step."""
VALIDATION_DATA_KEY = "validation.data (digest of clips, captions and shape)"
"""Key of a run's identity for the samples that are not trained on; absent without `validation.data`."""
VALIDATION_CONVERSATIONS_KEY = "validation.conversations (digest of texts, times and media headers)"
"""The same of a chat model; absent without `validation.conversations`."""
_BATCH_SPLIT_KEYS = ("data_ranks", "train.accumulate", "train.batch_size")

TrajectoryConfig = Mapping[str, Any]
"""Everything that determines a run's training trajectory; flat, with names as in the recipe."""
Tensors = Mapping[str, torch.Tensor]
AdapterFunction = Callable[[Path, Tensors], None]
"""Writes the adapter of a step to a folder, from all trained weights or their averages."""


@dataclass(frozen=True)
class SavedState:
    """Everything that training changes, as unsharded tensors by name: the content of a checkpoint."""

    weights: Tensors
    """Trained weights, named by `get_trainable_parameters`."""
    optimizer: Tensors
    """Optimizer state, named by `optimizer_state`."""
    averages: Tensors = field(default_factory=dict)
    """Moving averages, named by `TrainedEMA.named_averages`; empty for a run without an EMA."""

    @property
    def result_weights(self) -> Tensors:
        """The weights that a run validates and saves as its result: the averages if it keeps an EMA."""
        return {**self.weights, **{name.removeprefix("ema/"): average for name, average in self.averages.items()}}


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was read and checked to belong to this run."""

    path: Path
    step: int
    guard_state: dict[str, Any]
    """The recovery state of the guard, such as lowered learning rates. The quarantine has its own file in the run."""
    launch_topology: dict[str, Any]
    """The `describe_launch_topology` of the launch that wrote it; empty if it was not recorded."""
    state: SavedState
    """The tensors, in host memory and mapped from the files: copy them before changing them."""


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def save_checkpoint(
    run_dir: Path,
    step: int,
    state: SavedState,
    trajectory_config: TrajectoryConfig,
    *,
    keep: int,
    best_steps: Collection[int] = (),
    keep_adapters: int | None = None,
    guard_state: Mapping[str, Any] | None = None,
    launch_topology: Mapping[str, Any] | None = None,
    write_adapter: AdapterFunction | None = None,
) -> Path:
    """Write a step's checkpoint to a staging folder, sync it, rename it, and prune old ones; returns its folder.

    Args:
        run_dir: The run's folder.
        step: The step that the state belongs to.
        state: Unsharded tensors.
        trajectory_config: Compared when the checkpoint is resumed.
        keep: Number of newest checkpoints to keep.
        best_steps: Steps that are kept in addition.
        keep_adapters: Number of adapters of pruned checkpoints to keep; None for all.
        guard_state: The guard's recovery state.
        launch_topology: The launch that writes it (`describe_launch_topology`).
        write_adapter: Writes the step's adapter into the checkpoint's folder; None for no adapter.

    Raises:
        DitLoraError: It cannot be written, or a value is not finite. Earlier checkpoints are unchanged.
    """
    final = checkpoint_path(run_dir, step)
    # The same step of the same trajectory has the same bits; checkpoints of others were removed.
    if is_complete_checkpoint(final):
        return final
    # Here and not in the caller: no caller may make a non-finite state the newest checkpoint.
    _require_finite(run_dir, step, {**state.weights, **state.optimizer, **state.averages})
    staged = final.with_name(f".{final.name}.partial")
    metadata = {"step": step, "identity": dict(trajectory_config), "guard": dict(guard_state or {})}
    contents: dict[str, bytes | Tensors] = {
        WEIGHTS_FILE: state.weights,
        _OPTIMIZER_FILE: state.optimizer,
        **({AVERAGES_FILE: state.averages} if state.averages else {}),
        STATE_FILE: json.dumps(metadata | {"place": dict(launch_topology or {})}, indent=2, sort_keys=True).encode(),
    }
    try:
        # Left by a killed process. This process holds the run's lock, so nobody else is writing there.
        _delete_partial_files(final.parent)
        staged.mkdir(parents=True)
        for name, data in contents.items():
            _write_synced(staged / name, data)
        if write_adapter is not None:
            write_adapter(staged, state.result_weights)
            for path in set(staged.iterdir()) - {staged / name for name in contents}:
                _sync_file(path)
        set_shared_permissions(staged)
        # Read back from the files: a digest of the tensors in memory would vouch for bytes that never arrived.
        digests = {name: compute_sha256(staged / name) for name in contents}
        # The manifest comes last: a folder without it is torn, whatever else is in it.
        _write_synced(staged / MANIFEST, json.dumps({"sha256": digests}, indent=2).encode())
        if final.exists():
            # Torn: it has no manifest, or its files do not match it.
            _remove_checkpoint(final)
        # The rename is atomic, but on the disk only with its folder: without the sync a power cut may undo it.
        staged.rename(final)
        fsync_folder(final.parent)
        # Only now: the newer checkpoint is safe.
        prune_checkpoints(run_dir, step, keep, best_steps, keep_adapters)
    except (OSError, SafetensorError) as error:
        # A half-written folder would keep the space that the disk may lack.
        shutil.rmtree(staged, ignore_errors=True)
        earlier = find_newest_checkpoint(run_dir)
        resort = f"the newest complete one is {earlier}" if earlier else "there is no earlier one"
        # `strerror` leaves out the path, which the message names itself.
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise DitLoraError(
            f"cannot save the checkpoint of step {step} to {final}: {reason}; {resort}. "
            "Free space and continue with train.resume=auto"
        ) from error
    return final


def find_checkpoint(resume: str, run_dir: Path) -> Path | None:
    """Find the checkpoint that `train.resume` names; None for `none`, or for `auto` in a fresh folder.

    It is complete: its digests were verified once, and so were those of newer ones that `auto` skips. Raises
    `DitLoraError` if the named checkpoint is torn, or if `auto` finds only torn ones.
    """
    if resume == "none":
        return None
    if resume == "auto":
        newest = find_newest_checkpoint(run_dir)
        damaged = list_checkpoints(run_dir)
        # Starting from step 0 in this folder would overwrite what a repair could still read.
        if newest is None and damaged:
            summary = (
                "train.resume=auto: this run has no complete checkpoint; start again with train.resume=none in "
                "another run.dir"
            )
            raise DitLoraError(format_list(summary, [f"{path} is incomplete or altered" for path in damaged.values()]))
        return newest
    path = Path(resume)
    if not is_complete_checkpoint(path):
        newest = find_newest_checkpoint(run_dir)
        hint = f"the newest complete one is {newest}" if newest else f"{run_dir} has none"
        # The most specific reason is last.
        problem = "is incomplete or altered" if path.exists() else "does not exist"
        if path.exists() and not (path.is_dir() and any(path.iterdir())):
            problem = "is not the folder of a checkpoint"
        if _is_adapter_only_checkpoint(path):
            problem = f"has only the adapter, which a new run can start from (lora.init={path})"
        raise DitLoraError(f"train.resume: {resume} {problem}; {hint}")
    return path


def describe_similar_run(resume: str, run_dir: Path) -> str | None:
    """A warning if `train.resume: auto` starts a new run, but a run of nearly the same name has checkpoints.

    Call it before the run's folder is created.
    """
    if resume != "auto" or run_dir.exists() or not run_dir.parent.is_dir():
        return None
    # Names that differ only in a number, such as seed_1 and seed_2, are no typing errors.
    stem = re.sub(r"\d+", "", run_dir.name)
    names = [path.name for path in run_dir.parent.iterdir() if re.sub(r"\d+", "", path.name) != stem]
    for name in difflib.get_close_matches(run_dir.name, names, cutoff=0.75):
        similar = run_dir.with_name(name)
        # A run of both experts has its checkpoints in two folders.
        if any(similar.glob("checkpoints/step_*")) or any(similar.glob("*/checkpoints/step_*")):
            return (
                f"train.resume=auto: {run_dir} does not exist, so training starts from step 0; {similar} has "
                f"checkpoints: to continue it, set run.dir={similar}"
            )
    return None


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Every checkpoint of a run by step, ascending, complete or torn; reads no file."""
    return {step: path for step, path in _list_saved_steps(run_dir).items() if not _is_adapter_only_checkpoint(path)}


def _list_saved_steps(run_dir: Path) -> dict[int, Path]:
    """The folders of all saved steps, ascending, with those that only have an adapter."""
    matched = ((_FOLDER_PATTERN.fullmatch(path.name), path) for path in (run_dir / "checkpoints").glob("step_*"))
    return dict(sorted((int(match[1]), path) for match, path in matched if match))


def find_newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None. Skips torn ones, which a killed process leaves behind."""
    # Newest first: an older checkpoint is read only if all newer ones are torn.
    candidates = reversed(list_checkpoints(run_dir).values())
    return next((path for path in candidates if is_complete_checkpoint(path)), None)


def load_checkpoint(
    path: Path, trajectory_config: TrajectoryConfig, launch_topology: Mapping[str, Any] | None = None
) -> LoadedCheckpoint:
    """Read a complete checkpoint after checking that it belongs to this run. Not collective; changes nothing.

    Raises the errors of `require_same_recipe`, and `UnreadableFileError` for a file of tensors that cannot be read.
    """
    metadata = require_same_recipe(path, trajectory_config, launch_topology)
    # Runs without an EMA write no such file.
    averages = read_tensors(path / AVERAGES_FILE, missing_ok=True)
    state = SavedState(read_tensors(path / WEIGHTS_FILE), read_tensors(path / _OPTIMIZER_FILE), averages)
    return LoadedCheckpoint(path, metadata["step"], metadata["guard"], metadata.get("place", {}), state)


def require_same_recipe(
    path: Path, trajectory_config: TrajectoryConfig, launch_topology: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read a checkpoint's metadata; raises `DitLoraError`, listing every difference, if it belongs to another recipe.

    Reads no weights. With `launch_topology`, the present launch, the error names the train.accumulate that restores
    the samples per step.
    """
    metadata: dict[str, Any] = {**read_typed_json(path / STATE_FILE, CheckpointState)}
    # Through JSON like the stored identity: a tuple would differ from the list that it became.
    stored, current = metadata["identity"], parse_json(json.dumps(dict(trajectory_config)))
    # Listed in full: a user should fix all differences in one go.
    keys = {*stored, *current}
    # Validation data may be added and removed; only losses of changed data cannot be compared.
    keys -= {VALIDATION_DATA_KEY, VALIDATION_CONVERSATIONS_KEY} - (stored.keys() & current.keys())
    different = [
        f"{key}: {stored.get(key)!r} in the checkpoint, {current.get(key)!r} in the recipe"
        + advise_on_samples_per_step(key, stored.get(key), launch_topology or {})
        + _advise_on_steps(key, current, path)
        for key in sorted(keys)
        if stored.get(key) != current.get(key)
    ]
    if different:
        summary = (
            f"train.resume: {path} belongs to another recipe; restore these values, or start again with "
            "train.resume=none in another run.dir"
        )
        raise DitLoraError(format_list(summary, different))
    return metadata


def _advise_on_steps(key: str, current: Mapping[str, Any], path: Path) -> str:
    """Advice on training past the end of a schedule, which depends on the number of steps."""
    # Only LoRAs of diffusion models start from a file.
    if key != "train.steps" or current.get("train.mode") != "lora" or current.get("model.family") in CHAT_FAMILIES:
        return ""
    # The path is RUN/checkpoints/step_NNNNNN.
    run = path.absolute().parents[1]
    return (
        " (the schedule ends there); for more steps after the end, "
        f"start a new run with lora.init={run} and another run.dir"
    )


def remove_checkpoints_after(run_dir: Path, step: int) -> list[Path]:
    """Delete checkpoints of steps after the one that a run resumes from; returns the deleted folders."""
    later = [path for number, path in _list_saved_steps(run_dir).items() if number > step]
    for path in later:
        _remove_checkpoint(path)
    return later


def prune_checkpoints(
    run_dir: Path, step: int, keep: int, best_steps: Collection[int] = (), keep_adapters: int | None = None
) -> None:
    """Remove old checkpoints up to `step`; their adapters stay.

    The `keep` newest, those of `best_steps` and the one that a user has marked stay complete, and so do later
    checkpoints. Of the others, the `keep_adapters` newest adapters stay; all if it is None.
    """
    marked_step = read_best_marked_step(run_dir)
    # Later ones exist after a resume from an earlier step.
    earlier = [number for number in list_checkpoints(run_dir) if number <= step]
    # In ascending order, so these are all but the `keep` newest.
    for number in earlier[:-keep]:
        if number not in best_steps and number != marked_step:
            _delete_state(checkpoint_path(run_dir, number))
    if keep_adapters is None:
        return
    saved_steps = _list_saved_steps(run_dir).items()
    adapters = [
        path
        for number, path in saved_steps
        if number <= step and number != marked_step and _is_adapter_only_checkpoint(path)
    ]
    for path in adapters[: max(0, len(adapters) - keep_adapters)]:
        _remove_checkpoint(path)


def is_complete_checkpoint(path: Path) -> bool:
    """True if a checkpoint is complete: every file exists with the digest in the manifest, which is written last."""
    try:
        digests = read_typed_json(path / MANIFEST, Manifest)["sha256"]
        return all(compute_sha256(path / name) == digest for name, digest in digests.items())
    # A file is missing, or the manifest is damaged.
    except (OSError, ValueError, KeyError):
        return False


def _require_finite(run_dir: Path, step: int, tensors: Tensors) -> None:
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        earlier = find_newest_checkpoint(run_dir)
        error = DitLoraError(
            f"step {step} is not saved: {len(bad)} of {len(tensors)} tensors are not finite, {bad[0]} first; "
            f"{f'the newest complete checkpoint is {earlier}' if earlier else 'there is no earlier one'}"
        )
        # The exit code of a stop by the guard.
        error.exit_code = 3
        raise error


def _remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint: rename the folder, then delete its files.

    A kill in between leaves nothing that looks like a checkpoint.
    """
    # Deleting file by file could be stopped half-way, and would leave a damaged checkpoint.
    aside = path.rename(path.with_name(f".{path.name}.removed"))
    shutil.rmtree(aside)


def _has_adapter(path: Path) -> bool:
    return any((path / name).is_file() for name in (ADAPTER_FILE, SAFETENSORS_WEIGHTS_NAME))


def _is_adapter_only_checkpoint(path: Path) -> bool:
    """True if a step's folder has no state but an adapter. Without an adapter it counts as a torn checkpoint."""
    return _has_adapter(path) and not any((path / name).exists() for name in (MANIFEST, STATE_FILE))


def _delete_state(path: Path) -> None:
    """Delete the state of a checkpoint. Without an adapter, or with trained base weights, delete the whole folder.

    A kill in between leaves a torn checkpoint, which the next call finishes.
    """
    # Base weights may be as large as the model: they are no small file that can stay for every step.
    if not _has_adapter(path) or (path / BASE_FILE).exists():
        _remove_checkpoint(path)
        return
    # The manifest goes first, so that the rest is never taken for a checkpoint; state.json goes last, so that the
    # folder is listed as one until everything is deleted.
    for name in (MANIFEST, _OPTIMIZER_FILE, AVERAGES_FILE, WEIGHTS_FILE, STATE_FILE):
        (path / name).unlink(missing_ok=True)


def _delete_partial_files(folder: Path) -> None:
    for pattern in _LEFTOVER_PATTERNS:
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)
    # Half-written best.json files of `write_atomically`; this process may be writing its own right now.
    for half in folder.glob(".*.json.*.partial"):
        if not half.name.endswith(f".{os.getpid()}.partial"):
            half.unlink(missing_ok=True)


def _write_synced(path: Path, data: bytes | Tensors) -> None:
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        # safetensors refuses strided views.
        save_file({name: tensor.cpu().contiguous() for name, tensor in data.items()}, path)
    _sync_file(path)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def describe_launch_topology(session: "Session") -> dict[str, Any]:
    """Properties of a launch that may differ when a checkpoint is continued; they change values only by rounding."""
    train, device = session.recipe.train, session.accelerator.device
    on_gpu = device.type == "cuda"
    # How the model or a sample is split over processes; each entry is listed only if it applies.
    kinds = ["fsdp2"] * (session.sharding is not None)
    kinds += [f"zero{session.zero_stage}"] * (session.zero_stage is not None)
    kinds += [f"context_parallel={train.context_parallel}"] * (train.context_parallel > 1)
    return {
        "processes": session.accelerator.num_processes,
        "data_ranks": session.num_data_ranks,
        "train.batch_size": train.batch_size,
        "train.accumulate": train.accumulate,
        "sharding": " x ".join(kinds) or "none",
        # By name: another GPU model has other kernels, which round differently.
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "torch": torch.__version__,
    }


def describe_topology_change(
    stored: Mapping[str, Any], current: Mapping[str, Any], *, uses_dropout: bool
) -> str | None:
    """One line on how two launches differ and what that means for the values; None if they are equal.

    `stored` may be empty, for a checkpoint without this record. `uses_dropout`: the model uses dropout.
    """
    parts = []
    # A missing key counts as equal: checkpoints from before it was recorded.
    if any(stored.get(key, current[key]) != current[key] for key in _BATCH_SPLIT_KEYS):
        # Dropout is seeded by micro-step and rank, which another split assigns to other samples.
        dropout_note = "; dropout masks differ" if uses_dropout else ""
        stored_text, current_text = (
            " x ".join(str(topology[key]) for key in _BATCH_SPLIT_KEYS)
            for topology in ({**current, **stored}, current)
        )
        parts.append(
            f"processes x accumulate x batch_size were {stored_text}, now {current_text}: the same samples in each "
            f"step, summed in another order{dropout_note}"
        )
    if stored.get("sharding", current["sharding"]) != current["sharding"]:
        parts.append(f"sharding was {stored['sharding']}, now {current['sharding']}: summed in another order")
    changed_keys = [key for key in ("device", "torch") if stored.get(key, current[key]) != current[key]]
    if changed_keys:
        stored_text, current_text = (
            " ".join(str(topology[key]) for key in changed_keys) for topology in (stored, current)
        )
        parts.append(
            f"{' and '.join(changed_keys)} was {stored_text}, now {current_text}: other kernels, which round "
            "differently"
        )
    return "; ".join(parts) + "; equal within rounding, not bit for bit" if parts else None


def has_dropout(model: nn.Module) -> bool:
    """True if any module has dropout: adapters with `lora.dropout`, or layers of the base model."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def advise_on_samples_per_step(key: str, num_samples: Any, launch_topology: Mapping[str, Any]) -> str:
    """Advice for a resume with other samples per step: the train.accumulate that restores them, or the launch."""
    if key != SAMPLES_PER_STEP_KEY or not launch_topology or not isinstance(num_samples, int):
        return ""
    processes, batch = launch_topology["data_ranks"], launch_topology["train.batch_size"]
    # The largest number of processes that can share the samples evenly.
    if num_samples % processes:
        launch = max(n for n in range(1, processes) if num_samples % n == 0)
        return f"; {processes} processes cannot share {num_samples} samples: launch {launch}"
    share = num_samples // processes
    # The largest micro-batch up to the requested size, which is known to fit into memory.
    fits = max(size for size in range(1, batch + 1) if share % size == 0)
    values = [f"train.batch_size={fits}"] * (fits != batch) + [f"train.accumulate={share // fits}"]
    noun = "process" if processes == 1 else "processes"
    return f"; on {processes} {noun}, {' '.join(values)} restores it"
