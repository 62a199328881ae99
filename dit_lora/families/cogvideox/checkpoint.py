"""CogVideoX: text-to-video and image-to-video, versions 1.0 and 1.5, whichever the checkpoint's configs say."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers import CogVideoXDDIMScheduler, CogVideoXTransformer3DModel

from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.cogvideox.image_to_video import CogVideoXImageCheckpoint
from dit_lora.families.cogvideox.text_to_video import CogVideoXCheckpoint
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.opening import (
    local_checkpoint,
    read_component_config,
    read_index,
    require_whole_weights,
)
from dit_lora.numerics.objectives import VPrediction

_KINDS = {
    kind.pipeline_class.__name__: kind for kind in (CogVideoXCheckpoint, CogVideoXImageCheckpoint)
}


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> CogVideoXCheckpoint:
    """Read the configs; refuse another pipeline, channels that do not fit, and a scheduler of another objective."""
    path = local_checkpoint(model)
    kind = _KINDS[read_index(model, path, family.pipeline_names)["_class_name"]]
    transformer = _transformer_config(path, model)
    vae = read_component_config(path, "vae")
    require_whole_weights(model, path, "vae", "text_encoder")
    _require_channels(model, transformer, vae, kind)
    scheduler = CogVideoXDDIMScheduler.from_config(read_component_config(path, "scheduler"))
    if scheduler.config.prediction_type != "v_prediction":
        raise DitLoraError(
            f"{model.path}: CogVideoX predicts velocity, but its scheduler says "
            f"prediction_type={scheduler.config.prediction_type}"
        )
    return kind(
        path=path,
        transformer_config=transformer,
        vae_config=vae,
        objective=VPrediction.from_alphas_cumprod(scheduler.alphas_cumprod),
        from_scratch=model.from_scratch,
    )


def _transformer_config(path: Path, model: ModelConfig) -> dict[str, Any]:
    """The checkpoint's, over the class's defaults (1.0's files say nothing of what came later), with what
    `model.from_scratch` changes."""
    parameters = inspect.signature(CogVideoXTransformer3DModel.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    config = read_component_config(path, "transformer")
    changes = model.from_scratch or {}
    unknown = sorted(set(changes) - set(defaults))
    if unknown:
        heading = f"model.from_scratch takes {', '.join(sorted(defaults))}; it does not know"
        raise DitLoraError(listed(heading, unknown))
    return {**defaults, **config, **changes}


def _require_channels(
    model: ModelConfig,
    transformer: Mapping[str, Any],
    vae: Mapping[str, Any],
    kind: type[CogVideoXCheckpoint],
) -> None:
    """Latents go in (beside an image's, if it starts from one) and latents come out."""
    latents = vae["latent_channels"]
    inputs = latents * (2 if issubclass(kind, CogVideoXImageCheckpoint) else 1)
    wanted = {"in_channels": inputs, "out_channels": latents}
    wrong = [
        f"{name} must be {value}; got {transformer[name]}"
        for name, value in wanted.items()
        if transformer[name] != value
    ]
    if wrong:
        name = kind.pipeline_class.__name__
        raise DitLoraError(
            listed(f"{model.path}: the transformer of a {name} with this VAE", wrong)
        )
