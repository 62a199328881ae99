"""Records the machine layout that a checkpoint was written on, and explains what continuing on another one changes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from dit_lora.training.session.session import Session

SAMPLES_PER_STEP_KEY = "train.batch_size x accumulate x processes"
"""Key of a run's identity for the number of samples per optimizer step."""
_BATCH_SPLIT_KEYS = ("data_ranks", "train.accumulate", "train.batch_size")


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
        dropout_note = "; dropout draws otherwise" if uses_dropout else ""
        stored_text, current_text = (
            " x ".join(str(topology[key]) for key in _BATCH_SPLIT_KEYS)
            for topology in ({**current, **stored}, current)
        )
        parts.append(
            f"processes x accumulate x batch_size were {stored_text}, now {current_text}: the same samples in each "
            f"step, summed in another order{dropout_note}"
        )
    if stored.get("sharding", current["sharding"]) != current["sharding"]:
        parts.append(f"sharding was {stored['sharding']}, now {current['sharding']}: sums in another order")
    changed_keys = [key for key in ("device", "torch") if stored.get(key, current[key]) != current[key]]
    if changed_keys:
        stored_text, current_text = (
            " ".join(str(topology[key]) for key in changed_keys) for topology in (stored, current)
        )
        parts.append(
            f"{' and '.join(changed_keys)} was {stored_text}, now {current_text}: other kernels, which round otherwise"
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
