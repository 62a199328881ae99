"""Reads the scheduler that flow-matching pipelines share, Diffusers' Euler one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler

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
