"""Reads the launcher's environment variables: who started this process, and what this code must do itself."""

import importlib.util
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from dit_lora.config.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS
from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError, format_list

_ACCELERATE_VARIABLE = "ACCELERATE_DYNAMO_MODE"
"""A variable that `accelerate launch` always sets, and nothing else does."""


def find_accelerate_launcher_pid(environment: Mapping[str, str]) -> int | None:
    """Process id of the `accelerate launch` that started this process.

    None if something else did: any other parent may end without ending the run.
    """
    return os.getppid() if _ACCELERATE_VARIABLE in environment else None


def is_single_process_launch(environment: Mapping[str, str], num_gpus: int) -> bool:
    """True if `accelerate launch` was asked for several processes but started one, on a machine with `num_gpus`.

    For several processes it sets their rendezvous address, but not their number (simple_launcher in
    accelerate/commands/launch.py). With --cpu it always sets the address on a machine with several GPUs.
    """
    by_accelerate = _ACCELERATE_VARIABLE in environment
    # A rendezvous address without a world size: several processes were requested, one was started.
    meets = environment.get("MASTER_ADDR") == "127.0.0.1" and "WORLD_SIZE" not in environment
    # With --cpu the address is always set on such a machine, so it says nothing.
    by_default = num_gpus > 1 and _is_true(environment.get("ACCELERATE_USE_CPU", ""))
    return by_accelerate and meets and not by_default


@dataclass(frozen=True)
class FsdpSettings:
    """Settings of a launch on how weights are sharded over ranks (FSDP2)."""

    reshard_after_forward: bool = True
    """True if a block's weights are released between its forward and its backward pass."""


def pop_fsdp_settings(environment: MutableMapping[str, str]) -> FsdpSettings | None:
    """Read and remove the launch's FSDP settings from the environment; None without FSDP.

    Only `fsdp_version` and `reshard_after_forward` have an effect. Raises `DitLoraError` for unsupported settings.
    """
    # Popped, because Accelerate would shard with its own plugin, on GPUs only.
    if not _is_true(environment.pop("ACCELERATE_USE_FSDP", "")):
        return None
    refused = []
    # Accelerate's default is version 1.
    if environment.get("FSDP_VERSION", "1") != "2":
        refused.append("FSDP version 1: set fsdp_version: 2, as accelerate_configs/fsdp2.yaml does")
    if _is_true(environment.get("FSDP_OFFLOAD_PARAMS", "")):
        refused.append("fsdp_offload_params: set it to false; use more GPUs to lower memory")
    if refused:
        raise DitLoraError(format_list("the launch asks FSDP for something that is not supported", refused))
    # Resharding is the default.
    stays_whole = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "false"
    return FsdpSettings(reshard_after_forward=not stays_whole)


def pop_zero_stage(environment: MutableMapping[str, str]) -> int | None:
    """Remove the launch's DeepSpeed settings from the environment; returns the ZeRO stage, None without DeepSpeed.

    Raises `DitLoraError` for settings that only DeepSpeed could honour, and if it is not installed.
    """
    # Popped, because Accelerate's DeepSpeed steps inside backward, before the gate.
    if not _is_true(environment.pop("ACCELERATE_USE_DEEPSPEED", "")):
        return None
    if importlib.util.find_spec("deepspeed") is None:
        raise DitLoraError("the launch needs DeepSpeed; pip install 'dit-lora[deepspeed]'")
    # Stage 2 is Accelerate's default too.
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    refused = []
    if stage != "2":
        refused.append(f"ZeRO stage {stage}: set zero_stage: 2, or launch with accelerate_configs/fsdp2.yaml")
    for name, instead in _UNSUPPORTED_DEEPSPEED.items():
        value = environment.get(f"ACCELERATE_{name}", "none").lower()
        if value not in ("none", "auto"):
            refused.append(f"{name.lower()} {value}: remove it; {instead}")
    if refused:
        summary = "the launch asks DeepSpeed for something that is not supported (see accelerate_configs/)"
        raise DitLoraError(format_list(summary, refused))
    return int(stage)


_UNSUPPORTED_DEEPSPEED = {
    "DEEPSPEED_CONFIG_FILE": "the recipe says everything else",
    "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "use more GPUs to lower memory",
    "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "train.offload is for one process and DDP",
    "GRADIENT_CLIPPING": "optim.clip decides",
}


def require_shardable(
    recipe: Recipe, sharding: Literal["fsdp2", "zero2"], *, has_idle_parameters: bool = False
) -> None:
    """Raise `DitLoraError` with every option of the recipe that does not work with a sharded model.

    These read whole tensors or place weights. `has_idle_parameters`: a step may give some parameters no gradient.
    """
    optimizer = recipe.optim.name
    # The optimizer stays if it can be sharded; else the advice names the default one.
    is_shared = sharding in OPTIMIZERS[optimizer].supported_sharding
    refused = [
        f"{name}={value}: set it to {instead}"
        for name, value, instead in (
            ("optim.name", optimizer, optimizer if is_shared else DEFAULT_OPTIMIZER),
            ("model.quantize", recipe.model.quantize, None),
            ("train.offload", recipe.train.offload, "none"),
            ("kernels.fp8", recipe.kernels.fp8, "off"),
            ("train.context_parallel", recipe.train.context_parallel, 1),
        )
        if value != instead
    ]
    if has_idle_parameters and sharding == "zero2":
        refused.append(
            "optim.groups.connector or backbone: a text-only step gives them no gradient, which ZeRO takes "
            "for zero; train only the adapter"
        )
    if refused:
        sharding_name = "sharded weights (FSDP)" if sharding == "fsdp2" else "DeepSpeed's ZeRO"
        summary = f"not with {sharding_name}; launch with accelerate_configs/ddp.yaml, or"
        raise DitLoraError(format_list(summary, refused))


def _is_true(value: str) -> bool:
    return value.lower() in ("1", "true")
