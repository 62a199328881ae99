"""Opens LTX-Video checkpoints, 0.9 and 0.9.1. Both tasks use the same files."""

from collections.abc import Mapping
from typing import Any

from diffusers import AutoencoderKLLTXVideo, LTXImageToVideoPipeline, LTXVideoTransformer3DModel

from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import Checkpoint
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import build_flow_matching, read_flow_scheduler
from dit_lora.families.ltx_video import image_to_video
from dit_lora.families.ltx_video.text_to_video import LTXVideoDenoiser, LTXVideoEncoders, LTXVideoInfo, LTXVideoSampler
from dit_lora.families.opening import read_checkpoint
from dit_lora.families.refusals import refuse_ic_lora


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of an LTX-Video checkpoint. Raises as `DiffusionFamily.open` does."""
    refuse_ic_lora(model)
    # Files of 0.9 lack options that later versions introduced.
    index, fields = read_checkpoint(
        model, family.pipeline_names, transformer_class=LTXVideoTransformer3DModel, vae_class=AutoencoderKLLTXVideo
    )
    scheduler = read_flow_scheduler(model, fields["path"])
    # Both pipelines compute positions for patches of 1, so other configs would train on wrong positions.
    _require_matching_components(model, fields["transformer_config"], fields["vae_config"])
    # The recipe's task wins, because both tasks use the same weights.
    stored_task = "i2v" if index["_class_name"] == LTXImageToVideoPipeline.__name__ else "t2v"
    task = model.task or stored_task
    objective = build_flow_matching(scheduler)
    facts = fields | {"scheduler": scheduler, "has_task_override": task != stored_task}
    if task == "i2v":
        return image_to_video.compose_checkpoint(objective, **facts)
    info = LTXVideoInfo(**facts)
    denoiser = LTXVideoDenoiser(info=info, objective=objective)
    return Checkpoint.from_denoiser(denoiser, LTXVideoEncoders, LTXVideoSampler)


def _require_matching_components(model: ModelConfig, transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> None:
    """Raise `DitLoraError` for wrong channels, and for patches above 1, whose positions the pipelines get wrong."""
    channels = vae["latent_channels"]
    expected = {"in_channels": channels, "out_channels": channels, "patch_size": 1, "patch_size_t": 1}
    problems = [
        f"transformer: {name} must be {value}; got {transformer[name]}"
        for name, value in expected.items()
        if transformer[name] != value
    ]
    if problems:
        raise DitLoraError(format_list(f"{model.path}: the parts of this checkpoint do not fit", problems))
