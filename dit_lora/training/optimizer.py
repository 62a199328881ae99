"""AdamW over parameter groups, learning rates as a function of the step, and clipping."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dit_lora.fuse.norms import Norms
from dit_lora.numerics.gate import local
from dit_lora.train_config import OptimConfig

Groups = Sequence[dict[str, Any]]
Schedule = Callable[[str, int], float]
"""(group name, step counted from 1) to learning rate."""


def build_optimizer(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW over the groups of `parameter_groups`."""
    return torch.optim.AdamW(
        groups, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True
    )


def build_schedule(optim: OptimConfig, steps: int) -> Schedule:
    """Learning rates that depend on the step alone, so that there is no state to save or to poison."""
    given = optim.groups.given()

    def learning_rate(group: str, step: int) -> float:
        config = given[group]
        kind = config.schedule or optim.schedule
        warmup = optim.warmup_steps if config.warmup_steps is None else config.warmup_steps
        factor = schedule_factor(kind, step, warmup=warmup, steps=steps, least=optim.min_lr_rate)
        return config.lr * factor

    return learning_rate


def schedule_factor(kind: str, step: int, *, warmup: int, steps: int, least: float = 0.0) -> float:
    """The share of the peak learning rate at a step counted from 1; the first step is never at zero.

    Warm-up rises as step / warmup. Then `constant` stays; `linear` and `cosine` fall from 1 towards
    `least`, which they would reach one step after the last.
    """
    if step <= warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - 1 - warmup) / max(1, steps - warmup))
    left = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return least + (1.0 - least) * left


def apply_schedule(groups: Groups, schedule: Schedule, step: int) -> dict[str, float]:
    """Set each group's learning rate for this step and return them by name."""
    rates = {}
    for group in groups:
        group["lr"] = rates[group["name"]] = schedule(group["name"], step)
    return rates


def gradient_norms(groups: Groups, norms: Norms | None = None) -> dict[str, torch.Tensor]:
    """Each group's gradient norm, fp32 scalars on the device; not finite if any element is not.

    By `norms` in one pass where it is given and no gradient is sharded.
    """
    gradients = [[p.grad for p in group["params"] if p.grad is not None] for group in groups]
    flat = [gradient for own in gradients for gradient in own]
    names = [group["name"] for group in groups]
    if norms is not None and flat and not any(isinstance(one, DTensor) for one in flat):
        of = [index for index, own in enumerate(gradients) for _ in own]
        return dict(zip(names, norms(flat, of, len(names)).unbind(), strict=True))
    totals = [torch.nn.utils.get_total_norm(own) for own in gradients]
    # Sharded gradients (FSDP2) have a sharded norm.
    whole = [total.full_tensor() if isinstance(total, DTensor) else total for total in totals]
    # The norm of no gradient at all, which a step of text has for the vision encoder, is on the CPU.
    device = groups[0]["params"][0].device
    return {name: total.float().to(device) for name, total in zip(names, whole, strict=True)}


def clip_gradients(
    groups: Groups,
    norms: Mapping[str, torch.Tensor],
    optim: OptimConfig,
    adaptive: Callable[[str], float | None] = lambda group: None,
) -> torch.Tensor:
    """Scale gradients to their clips and return the pre-clip norm over all groups.

    `adaptive` may give a bound for a group's norm, which comes first. Groups with a clip of their own are
    scaled alone; `optim.clip` bounds the others together.
    """
    left = dict(norms)
    for group in groups:
        bound = adaptive(group["name"])
        if bound is not None:
            _scale([group], norms[group["name"]], bound)
            left[group["name"]] = norms[group["name"]].clamp(max=bound)
    clips = {name: group.clip for name, group in optim.groups.given().items()}
    shared = [group for group in groups if clips[group["name"]] is None]
    for group in groups:
        own = clips[group["name"]]
        if own is not None:
            _scale([group], left[group["name"]], own)
    if shared and optim.clip is not None:
        _scale(shared, _joint([left[group["name"]] for group in shared]), optim.clip)
    return _joint(list(norms.values()))


def _joint(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(norms))


def _scale(groups: Groups, norm: torch.Tensor, clip: float) -> None:
    """As torch's `clip_grads_with_norm_`, which refuses a whole norm over sharded gradients."""
    factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    gradients = [local(p.grad) for group in groups for p in group["params"] if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)
