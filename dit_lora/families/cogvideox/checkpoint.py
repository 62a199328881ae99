"""Opens CogVideoX checkpoints, 1.0 and 1.5, text-to-video and image-to-video; their configs say which."""

from collections.abc import Mapping
from typing import Any

from diffusers import CogVideoXDDIMScheduler, CogVideoXTransformer3DModel

from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import Checkpoint
from dit_lora.families.cogvideox.image_to_video import (
    CogVideoXImageEncoders,
    CogVideoXImageInfo,
    ImageChannelConditioning,
)
from dit_lora.families.cogvideox.text_to_video import (
    CogVideoXDenoiser,
    CogVideoXEncoders,
    CogVideoXInfo,
    CogVideoXSampler,
)
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.opening import fill_config_defaults, read_checkpoint, read_component_config
from dit_lora.numerics.objectives import VPrediction

# Facts by the pipeline class in model_index.json.
_INFO_CLASSES = {kind.pipeline_class.__name__: kind for kind in (CogVideoXInfo, CogVideoXImageInfo)}


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a CogVideoX checkpoint. Raises as `DiffusionFamily.open` does."""
    # Version 1.0's files lack options that were added later.
    index, fields = read_checkpoint(model, family.pipeline_names, transformer_class=CogVideoXTransformer3DModel)
    kind, vae = _INFO_CLASSES[index["_class_name"]], fields["vae_config"]
    # Diffusers would ignore an unknown option with a warning.
    options = fill_config_defaults(CogVideoXTransformer3DModel, {})
    unknown = sorted(set(model.from_scratch or {}) - set(options))
    if unknown:
        heading = f"model.from_scratch takes {', '.join(sorted(options))}; it does not know"
        raise DitLoraError(format_list(heading, unknown))
    _require_channels(model, fields["transformer_config"], vae, kind)
    # Published checkpoints name the DDIM or the DPM scheduler; their alphas are computed from the same options.
    scheduler = CogVideoXDDIMScheduler.from_config(read_component_config(fields["path"], "scheduler"))
    if scheduler.config.prediction_type != "v_prediction":
        raise DitLoraError(
            f"{model.path}: CogVideoX predicts velocity, but its scheduler says "
            f"prediction_type={scheduler.config.prediction_type}"
        )
    objective = VPrediction.from_alphas_cumprod(scheduler.alphas_cumprod)
    info = kind(**fields)
    # Both tasks share the denoiser and the sampler.
    if not isinstance(info, CogVideoXImageInfo):
        denoiser = CogVideoXDenoiser(info=info, objective=objective)
        return Checkpoint.from_denoiser(denoiser, CogVideoXEncoders, CogVideoXSampler)
    denoiser = CogVideoXDenoiser(info=info, objective=objective, conditioning=ImageChannelConditioning(vae_config=vae))
    return Checkpoint.from_denoiser(denoiser, CogVideoXImageEncoders, CogVideoXSampler)


def _require_channels(
    model: ModelConfig,
    transformer: Mapping[str, Any],
    vae: Mapping[str, Any],
    info_class: type[CogVideoXInfo],
) -> None:
    """Check that the transformer's inputs and outputs are latents.

    For image-to-video there must be twice as many inputs.
    """
    latents = vae["latent_channels"]
    # Image-to-video concatenates the image's latents with the noisy ones along the channels.
    inputs = latents * (2 if issubclass(info_class, CogVideoXImageInfo) else 1)
    expected = {"in_channels": inputs, "out_channels": latents}
    problems = [
        f"{name} must be {value}; got {transformer[name]}"
        for name, value in expected.items()
        if transformer[name] != value
    ]
    if problems:
        name = info_class.pipeline_class.__name__
        raise DitLoraError(format_list(f"{model.path}: the transformer of a {name} with this VAE", problems))
