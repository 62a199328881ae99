"""Base of the families that generate images with Qwen-Image's video autoencoders: latents and noise levels.

Latents are normalised per channel, like Wan's, and packed with the stock pipeline's own method.

Shapes: B batch, C latent channels, H and W latent size (of one frame), S image tokens (H W / 4), P packed channels (4
C).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from diffusers import AutoencoderKLQwenImage

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families.base import CheckpointInfo, Encoders
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import read_flow_scheduler, require_min_steps
from dit_lora.families.latents import PACK_SIZE
from dit_lora.families.opening import read_checkpoint
from dit_lora.families.refusals import image_frames_errors, side_errors


@dataclass(frozen=True, kw_only=True)
class QwenLatentsInfo(CheckpointInfo):
    """Info of a checkpoint that works on latents of Qwen-Image's VAE, or of Qwen-Image 2.1's."""

    scheduler: Mapping[str, Any]
    """The scheduler's config, filled with its class's defaults."""

    @property
    def size_multiple(self) -> int:
        # The pipelines' vae_scale_factor times their packing.
        return int(PACK_SIZE * 2 ** len(self.vae_config["temperal_downsample"]))

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        frame_problems = image_frames_errors(shape.frames, self.pipeline_class.__name__)
        return [*side_errors(shape, self.size_multiple), *frame_problems]

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        require_min_steps(self.scheduler, recipe.validation.inference_steps, "validation.inference_steps")
        return super().copy_with_recipe_settings(recipe, training_options)


@dataclass(frozen=True, kw_only=True)
class QwenLatentsEncoders(Encoders):
    vae_class: ClassVar[Any] = AutoencoderKLQwenImage
    transform = "qwen-latents-1: pixels / 127.5 - 1, posterior mean and logvar of one frame, fp32"


def read_qwen_latents_checkpoint(
    model: ModelConfig,
    family: DiffusionFamily,
    transformer_class: Any,
    *,
    vae_class: Any = AutoencoderKLQwenImage,
    pack_size: int = PACK_SIZE,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Index and info fields of a checkpoint with one of Qwen-Image's VAEs, as `read_checkpoint` returns them.

    Raises `DitLoraError` also for another scheduler, or if the transformer's channels do not fit the VAE's.

    Args:
        model: The `model` section of a recipe.
        family: The family that the recipe names.
        transformer_class: Class whose defaults fill the transformer's config.
        vae_class: Class whose defaults fill the VAE's config.
        pack_size: Side of the square of latents that becomes one token.
    """
    index, fields = read_checkpoint(
        model, family.pipeline_names, transformer_class=transformer_class, vae_class=vae_class
    )
    scheduler = read_flow_scheduler(model, fields["path"])
    # A token holds all channels of a square of latents.
    in_channels, z_dim = fields["transformer_config"]["in_channels"], fields["vae_config"]["z_dim"]
    channels = pack_size**2 * z_dim
    if in_channels != channels:
        raise DitLoraError(
            f"{model.path}: the parts of this checkpoint do not fit: its transformer's in_channels must be "
            f"{channels}, of {pack_size}x{pack_size} latents of its VAE's {z_dim} channels; got {in_channels}"
        )
    return index, {**fields, "scheduler": scheduler}
