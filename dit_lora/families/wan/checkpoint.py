"""Opens Wan checkpoints, 2.1 and 2.2. Configs and model_index.json tell which kind they are, never their name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanTransformer3DModel

from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import Checkpoint
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.opening import read_checkpoint, read_component_config, require_complete_weights
from dit_lora.families.refusals import refuse_ic_lora
from dit_lora.families.wan.text_to_video import WanDenoiser, WanEncoders, WanInfo, WanSampler
from dit_lora.numerics.objectives import FlowMatching

_IMAGE_PIPELINE = "WanImageToVideoPipeline"


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a Wan checkpoint. Raises as `DiffusionFamily.open` does."""
    # Files written before an option existed lack it: `rope_max_seq_len`, the VAE's factors.
    index, fields = read_checkpoint(
        model,
        family.pipeline_names,
        weights=None,
        transformer_class=WanTransformer3DModel,
        vae_class=AutoencoderKLWan,
    )
    path = fields["path"]
    task, has_both_tasks = _select_task(model, index), bool(index.get("expand_timesteps"))
    # TI2V-5B (`expand_timesteps`) puts the image into the latents; the others use extra channels.
    has_condition_channels = task == "i2v" and not has_both_tasks
    _require_matching_components(model, index, fields, has_condition_channels=has_condition_channels)
    clip = ("image_encoder",) if _has_component(index, "image_encoder") else ()
    second = ("transformer_2",) if _has_component(index, "transformer_2") else ()
    require_complete_weights(model, path, "vae", "text_encoder", *clip, *second)
    boundary = index.get("boundary_ratio")
    objective = _build_objective(model, read_component_config(path, "scheduler"))
    if boundary is not None:
        # The pipeline sends t >= boundary to `transformer` (pipeline_wan.py, __call__).
        level_range = {"t_min": boundary} if fields["part"] == "transformer" else {"t_max": boundary}
        objective = replace(objective, distribution=replace(objective.distribution, **level_range))
    facts = {**fields, "expert_boundary": boundary, "has_task_override": task != _get_stored_task(index)}
    if task == "i2v":
        # Import late: without torchvision, Transformers warns whenever CLIP's image processor is imported.
        from dit_lora.families.wan import image_to_video

        return image_to_video.compose_checkpoint(objective, **facts, has_token_mask=has_both_tasks)
    info = WanInfo(**facts)
    denoiser = WanDenoiser(info=info, objective=objective)
    return Checkpoint.from_denoiser(denoiser, WanEncoders, WanSampler)


def _has_component(index: Mapping[str, Any], component: str) -> bool:
    """True if the pipeline has this component. Absent ones are missing from the index, or have two nulls."""
    return (index.get(component) or [None])[0] is not None


def _get_stored_task(index: Mapping[str, Any]) -> str:
    return "i2v" if index["_class_name"] == _IMAGE_PIPELINE else "t2v"


def _select_task(model: ModelConfig, index: Mapping[str, Any]) -> str:
    """The task for which a Wan checkpoint trains. TI2V-5B (`expand_timesteps`) supports both tasks."""
    refuse_ic_lora(model)
    stored_task, has_both_tasks = _get_stored_task(index), bool(index.get("expand_timesteps"))
    task = model.task or stored_task
    if task != stored_task and not has_both_tasks:
        does = {"t2v": "makes videos only from text", "i2v": "starts from an image"}[stored_task]
        raise DitLoraError(
            f"model.task: {task}: {model.path} {does} ({index['_class_name']}); remove it, or use a "
            "checkpoint for that task; TI2V-5B (expand_timesteps in its model_index.json) can do both"
        )
    return task


def _require_matching_components(
    model: ModelConfig, index: Mapping[str, Any], fields: Mapping[str, Any], *, has_condition_channels: bool
) -> None:
    """Check a Wan checkpoint's channels, its boundary with the second expert, and its image embedding.

    `has_condition_channels` is true if a mask and a condition are concatenated with the latents.
    """
    transformer, vae = fields["transformer_config"], fields["vae_config"]
    # Without a condition, the inputs are the noisy latents.
    latents, inputs = vae["z_dim"], vae["z_dim"]
    if has_condition_channels:
        inputs += vae["scale_factor_temporal"] + latents  # mask and condition (prepare_latents)
    problems = [
        f"{name} must be {value}; got {transformer[name]}"
        for name, value in {"in_channels": inputs, "out_channels": latents}.items()
        if transformer[name] != value
    ]
    # The boundary splits the noise levels between two experts.
    boundary, has_second = index.get("boundary_ratio"), _has_component(index, "transformer_2")
    if (boundary is not None) != has_second:
        present = "a transformer_2" if has_second else "no transformer_2"
        problems.append(f"model_index.json has {present} and boundary_ratio: {boundary}; give both or neither")
    if boundary is not None and not 0 < boundary < 1:
        problems.append(f"boundary_ratio must be above 0 and below 1; got {boundary}")
    has_image_embedding, has_encoder = (transformer["image_dim"] is not None, _has_component(index, "image_encoder"))
    if has_image_embedding and not (has_encoder and _has_component(index, "image_processor")):
        problems.append(
            "its transformer attends to an image's embedding (image_dim), and model_index.json has no image_encoder "
            "with an image_processor"
        )
    if has_image_embedding and not has_condition_channels:
        problems.append("its transformer attends to an image's embedding (image_dim), its pipeline has no image")
    if problems:
        raise DitLoraError(format_list(f"{model.path}: the parts of this checkpoint do not fit", problems))


def _build_objective(model: ModelConfig, scheduler: Mapping[str, Any]) -> FlowMatching:
    """Flow matching with logit-normal noise levels and the shift that the pipeline samples with."""
    name, timesteps = scheduler.get("_class_name"), scheduler.get("num_train_timesteps", 1000)
    # The scheduler of the published checkpoints; it names its shift `flow_shift`.
    if name == UniPCMultistepScheduler.__name__:
        config: Any = UniPCMultistepScheduler.from_config(dict(scheduler)).config
        if config.prediction_type == "flow_prediction" and config.use_flow_sigmas:
            return FlowMatching(float(config.flow_shift), timesteps)
    elif name == FlowMatchEulerDiscreteScheduler.__name__:
        config = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler)).config
        if not config.use_dynamic_shifting:
            return FlowMatching(float(config.shift), timesteps)
    raise DitLoraError(
        f"{model.path}: Wan predicts the flow with one shift (UniPCMultistepScheduler with use_flow_sigmas, or "
        f"FlowMatchEulerDiscreteScheduler without use_dynamic_shifting); got {dict(scheduler)}"
    )
