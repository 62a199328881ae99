"""Config of Diffusers' FlowMatchEulerDiscreteScheduler, which the flow-matching pipelines share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.opening import read_component_config
from dit_lora.numerics.noise_levels import LOGIT_NORMAL, NoiseLevelDistribution
from dit_lora.numerics.objectives import FlowMatching


def read_flow_scheduler(model: ModelConfig, path: Path) -> Mapping[str, Any]:
    """Read a checkpoint's scheduler config, filled with the class's defaults.

    Raises `DitLoraError` for another scheduler class, or one that shifts with another formula than `exponential`.
    """
    stored_config = read_component_config(path, "scheduler")
    kind = FlowMatchEulerDiscreteScheduler
    # Another class in this place would be read with the wrong options: solvers name their shift `flow_shift`.
    if stored_config.get("_class_name") != kind.__name__:
        raise DitLoraError(
            f"{model.path}: scheduler {stored_config.get('_class_name')} is not the one that family {model.family} is "
            f"published with: {kind.__name__}"
        )
    # from_config fills options that older files lack.
    config: Any = kind.from_config(stored_config).config
    if config.use_dynamic_shifting and config.time_shift_type != "exponential":
        raise DitLoraError(
            f"{model.path}: its scheduler shifts with time_shift_type={config.time_shift_type}; family "
            f"{model.family} knows exponential, the published checkpoints'"
        )
    return dict(config)


def build_flow_matching(
    scheduler: Mapping[str, Any], distribution: NoiseLevelDistribution = LOGIT_NORMAL
) -> FlowMatching:
    """Flow-matching objective with the shift of the checkpoint's scheduler.

    A dynamic shift depends on the number of tokens, through `mu`.
    """
    shift = None if scheduler["use_dynamic_shifting"] else float(scheduler["shift"])
    return FlowMatching(shift, scheduler["num_train_timesteps"], distribution)


def compute_mu(scheduler: Mapping[str, Any], num_tokens: int) -> float:
    """Logarithm of the noise-level shift for this many image or video tokens, computed as the pipelines do."""
    # A line through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift).
    return calculate_shift(
        num_tokens,
        scheduler["base_image_seq_len"],
        scheduler["max_image_seq_len"],
        scheduler["base_shift"],
        scheduler["max_shift"],
    )


def require_min_steps(scheduler: Mapping[str, Any], steps: int, name: str) -> None:
    """Raise `DitLoraError` for one-step sampling if the scheduler has `shift_terminal`: its timestep would be NaN.

    `shift_terminal` stretches the schedule so that its last step ends there. With a single step, the last step is also
    the first, which is pure noise, so the stretch would divide zero by zero.
    """
    terminal = scheduler["shift_terminal"]
    if terminal and steps < 2:
        raise DitLoraError(
            f"{name} must be 2 or more, as shift_terminal={terminal:g} of the scheduler gives NaN in one step; got "
            f"{steps}"
        )
