"""Notes where a run computes, and says what continuing elsewhere means for its values."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from dit_lora.training.session.session import Session

SAMPLES = "train.batch_size x accumulate x processes"
"""The name that a run's identity has for the samples of one optimizer step."""
_SPLIT = ("data_ranks", "train.accumulate", "train.batch_size")


def place_of(session: "Session") -> dict[str, Any]:
    """Return what may differ where a checkpoint is continued, and changes its values by rounding alone."""
    train, device = session.recipe.train, session.accelerator.device
    on_gpu = device.type == "cuda"
    return {
        "processes": session.accelerator.num_processes,
        "data_ranks": session.data_ranks,
        "train.batch_size": train.batch_size,
        "train.accumulate": train.accumulate,
        "sharding": _sharding(session),
        # By name: another model of GPU has other kernels, which round otherwise.
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "torch": torch.__version__,
    }


def moved(stored: Mapping[str, Any], own: Mapping[str, Any], *, dropout: bool) -> str | None:
    """Return one line that says what differs between two places and what that means; None if nothing does.

    `stored` may be empty, for a checkpoint that does not say; `dropout` says that the model draws any.
    """
    parts = []
    if any(stored.get(key, own[key]) != own[key] for key in _SPLIT):
        draws = "; dropout draws otherwise" if dropout else ""
        was, now = (
            " x ".join(str(place[key]) for key in _SPLIT) for place in ({**own, **stored}, own)
        )
        parts.append(
            f"processes x accumulate x batch_size were {was}, now {now}: the same samples in each step, "
            f"summed in another order{draws}"
        )
    if stored.get("sharding", own["sharding"]) != own["sharding"]:
        parts.append(
            f"sharding was {stored['sharding']}, now {own['sharding']}: sums in another order"
        )
    others = [key for key in ("device", "torch") if stored.get(key, own[key]) != own[key]]
    if others:
        was, now = (" ".join(str(place[key]) for key in others) for place in (stored, own))
        parts.append(
            f"{' and '.join(others)} was {was}, now {now}: other kernels, which round otherwise"
        )
    return "; ".join(parts) + "; equal within rounding, not bit for bit" if parts else None


def has_dropout(model: nn.Module) -> bool:
    """Return true if any module draws: adapters with `lora.dropout`, or the base model's own."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def samples_remedy(key: str, samples: Any, place: Mapping[str, Any]) -> str:
    """Return advice for a step of another number of samples: the train.accumulate that restores it, or the launch."""
    if key != SAMPLES or not place or not isinstance(samples, int):
        return ""
    processes, batch = place["data_ranks"], place["train.batch_size"]
    if samples % processes:
        launch = max(n for n in range(1, processes) if samples % n == 0)
        return f"; {processes} processes cannot share {samples} samples: launch {launch}"
    share = samples // processes
    # The largest micro-batch that is no larger than asked for: memory allows that one.
    fits = max(size for size in range(1, batch + 1) if share % size == 0)
    values = [f"train.batch_size={fits}"] * (fits != batch) + [f"train.accumulate={share // fits}"]
    return f"; on {processes} process(es), {' '.join(values)} restores it"


def _sharding(session: "Session") -> str:
    """Return the ways in which each process has only a part of the model or of a sample, `none` if it has all."""
    kinds = ["fsdp2"] * (session.sharding is not None)
    kinds += [f"zero{session.zero}"] * (session.zero is not None)
    degree = session.recipe.train.context_parallel
    kinds += [f"context_parallel={degree}"] * (degree > 1)
    return " x ".join(kinds) or "none"
