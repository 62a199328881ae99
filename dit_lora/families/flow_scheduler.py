"""The scheduler that flow-matching pipelines share, Diffusers' Euler one: its config, and what follows from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.opening import read_component_config


def flow_scheduler(model: ModelConfig, path: Path) -> Mapping[str, Any]:
    """Return the config of a checkpoint's scheduler; refuse one of another kind, or that shifts otherwise."""
    stored = read_component_config(path, "scheduler")
    kind = FlowMatchEulerDiscreteScheduler
    if stored.get("_class_name") != kind.__name__:
        raise DitLoraError(
            f"{model.path}: scheduler {stored.get('_class_name')} is not the one that family {model.family} is "
            f"published with: {kind.__name__}"
        )
    config: Any = kind.from_config(stored).config
    if config.use_dynamic_shifting and config.time_shift_type != "exponential":
        raise DitLoraError(
            f"{model.path}: its scheduler shifts with time_shift_type={config.time_shift_type}; family "
            f"{model.family} knows exponential, the published checkpoints'"
        )
    return dict(config)


def mu_by_tokens(scheduler: Mapping[str, Any], tokens: int) -> float:
    """Return the shift's logarithm for this many image or video tokens, as pipelines compute it by such a scheduler's config."""
    return calculate_shift(
        tokens,
        scheduler["base_image_seq_len"],
        scheduler["max_image_seq_len"],
        scheduler["base_shift"],
        scheduler["max_shift"],
    )


def require_steps(scheduler: Mapping[str, Any], steps: int, name: str) -> None:
    """Refuse to sample in one step where the scheduler's config says `shift_terminal`: its timestep would be NaN.

    It stretches the schedule so that its last step is there, and of one step the last is also the first, pure noise.
    """
    terminal = scheduler["shift_terminal"]
    if terminal and steps < 2:
        raise DitLoraError(
            f"{name} must be 2 or more, as shift_terminal={terminal:g} of the scheduler gives NaN in one step; got {steps}"
        )
