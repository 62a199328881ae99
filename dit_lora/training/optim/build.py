"""Optimizers over parameter groups, learning rates as a function of the step, and gradient clipping."""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata, util
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dit_lora.config.optim import OptimConfig
from dit_lora.config.optimizers import (
    DEFAULT_OPTIMIZER,
    MIN_8BIT_SIZE,
    OPTIMIZERS,
    OptimizerRecord,
    collect_optimizer_names,
)
from dit_lora.errors import DitLoraError
from dit_lora.fuse.gradient_norms import NormFunction
from dit_lora.numerics.dtensors import get_local_tensor

ParameterGroups = Sequence[dict[str, Any]]


def require_optimizer(optim: OptimConfig, device: torch.device) -> None:
    """Raise `DitLoraError` if this machine cannot run `optim.name`, or if it does not take an option of the recipe.

    Called by recipes/lora.py before anything is encoded.
    """
    name, record = optim.name, OPTIMIZERS[optim.name]
    if record.extra is not None and util.find_spec(record.package) is None:
        raise DitLoraError(
            f"optim.name={name}: {record.package} is not installed; pip install 'dit-lora[{record.extra}]'"
        )
    # Paged optimizers move their state between GPU and host, which only CUDA offers.
    if record.unpaged_variant is not None and device.type != "cuda":
        raise DitLoraError(
            f"optim.name={name} needs a CUDA GPU, and this run is on {device.type}; use "
            f"optim.name={record.unpaged_variant}"
        )
    _select_options(optim)
    if record.is_native:
        _require_working_optimizer(optim, device)


def _require_working_optimizer(optim: OptimConfig, device: torch.device) -> None:
    """Take one optimizer step of a small tensor: bitsandbytes may have no code for this device or its CUDA version."""
    parameter = torch.nn.Parameter(torch.zeros(MIN_8BIT_SIZE, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        build_optimizer([{"params": [parameter], "lr": 1.0}], optim).step()
    # Raised by its native library, or because that is missing.
    except (RuntimeError, AttributeError) as error:
        package = OPTIMIZERS[optim.name].package
        reason = str(error).strip().partition("\n")[0]
        raise DitLoraError(
            f"optim.name={optim.name}: {package} {metadata.version(package)} cannot take a step on "
            f"{device.type}: {reason}; see `python -m {package}`, or use optim.name={DEFAULT_OPTIMIZER}"
        ) from error


def build_optimizer(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer `optim.name` over the groups of `parameter_groups`."""
    record = OPTIMIZERS[optim.name]
    # Some optimizers print a message if the weight decay is among their defaults.
    if record.decay_in_groups:
        groups = [{"weight_decay": optim.weight_decay, **group} for group in groups]
    options = _select_options(optim)
    optimizer: torch.optim.Optimizer = _import_class(record)(groups, **options, **record.class_kwargs)
    return optimizer


def _import_class(record: OptimizerRecord) -> Any:
    # `package.module:Class`, imported only if it is used.
    module, _, name = record.class_path.partition(":")
    return getattr(import_module(module), name)


def _select_options(optim: OptimConfig) -> dict[str, Any]:
    """Betas, eps and weight decay, as far as the optimizer's class takes them: Lion, for example, has no `eps`.

    Raises `DitLoraError` if the recipe has changed one that it does not take.
    """
    record = OPTIMIZERS[optim.name]
    options: dict[str, Any] = {"betas": optim.betas, "eps": optim.eps}
    if not record.decay_in_groups:
        options["weight_decay"] = optim.weight_decay
    parameters = inspect.signature(_import_class(record)).parameters
    has_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    supported = {name: value for name, value in options.items() if has_any_keyword or name in parameters}
    for name, value in options.items():
        if name not in supported and value != OptimConfig.model_fields[name].default:
            raise DitLoraError(f"optim.{name}={value}: {optim.name} has no {name}; remove it from the recipe")
    return supported


class LearningRateSchedule:
    """Learning rate schedules that depend only on the step, so that no state can be lost or corrupted.

    Args:
        optim: The peak rate and the schedule of each parameter group.
        steps: Number of steps of the run.
    """

    def __init__(self, optim: OptimConfig, steps: int) -> None:
        self._optim = optim
        self._steps = steps
        self._configs = optim.groups.get_configured_groups()

    def compute_rate(self, group: str, step: int) -> float:
        """The learning rate of a parameter group at `step`, counted from 1."""
        config = self._configs[group]
        optim = self._optim
        kind = config.schedule or optim.schedule
        warmup = optim.warmup_steps if config.warmup_steps is None else config.warmup_steps
        factor = compute_schedule_factor(kind, step, warmup=warmup, steps=self._steps, min_factor=optim.min_lr_rate)
        return config.lr * factor


def compute_schedule_factor(kind: str, step: int, *, warmup: int, steps: int, min_factor: float = 0.0) -> float:
    """Share of the peak learning rate at `step`, counted from 1; never zero at the first step.

    Warm-up rises as step / warmup. Then `constant` stays; `linear` and `cosine` fall from 1 towards `min_factor`,
    which they would reach one step after the last.
    """
    if step <= warmup:
        return step / warmup
    if kind == "constant":
        return 1.0
    # From 0 in the first step after warm-up to almost 1 in the last.
    progress = min(1.0, (step - 1 - warmup) / max(1, steps - warmup))
    # A line, or half a cosine wave, from 1 to 0.
    remaining = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_factor + (1.0 - min_factor) * remaining


def apply_schedule(
    groups: ParameterGroups, schedule: LearningRateSchedule, step: int, *, scale: float = 1.0
) -> dict[str, float]:
    """Set each parameter group's learning rate for this step.

    Returns the rates by group name, times Prodigy's estimate if it has one. `scale` multiplies all rates: a rollback
    may have lowered them.
    """
    # Names of group keys that multiply the rate, such as Prodigy's estimate.
    factors = collect_optimizer_names(lambda record: (record.lr_factor,) if record.lr_factor else ())
    rates = {}
    for group in groups:
        group["lr"] = schedule.compute_rate(group["name"], step) * scale
        scales = (group[name] for name in factors if name in group)
        rates[group["name"]] = group["lr"] * math.prod(scales, start=1.0)
    return rates


def compute_gradient_norms(
    groups: ParameterGroups, compute_norms: NormFunction | None = None
) -> dict[str, torch.Tensor]:
    """Gradient norm of each parameter group: fp64 scalars on the device, finite or zero exactly if all elements are.

    In fp32 squares overflow from 1.8e19 and vanish below 1e-23. `compute_norms` computes all in one pass if given and
    no gradient is sharded.
    """
    gradients = [[p.grad for p in group["params"] if p.grad is not None] for group in groups]
    # One flat list for a single pass; `groups_of` is each gradient's group index.
    flat = [gradient for group_gradients in gradients for gradient in group_gradients]
    names = [group["name"] for group in groups]
    if compute_norms is not None and flat and not any(isinstance(gradient, DTensor) for gradient in flat):
        groups_of = [index for index, group_gradients in enumerate(gradients) for _ in group_gradients]
        # `compute_norms` returns one value per group, (groups,).
        return dict(zip(names, compute_norms(flat, groups_of, len(names)).unbind(), strict=True))
    device = groups[0]["params"][0].device
    return {name: compute_total_norm(of_group, device) for name, of_group in zip(names, gradients, strict=True)}


def compute_total_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Norm over all gradients, an fp64 scalar; 0 without gradients, as for an unused vision encoder."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    if any(isinstance(gradient, DTensor) for gradient in gradients):
        # One by one: for sharded tensors torch 2.15 passes `_foreach_norm`'s dtype as a dimension.
        norms = [torch.linalg.vector_norm(gradient, 2, dtype=torch.float64) for gradient in gradients]
    else:
        norms = list(torch._foreach_norm(list(gradients), 2, dtype=torch.float64))
    total = torch.linalg.vector_norm(torch.stack(norms))
    # Sharded gradients (FSDP2) have a sharded norm.
    return (total.full_tensor() if isinstance(total, DTensor) else total).to(device)


def clip_gradients(
    groups: ParameterGroups,
    norms: Mapping[str, torch.Tensor],
    optim: OptimConfig,
    adaptive_bound: Callable[[str], float | None] = lambda group: None,
) -> torch.Tensor:
    """Clip the gradients; returns the norm over all groups before clipping.

    `adaptive_bound` may give a bound for a group's norm, which is applied first. Groups with their own clip are scaled
    separately; `optim.clip` bounds all the others together.
    """
    clipped_norms = dict(norms)
    for group in groups:
        bound = adaptive_bound(group["name"])
        if bound is not None:
            _scale_gradients([group], norms[group["name"]], bound)
            # Scaling leaves a norm as it was, or at the bound.
            clipped_norms[group["name"]] = norms[group["name"]].clamp(max=bound)
    clips = {name: group.clip for name, group in optim.groups.get_configured_groups().items()}
    # Groups without their own clip are clipped together.
    shared = [group for group in groups if clips[group["name"]] is None]
    for group in groups:
        clip = clips[group["name"]]
        if clip is not None:
            _scale_gradients([group], clipped_norms[group["name"]], clip)
    if shared and optim.clip is not None:
        _scale_gradients(shared, _combine_norms([clipped_norms[group["name"]] for group in shared]), optim.clip)
    return _combine_norms(list(norms.values()))


def _combine_norms(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack(norms))


def _scale_gradients(groups: ParameterGroups, norm: torch.Tensor, clip: float) -> None:
    """Scale like torch's `clip_grads_with_norm_`, which refuses a full norm for sharded gradients."""
    # 1e-6 as in PyTorch, against a division by zero. The clamp never scales up.
    factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    gradients = defaultdict(list)
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradients[parameter.grad.dtype].append(get_local_tensor(parameter.grad))
    # One launch for many gradients needs a factor of their dtype.
    for dtype, same_dtype in gradients.items():
        torch._foreach_mul_(same_dtype, factor.to(dtype))
