"""Checkpoints: written aside with digests, renamed once, resumed bit for bit.

A checkpoint holds the trainable parameters, the optimizer's state and the step. Nothing else has state: random
draws, data order and learning rates are functions of the step. It never holds the frozen base.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn

from dit_lora.errors import DitLoraError, listed
from dit_lora.training.optimizer_state import load_optimizer_state, optimizer_state

MANIFEST = "manifest.json"
_WEIGHTS, _OPTIMIZER, _STATE = "trainable.safetensors", "optimizer.safetensors", "state.json"
_EMA = "ema.safetensors"

Identity = Mapping[str, Any]
"""What makes a run this run and no other; flat, names as in the recipe."""


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def save_checkpoint(
    run_dir: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Identity,
    *,
    keep: int,
    guard: Mapping[str, Any] | None = None,
    ema: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write the checkpoint of a step beside its place, sync it, rename it, then drop the oldest.

    `guard` is what recovery has changed of the run, `ema` the averages of the weights. Raises `DitLoraError` if it cannot be written, or if a
    value is not finite; earlier checkpoints are as they were.
    """
    final = checkpoint_path(run_dir, step)
    if is_whole(final):
        return final
    weights, moments = trainable_state(model), optimizer_state(optimizer)
    averages = dict(ema or {})
    _require_finite(run_dir, step, {**weights, **moments, **averages})
    staged = final.with_name(f".{final.name}.partial")
    state = {"step": step, "identity": dict(identity), "guard": dict(guard or {})}
    try:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        contents = {
            _WEIGHTS: save(_cpu(weights)),
            _OPTIMIZER: save(_cpu(moments)),
            **({_EMA: save(_cpu(averages))} if averages else {}),
            _STATE: json.dumps(state, indent=2, sort_keys=True).encode(),
        }
        for name, data in contents.items():
            _write_synced(staged / name, data)
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        _write_synced(staged / MANIFEST, json.dumps({"sha256": digests}, indent=2).encode())
        if final.exists():
            shutil.rmtree(final)  # torn: it has no manifest, or is not what the manifest says
        staged.rename(final)
        _sync_folder(final.parent)
        _prune(final, keep)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        kept = newest_checkpoint(run_dir)
        resort = f"the newest whole one is {kept}" if kept else "there is no earlier one"
        raise DitLoraError(
            f"cannot save the checkpoint of step {step} to {final}: {error.strerror or error}; {resort}. "
            "Free space and continue with train.resume=auto"
        ) from error
    return final


def find_checkpoint(resume: str, run_dir: Path) -> Path | None:
    """The checkpoint that `train.resume` names; None for `none`, or for `auto` in a fresh folder."""
    if resume == "none":
        return None
    if resume == "auto":
        found = newest_checkpoint(run_dir)
        damaged = damaged_checkpoints(run_dir)
        if found is None and damaged:
            raise DitLoraError(
                listed(
                    "train.resume=auto: none of this run's checkpoints is whole; start afresh with "
                    "train.resume=none in another run.dir",
                    [f"{path} is torn or altered" for path in damaged],
                )
            )
        return found
    path = Path(resume)
    if not is_whole(path):
        found = newest_checkpoint(run_dir)
        hint = f"the newest whole one is {found}" if found else f"{run_dir} has none"
        problem = "is torn or altered" if path.exists() else "does not exist"
        raise DitLoraError(f"train.resume: {resume} {problem}; {hint}")
    return path


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole checkpoint; torn ones, left by a killed process, are passed over."""
    candidates = sorted((run_dir / "checkpoints").glob("step_*"), reverse=True)
    return next((path for path in candidates if is_whole(path)), None)


def damaged_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoints whose files are not what their manifest says; a resumed run passes them over."""
    return [p for p in sorted((run_dir / "checkpoints").glob("step_*")) if not is_whole(p)]


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Identity,
    ema: Mapping[str, torch.Tensor] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Restore weights, averages and optimizer bit for bit; returns the step and the guard's state.

    Raises if the checkpoint is another recipe's, listing every difference.
    """
    state = json.loads((path / _STATE).read_text(encoding="utf-8"))
    _require_same(path, state["identity"], json.loads(json.dumps(dict(identity))))
    own = trainable_state(model)
    stored = load((path / _WEIGHTS).read_bytes())
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in stored.items()}:
        raise DitLoraError(f"{path}: its trainable parameters are not this model's")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])
        if ema:
            averages = load((path / _EMA).read_bytes())
            for name, tensor in ema.items():
                tensor.copy_(averages[name])
    load_optimizer_state(optimizer, load((path / _OPTIMIZER).read_bytes()))
    return state["step"], state["guard"]


def trainable_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trainable parameters by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def remove_checkpoints_after(run_dir: Path, step: int) -> list[Path]:
    """Delete the checkpoints of later steps, which another trajectory wrote, and name them."""
    later = [
        p for p in (run_dir / "checkpoints").glob("step_*") if p > checkpoint_path(run_dir, step)
    ]
    for path in later:
        shutil.rmtree(path)
    return later


def _require_same(path: Path, stored: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    different = [
        f"{key}: {stored.get(key)!r} in the checkpoint, {own.get(key)!r} in the recipe"
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


def is_whole(path: Path) -> bool:
    """Whether every file is there with the digest that the manifest, written last, gives it."""
    try:
        digests = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["sha256"]
        return all(
            hashlib.sha256((path / name).read_bytes()).hexdigest() == digest
            for name, digest in digests.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _require_finite(run_dir: Path, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        kept = newest_checkpoint(run_dir)
        error = DitLoraError(
            f"step {step} is not saved: {len(bad)} of {len(tensors)} tensors are not finite, {bad[0]} "
            f"first; {f'the newest whole checkpoint is {kept}' if kept else 'there is no earlier one'}"
        )
        error.exit_code = 3
        raise error


def _prune(saved: Path, keep: int) -> None:
    """Keep the checkpoint just saved and the `keep - 1` before it; later ones are not its business."""
    earlier = [path for path in saved.parent.glob("step_*") if path.name < saved.name]
    for old in sorted(earlier, reverse=True)[keep - 1 :]:
        shutil.rmtree(old)


def _cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
