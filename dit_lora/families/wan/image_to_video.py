"""Wan image-to-video: 2.1 I2V and FLF2V, 2.2 I2V-A14B (condition as extra channels), TI2V-5B (clean first latent).

The stock pipeline's own methods make the condition, its mask and the image embedding
(diffusers/pipelines/wan/pipeline_wan_i2v.py). The condition is a video of the image followed by zero *pixels*, encoded
as a whole.

Shapes: B batch, C latent channels, F latent frames, H and W latent size, P tokens of an image.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from diffusers import WanImageToVideoPipeline
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v
from diffusers.utils import is_ftfy_available
from diffusers.video_processor import VideoProcessor
from transformers import CLIPImageProcessor, CLIPVisionModel

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.families.base import Checkpoint, TensorMap, Tensors, VideoEncoder
from dit_lora.families.conditioning import Conditioning, FirstFrameConditioning
from dit_lora.families.latents import PLAIN_VAE, VaeMemory
from dit_lora.families.pictures import require_images, to_pil_image
from dit_lora.families.refusals import min_frames_errors
from dit_lora.families.wan.text_to_video import WanDenoiser, WanEncoders, WanInfo, WanSampler
from dit_lora.numerics.objectives import FlowMatching

IMAGE_TRANSFORM = "wan-i2v-1: the pipeline's preprocessing; mask and normalised mode of the picture before zero pixels"
if not is_ftfy_available():
    # Without ftfy, the text-to-video pipeline skips that step of the cleaning, but this pipeline calls ftfy anyway and
    # raises NameError (basic_clean of both, Diffusers 0.42.1). Use the other's cleaning; where ftfy is installed, both
    # are the same.
    pipeline_wan_i2v.prompt_clean = pipeline_wan.prompt_clean
EmbedImages = Callable[[list[Any]], torch.Tensor]
"""Maps images to their CLIP hidden states, (images, P, width)."""


@dataclass(frozen=True, kw_only=True)
class WanImageInfo(WanInfo):
    """Info (configs, supported shapes) of a Wan checkpoint for image-to-video."""

    has_token_mask: bool
    """True if the image is the first latent frame itself, marked by timestep 0 of its tokens (`expand_timesteps`)."""
    pipeline_class: ClassVar[Any] = WanImageToVideoPipeline
    supported_options: ClassVar[tuple[str, ...]] = (
        *WanInfo.supported_options,
        "data.image_column",
        "validation.images",
        "validation.last_images",
    )

    @property
    def image_argument_names(self) -> tuple[str, ...]:
        return ("image", "last_image") if self.has_last_image else ("image",)

    @property
    def has_clip_embedding(self) -> bool:
        """True if the Wan transformer attends to the image's CLIP embedding (2.1)."""
        return self.transformer_config["image_dim"] is not None

    @property
    def has_last_image(self) -> bool:
        """True if a Wan checkpoint also takes the last frame (FLF2V): the embedding has positions for two images."""
        return self.transformer_config["pos_embed_seq_len"] is not None

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        problems = super().find_shape_errors(shape)
        return [*problems, *min_frames_errors(shape.frames, self.vae_config["scale_factor_temporal"])]

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        """Apply the recipe's settings.

        Raises `DitLoraError` if prompts lack images, or FLF2V has separate first images (`data.image_column`).
        """
        info, problems = super().copy_with_recipe_settings(recipe, training_options), []
        # A separate first image would not belong to the clip's last frame.
        if self.has_last_image and any(source.image_column for source in recipe.data.all_sources):
            problems.append(
                "data.image_column does not apply: this model uses the first and last frame of each clip; remove it"
            )
        require_images(self.path.name, recipe.validation, self.image_argument_names, problems)
        return info


@dataclass(frozen=True, kw_only=True)
class WanImageEncoders(WanEncoders):
    """Text encoder, image encoder and VAE of a Wan checkpoint for image-to-video."""

    info: WanImageInfo

    def latent_cache_key(self) -> Mapping[str, Any]:
        pictures = "first and last" if self.info.has_last_image else "first"
        key = {**super().latent_cache_key(), "image": f"{IMAGE_TRANSFORM}; {pictures}"}
        if self.info.has_clip_embedding:
            key["image_encoder"] = self.info.path / "image_encoder"
            key["image_processor"] = self.info.path / "image_processor"
            # With torchvision, Transformers uses another image processor, which resizes differently.
            key["processor"] = CLIPImageProcessor.__name__
        return key

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load Wan's VAE, and CLIP if the checkpoint uses it, in fp32.

        Samples keep the clip's posterior and `image_latents`, the normalised condition: (mask channels + C, F, H, W),
        or (C, 1, H, W) for TI2V-5B. With CLIP they also keep `image_embeds`, (images, P, width).
        """
        vae = self.load_vae(dtype, device, memory)
        embed = self._load_clip(device) if self.info.has_clip_embedding else None
        processor = VideoProcessor(vae_scale_factor=self.info.vae_config["scale_factor_spatial"])
        pipeline_stub = self._make_pipeline_stub(vae)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            # The first image, and for FLF2V the last frame.
            frames = [pixels[0] if image is None else image, *([pixels[-1]] if self.info.has_last_image else [])]
            pictures = [to_pil_image(picture) for picture in frames]
            first_picture, *last_picture = (processor.preprocess(picture).to(device) for picture in pictures)
            tensors = self.encode_pixels(vae, pixels)
            tensors["image_latents"] = self._encode_condition(pipeline_stub, first_picture, last_picture, len(pixels))
            return tensors if embed is None else {**tensors, "image_embeds": embed(pictures)}

        return encode

    def _make_pipeline_stub(self, vae: Any) -> Any:
        """A stand-in for Wan's pipeline with the attributes that its `prepare_latents` reads."""
        return SimpleNamespace(
            vae=vae,
            vae_scale_factor_temporal=self.info.vae_config["scale_factor_temporal"],
            vae_scale_factor_spatial=self.info.vae_config["scale_factor_spatial"],
            config=SimpleNamespace(expand_timesteps=self.info.has_token_mask),
        )

    def _encode_condition(
        self, pipeline_stub: Any, first_image: torch.Tensor, last_images: list[torch.Tensor], frames: int
    ) -> torch.Tensor:
        """The image condition of a clip, computed with the pipeline's method.

        It is joined with the latents (TI2V-5B: in place of the first).
        """
        height, width = first_image.shape[-2:]
        condition = self.info.pipeline_class.prepare_latents(
            pipeline_stub,
            first_image,
            batch_size=1,
            num_channels_latents=self.info.vae_config["z_dim"],
            height=height,
            width=width,
            num_frames=frames,
            dtype=torch.float32,
            device=first_image.device,
            latents=first_image,  # given latents, so that the method draws none
            last_image=last_images[0] if last_images else None,
        )
        # The method returns latents and condition. Take the only sample of the condition.
        return condition[1][0]

    def _load_clip(self, device: torch.device) -> EmbedImages:
        encoder = load_pretrained(
            CLIPVisionModel, self.info.path / "image_encoder", dtype=torch.float32, use_safetensors=True
        ).to(device)
        processor = load_pretrained(CLIPImageProcessor, self.info.path / "image_processor")
        # encode_image reads only these two attributes of the pipeline.
        pipeline_stub = SimpleNamespace(image_processor=processor, image_encoder=encoder)
        return lambda pictures: self.info.pipeline_class.encode_image(pipeline_stub, pictures, device)


@dataclass(frozen=True, kw_only=True)
class MaskAndImageConditioning(Conditioning):
    """Conditioning that appends mask and image condition to the noisy latents as further channels."""

    def append_channels(self, latents: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        # (B, C + mask channels + C, F, H, W)
        return torch.cat([latents, batch["image_latents"].float()], dim=1)


@dataclass(frozen=True, kw_only=True)
class WanImageSampler(WanSampler):
    """Wan's pipeline arguments for image-to-video."""

    info: WanImageInfo

    @property
    def fp32_components(self) -> tuple[str, ...]:
        # As samples are encoded.
        return ("vae", "image_encoder") if self.info.has_clip_embedding else super().fp32_components


def get_image_latents(batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
    """Normalized latents (B, C, 1, H, W) of the first images, for Wan's TI2V-5B."""
    return batch["image_latents"].float()


def compose_checkpoint(objective: FlowMatching, **facts: Any) -> Checkpoint:
    """Build an opened Wan checkpoint for image-to-video."""
    info = WanImageInfo(**facts)
    # TI2V-5B is given the image as a clean frame, the others as channels.
    conditioning = (
        FirstFrameConditioning(image_latents=get_image_latents) if info.has_token_mask else MaskAndImageConditioning()
    )
    denoiser = WanDenoiser(info=info, objective=objective, conditioning=conditioning)
    return Checkpoint.from_denoiser(denoiser, WanImageEncoders, WanImageSampler)
