"""Opens checkpoints of Qwen-Image and Qwen-Image-Edit by their pipeline, and rejects related models by name."""

from typing import Any

from diffusers import QwenImageEditPlusPipeline, QwenImagePipeline, QwenImageTransformer2DModel

from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Checkpoint
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import build_flow_matching
from dit_lora.families.opening import get_checkpoint_folder, read_component_config
from dit_lora.families.qwen_image.checkpoint import (
    QwenImageDenoiser,
    QwenImageEncoders,
    QwenImageInfo,
    QwenImageSampler,
)
from dit_lora.families.qwen_image.edit import (
    EDIT_PLUS,
    QwenImageEditEncoders,
    QwenImageEditInfo,
    QwenImageEditSampler,
    ReferenceConditioning,
)
from dit_lora.families.qwen_latents import read_qwen_latents_checkpoint

# Related pipelines whose checkpoints are not supported, and what they are.
_UNSUPPORTED_PIPELINES = {
    "QwenImage21Pipeline": "Qwen-Image 2.1 is a different model, which family qwen_image21 trains",
    "QwenImageLayeredPipeline": "Qwen-Image-Layered takes pictures apart into layers",
}


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a Qwen-Image or Qwen-Image-Edit checkpoint. Raises as `DiffusionFamily.open` does."""
    name = read_component_config(get_checkpoint_folder(model)).get("_class_name")
    if name in _UNSUPPORTED_PIPELINES:
        raise DitLoraError(
            f"{model.path} is a {name} checkpoint: {_UNSUPPORTED_PIPELINES[name]}; family "
            f"{family.name} trains Qwen/Qwen-Image, "
            "Qwen/Qwen-Image-2512, Qwen/Qwen-Image-Edit, Qwen/Qwen-Image-Edit-2509 and Qwen/Qwen-Image-Edit-2511"
        )
    index, fields = read_qwen_latents_checkpoint(model, family, QwenImageTransformer2DModel)
    config = fields["transformer_config"]
    # With a guidance embedding the transformer cannot run (forward passes its embedder one argument too many). The
    # other two belong to Qwen-Image-Layered.
    flags = ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")
    unsupported = [flag for flag in flags if config[flag]]
    if unsupported:
        raise DitLoraError(
            f"{model.path}: {', '.join(unsupported)} of its transformer's config must be false, as of "
            "Qwen/Qwen-Image; got true"
        )
    objective, pipeline_name = build_flow_matching(fields["scheduler"]), index["_class_name"]
    if pipeline_name == QwenImagePipeline.__name__:
        info = QwenImageInfo(**fields)
        denoiser = QwenImageDenoiser(info=info, objective=objective)
        return Checkpoint.from_denoiser(denoiser, QwenImageEncoders, QwenImageSampler)
    # 2509 and 2511 have the same pipeline.
    edit_fields: dict[str, Any] = EDIT_PLUS if pipeline_name == QwenImageEditPlusPipeline.__name__ else {}
    edit_info = QwenImageEditInfo(**fields, **edit_fields)
    conditioning = ReferenceConditioning()
    denoiser = QwenImageDenoiser(info=edit_info, objective=objective, conditioning=conditioning)
    return Checkpoint.from_denoiser(denoiser, QwenImageEditEncoders, QwenImageEditSampler)
