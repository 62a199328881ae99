"""Opens a checkpoint of Qwen-Image or Qwen-Image-Edit, by the pipeline that it is of; refuses their kin by name."""

from diffusers import QwenImageTransformer2DModel

from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.opening import (
    local_checkpoint,
    read_component_config,
    read_index,
    require_whole_weights,
)
from dit_lora.families.qwen_image.checkpoint import QwenImageCheckpoint
from dit_lora.families.qwen_image.edit import QwenImageEditCheckpoint, QwenImageEditPlusCheckpoint
from dit_lora.families.qwen_latents import qwen_latents_fields

# Pipelines of Qwen-Image's kin whose checkpoints are not trained, with what they are.
_OTHERS = {
    "QwenImage21Pipeline": "Qwen-Image 2.1 is another model, with another text encoder and autoencoder",
    "QwenImageLayeredPipeline": "Qwen-Image-Layered takes pictures apart into layers",
}


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> QwenImageCheckpoint:
    """Read the configs; refuse another pipeline, another scheduler, inputs that nobody would give, and torn weights."""
    path = local_checkpoint(model)
    name = read_component_config(path).get("_class_name")
    if name in _OTHERS:
        raise DitLoraError(
            f"{model.path} is a {name} checkpoint: {_OTHERS[name]}; family {family.name} trains Qwen/Qwen-Image, "
            "Qwen/Qwen-Image-2512, Qwen/Qwen-Image-Edit, Qwen/Qwen-Image-Edit-2509 and Qwen/Qwen-Image-Edit-2511"
        )
    index = read_index(model, path, family.pipeline_names)
    require_whole_weights(model, path, "vae", "text_encoder")
    fields = qwen_latents_fields(model, QwenImageTransformer2DModel)
    config = fields["transformer_config"]
    # A guidance embedding, which the transformer cannot run with (forward gives its embedder an argument too many), and
    # what Layered has.
    flags = ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope")
    wrong = [flag for flag in flags if config[flag]]
    if wrong:
        raise DitLoraError(
            f"{model.path}: {', '.join(wrong)} of its transformer's config must be false, as of Qwen/Qwen-Image; got true"
        )
    kinds = (QwenImageCheckpoint, QwenImageEditCheckpoint, QwenImageEditPlusCheckpoint)
    (kind,) = (one for one in kinds if one.pipeline_class.__name__ == index["_class_name"])
    return kind(**fields)
