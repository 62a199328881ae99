"""Wan image-to-video: 2.1 I2V and FLF2V, 2.2 I2V-A14B (condition as extra channels), TI2V-5B (clean first latent).

The stock pipeline's own methods make the condition, its mask and the image embedding
(diffusers/pipelines/wan/pipeline_wan_i2v.py). The condition is a video of the image followed by zero *pixels*, encoded
as a whole.

Shapes: B batch, C latent channels, F latent frames, H and W latent size, P tokens of an image.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v
from diffusers.utils import is_ftfy_available
from diffusers.video_processor import VideoProcessor
from torch import nn
from transformers import CLIPImageProcessor, CLIPVisionModel

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import TensorMap, Tensors, VideoEncoder
from dit_lora.families.first_frame import FirstFrameCheckpoint
from dit_lora.families.pictures import image_errors, to_pil_image
from dit_lora.families.posterior import encode_video
from dit_lora.families.refusals import min_frames_errors
from dit_lora.families.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.families.wan.text_to_video import WanCheckpoint

IMAGE_TRANSFORM = "wan-i2v-1: the pipeline's preprocessing; mask and normalised mode of the picture before zero pixels"
if not is_ftfy_available():
    # Without ftfy, the text-to-video pipeline skips that step of the cleaning, but this pipeline calls ftfy anyway and
    # raises NameError (basic_clean of both, Diffusers 0.42.1). Use the other's cleaning; where ftfy is installed, both
    # are the same.
    pipeline_wan_i2v.prompt_clean = pipeline_wan.prompt_clean
EmbedImages = Callable[[list[Any]], torch.Tensor]
"""Maps images to their CLIP hidden states, (images, P, width)."""


@dataclass(frozen=True, kw_only=True)
class WanImageCheckpoint(WanCheckpoint):
    """A Wan image-to-video checkpoint: mask and condition are concatenated with the noisy latents."""

    pipeline_class: ClassVar[Any] = WanImageToVideoPipeline
    supported_options: ClassVar[tuple[str, ...]] = (
        *WanCheckpoint.supported_options,
        "data.image_column",
        "validation.images",
        "validation.last_images",
    )
    has_token_mask: ClassVar[bool] = False
    """True if the image is the first latent frame itself, marked by timestep 0 of its tokens (`expand_timesteps`)."""

    @property
    def image_arguments(self) -> tuple[str, ...]:
        return ("image", "last_image") if self.has_last_image else ("image",)

    @property
    def has_clip(self) -> bool:
        """True if the transformer attends to the image's CLIP embedding (2.1)."""
        return self.transformer_config["image_dim"] is not None

    @property
    def has_last_image(self) -> bool:
        """True if the last frame is given too (FLF2V): the embedding has positions for two images."""
        return self.transformer_config["pos_embed_seq_len"] is not None

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        problems = super().find_shape_errors(shape)
        return [*problems, *min_frames_errors(shape.frames, self.vae_config["scale_factor_temporal"])]

    def apply_recipe(self, recipe: Recipe) -> Self:
        """Raise `DitLoraError` if prompts lack images, or FLF2V has separate first images (`data.image_column`)."""
        checkpoint = super().apply_recipe(recipe)
        problems = image_errors(recipe.validation, self.image_arguments)
        # A separate first image would not belong to the clip's last frame.
        if self.has_last_image and any(source.image_column for source in recipe.data.all_sources):
            problems.append(
                "data.image_column does not apply: this model uses the first and last frame of each clip; remove it"
            )
        if problems:
            raise DitLoraError(format_list(f"{self.path.name} is image-to-video", problems))
        return checkpoint

    def latent_cache_key(self) -> Mapping[str, Any]:
        pictures = "first and last" if self.has_last_image else "first"
        key = {**super().latent_cache_key(), "image": f"{IMAGE_TRANSFORM}; {pictures}"}
        if self.has_clip:
            key["image_encoder"] = self.path / "image_encoder"
            key["image_processor"] = self.path / "image_processor"
            # With torchvision, Transformers uses another image processor, which resizes differently.
            key["processor"] = CLIPImageProcessor.__name__
        return key

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE, and CLIP if the checkpoint uses it, in fp32.

        Samples keep the clip's posterior and `image_latents`, the normalised condition: (mask channels + C, F, H, W),
        or (C, 1, H, W) for TI2V-5B. With CLIP they also keep `image_embeds`, (images, P, width).
        """
        vae = memory.load(AutoencoderKLWan, self.path, torch.float32, device)
        embed = self._load_clip(device) if self.has_clip else None
        processor = VideoProcessor(vae_scale_factor=self.vae_config["scale_factor_spatial"])
        pipeline_stub = self._make_pipeline_stub(vae)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            # The first image, and for FLF2V the last frame.
            frames = [pixels[0] if image is None else image, *([pixels[-1]] if self.has_last_image else [])]
            pictures = [to_pil_image(picture) for picture in frames]
            first_picture, *last_picture = (processor.preprocess(picture).to(device) for picture in pictures)
            tensors = encode_video(vae, pixels)
            tensors["image_latents"] = self._encode_condition(pipeline_stub, first_picture, last_picture, len(pixels))
            return tensors if embed is None else {**tensors, "image_embeds": embed(pictures)}

        return encode

    def _make_pipeline_stub(self, vae: Any) -> Any:
        """A stand-in for the pipeline with the attributes that its `prepare_latents` reads."""
        return SimpleNamespace(
            vae=vae,
            vae_scale_factor_temporal=self.vae_config["scale_factor_temporal"],
            vae_scale_factor_spatial=self.vae_config["scale_factor_spatial"],
            config=SimpleNamespace(expand_timesteps=self.has_token_mask),
        )

    def _encode_condition(
        self, pipeline_stub: Any, first_image: torch.Tensor, last_images: list[torch.Tensor], frames: int
    ) -> torch.Tensor:
        """The condition, by the pipeline's own method: joined with the latents (TI2V-5B: in place of the first)."""
        height, width = first_image.shape[-2:]
        condition = self.pipeline_class.prepare_latents(
            pipeline_stub,
            first_image,
            batch_size=1,
            num_channels_latents=self.vae_config["z_dim"],
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
            CLIPVisionModel, self.path / "image_encoder", dtype=torch.float32, use_safetensors=True
        ).to(device)
        processor = load_pretrained(CLIPImageProcessor, self.path / "image_processor")
        # encode_image reads only these two attributes of the pipeline.
        pipeline_stub = SimpleNamespace(image_processor=processor, image_encoder=encoder)
        return lambda pictures: self.pipeline_class.encode_image(pipeline_stub, pictures, device)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity with the condition; equal to one call of the stock pipeline."""
        # (B, C + mask channels + C, F, H, W)
        hidden = torch.cat([noisy, batch["image_latents"].float()], dim=1)
        return self.run_transformer(transformer, hidden, timesteps, batch)

    @property
    def fp32_components(self) -> tuple[str, ...]:
        return ("vae", "image_encoder") if self.has_clip else super().fp32_components


@dataclass(frozen=True, kw_only=True)
class WanTokenImageCheckpoint(FirstFrameCheckpoint, WanImageCheckpoint):
    """Wan 2.2 TI2V-5B from an image: the image's latent is the first frame, whose tokens have timestep 0."""

    supported_options: ClassVar[tuple[str, ...]] = (*WanImageCheckpoint.supported_options, "data.image_dropout")
    has_token_mask: ClassVar[bool] = True

    def clean_latents(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """The clip's latents, with the first frame replaced by the image for samples that keep it."""
        return self._replace_first_frame(super().clean_latents(batch, random_tensors), batch, random_tensors)

    def conditioning_mask(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Conditioning mask (B, 1, F, 1, 1): 1 at the first frame of samples that keep their image, else 0."""
        frames = batch["latent_mean"].shape[2]
        is_first_frame = torch.arange(frames, device=batch["latent_mean"].device) == 0
        has_picture = self.has_picture(batch, random_tensors)
        # (B, 1, 1, 1, 1) and (1, 1, F, 1, 1) combine to (B, 1, F, 1, 1).
        return (has_picture.view(-1, 1, 1, 1, 1) & is_first_frame.view(1, 1, -1, 1, 1)).float()

    def predict_in_training(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
        random_tensors: TensorMap,
    ) -> torch.Tensor:
        """Run the transformer with one timestep per token, as the pipeline does: 0 where latents are given clean."""
        _, patch_height, patch_width = self.transformer_config["patch_size"]
        tokens = (noisy.shape[3] // patch_height) * (noisy.shape[4] // patch_width)
        # (B, F), 0 at frames that are given clean.
        frame_timesteps = (1 - self.conditioning_mask(batch, random_tensors)).flatten(1) * timesteps[:, None]
        # (B, F, tokens per frame) -> (B, S)
        token_timesteps = frame_timesteps[:, :, None].expand(-1, -1, tokens).flatten(1)
        return self.run_transformer(transformer, noisy, token_timesteps, batch)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity with the image's latent in the first frame; equal to one call of the stock pipeline."""
        # Without random tensors, every sample keeps its image.
        conditioned = self._replace_first_frame(noisy, batch, {})
        return self.predict_in_training(transformer, conditioned, timesteps, batch, {})

    def _replace_first_frame(self, latents: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        conditioning_mask = self.conditioning_mask(batch, random_tensors)
        return torch.where(conditioning_mask > 0, batch["image_latents"].float(), latents)
