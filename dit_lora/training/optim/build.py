"""Optimizers over parameter groups, learning rates as a function of the step, and clipping."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata, util
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dit_lora.config.optim import OptimConfig
from dit_lora.config.optimizers import DEFAULT, OPTIMIZERS, SMALLEST_8BIT, of_all
from dit_lora.errors import DitLoraError
from dit_lora.fuse.gradient_norms import Norms
from dit_lora.numerics.dtensors import local

Groups = Sequence[dict[str, Any]]
Schedule = Callable[[str, int], float]
"""(group name, step counted from 1) to learning rate."""


def require_optimizer(optim: OptimConfig, device: torch.device) -> None:
    """Raise `DitLoraError` where this machine cannot run `optim.name`."""
    name, record = optim.name, OPTIMIZERS[optim.name]
    if record.extra is not None and util.find_spec(record.package) is None:
        raise DitLoraError(
            f"optim.name={name}: {record.package} is not installed; pip install 'dit-lora[{record.extra}]'"
        )
    if record.unpaged is not None and device.type != "cuda":
        raise DitLoraError(
            f"optim.name={name} pages memory between a CUDA GPU and the host, and this run is on "
            f"{device.type}; take optim.name={record.unpaged}"
        )
    if record.native:
        _require_native_step(optim, device)


def _require_native_step(optim: OptimConfig, device: torch.device) -> None:
    """Take one step of one tensor: bitsandbytes may have no code for this device, or for its CUDA version."""
    parameter = torch.nn.Parameter(torch.zeros(SMALLEST_8BIT, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        build_optimizer([{"params": [parameter], "lr": 1.0}], optim).step()
    except (RuntimeError, AttributeError) as error:  # of its native library, or of none
        package = OPTIMIZERS[optim.name].package
        reason = str(error).strip().partition("\n")[0]
        raise DitLoraError(
            f"optim.name={optim.name}: {package} {metadata.version(package)} cannot take a step on {device.type}: "
            f"{reason}; `python -m {package}` says more, and optim.name={DEFAULT} does without it"
        ) from error


def build_optimizer(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer that `optim.name` names, over the groups of `parameter_groups`."""
    record = OPTIMIZERS[optim.name]
    arguments: dict[str, Any] = {"betas": optim.betas, "eps": optim.eps, **record.arguments}
    if record.decay_in_groups:
        groups = [{"weight_decay": optim.weight_decay, **group} for group in groups]
    else:
        arguments["weight_decay"] = optim.weight_decay
    module, _, name = record.target.partition(":")
    optimizer: torch.optim.Optimizer = getattr(import_module(module), name)(groups, **arguments)
    return optimizer


def build_schedule(optim: OptimConfig, steps: int) -> Schedule:
    """Learning rates that depend on the step alone, so that there is no state to save or to poison."""
    configs = optim.groups.given()

    def learning_rate(group: str, step: int) -> float:
        config = configs[group]
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
    """Set each group's learning rate for this step and return them by name; of Prodigy, times its estimate."""
    factors = of_all(lambda record: (record.rate_factor,) if record.rate_factor else ())
    rates = {}
    for group in groups:
        group["lr"] = schedule(group["name"], step)
        scales = (group[name] for name in factors if name in group)
        rates[group["name"]] = group["lr"] * math.prod(scales, start=1.0)
    return rates


def gradient_norms(groups: Groups, norms: Norms | None = None) -> dict[str, torch.Tensor]:
    """Return each group's gradient norm, fp64 scalars on the device: finite or zero exactly if all its elements are.

    In fp32 squares overflow from 1.8e19 and vanish below 1e-23. By `norms` in one pass where it is given and no
    gradient is sharded.
    """
    gradients = [[p.grad for p in group["params"] if p.grad is not None] for group in groups]
    flat = [gradient for own in gradients for gradient in own]
    names = [group["name"] for group in groups]
    if norms is not None and flat and not any(isinstance(one, DTensor) for one in flat):
        of = [index for index, own in enumerate(gradients) for _ in own]
        return dict(zip(names, norms(flat, of, len(names)).unbind(), strict=True))
    device = groups[0]["params"][0].device
    return {name: total_norm(own, device) for name, own in zip(names, gradients, strict=True)}


def total_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the norm over all gradients, an fp64 scalar; 0 without gradients, as of an unused vision encoder."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        # One by one: for sharded tensors torch 2.15 takes `_foreach_norm`'s dtype for a dimension.
        norms = [torch.linalg.vector_norm(one, 2, dtype=torch.float64) for one in gradients]
    else:
        norms = list(torch._foreach_norm(list(gradients), 2, dtype=torch.float64))
    total = torch.linalg.vector_norm(torch.stack(norms))
    # Sharded gradients (FSDP2) have a sharded norm.
    return (total.full_tensor() if isinstance(total, DTensor) else total).to(device)


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
    """Scale as torch's `clip_grads_with_norm_` does, which refuses a whole norm over sharded gradients."""
    factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    gradients = defaultdict(list)
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradients[parameter.grad.dtype].append(local(parameter.grad))
    # One launch for many gradients, and not one for each, takes a factor of their dtype.
    for dtype, alike in gradients.items():
        torch._foreach_mul_(alike, factor.to(dtype))
