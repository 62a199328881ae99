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
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import Tensors, VideoEncoder
from dit_lora.families.first_frame import FirstFrameCheckpoint
from dit_lora.families.pictures import as_picture, wrong_pictures
from dit_lora.families.posterior import encode_video
from dit_lora.families.refusals import too_few_frames
from dit_lora.families.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.families.wan.text_to_video import WanCheckpoint

IMAGE_TRANSFORM = "wan-i2v-1: the pipeline's preprocessing; mask and normalised mode of the picture before zero pixels"
if not is_ftfy_available():
    # Without ftfy, the text-to-video pipeline skips that step of the cleaning, but this pipeline calls ftfy anyway and
    # raises NameError (basic_clean of both, Diffusers 0.42.1). Use the other's cleaning; where ftfy is installed, both
    # are the same.
    pipeline_wan_i2v.prompt_clean = pipeline_wan.prompt_clean
Embed = Callable[[list[Any]], torch.Tensor]
"""Maps images to their CLIP hidden states, (images, P, width)."""


@dataclass(frozen=True, kw_only=True)
class WanImageCheckpoint(WanCheckpoint):
    """A Wan image-to-video checkpoint: mask and condition are concatenated with the noisy latents."""

    pipeline_class: ClassVar[Any] = WanImageToVideoPipeline
    takes: ClassVar[tuple[str, ...]] = (
        *WanCheckpoint.takes,
        "data.image_column",
        "validation.images",
        "validation.last_images",
    )
    token_mask: ClassVar[bool] = False
    """True if the image is the first latent frame itself, marked by timestep 0 of its tokens (`expand_timesteps`)."""

    @property
    def pictures(self) -> tuple[str, ...]:
        return ("image", "last_image") if self.with_last else ("image",)

    @property
    def has_clip(self) -> bool:
        """True if the transformer attends to the image's CLIP embedding (2.1)."""
        return self.transformer_config["image_dim"] is not None

    @property
    def with_last(self) -> bool:
        """True if the last frame is given too (FLF2V): the embedding has positions for two images."""
        return self.transformer_config["pos_embed_seq_len"] is not None

    def wrong_shape(self, shape: VideoShape) -> list[str]:
        problems = super().wrong_shape(shape)
        return [*problems, *too_few_frames(shape.frames, self.vae_config["scale_factor_temporal"])]

    def for_recipe(self, recipe: Recipe) -> Self:
        """Raise `DitLoraError` if prompts lack images, or FLF2V has separate first images (`data.image_column`)."""
        checkpoint = super().for_recipe(recipe)
        problems = wrong_pictures(recipe.validation, self.pictures)
        # A separate first image would not belong to the clip's last frame.
        if self.with_last and any(source.image_column for source in recipe.data.all_sources):
            problems.append(
                "data.image_column: its two pictures are the clip's own first and last frame; remove it"
            )
        if problems:
            raise DitLoraError(listed(f"{self.path.name} is image-to-video", problems))
        return checkpoint

    def video_facts(self) -> Mapping[str, Any]:
        pictures = "first and last" if self.with_last else "first"
        key = {**super().video_facts(), "image": f"{IMAGE_TRANSFORM}; {pictures}"}
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
        embed = self._clip(device) if self.has_clip else None
        processor = VideoProcessor(vae_scale_factor=self.vae_config["scale_factor_spatial"])
        pipeline_stub = self._as_pipeline(vae)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            # The first image, and for FLF2V the last frame.
            frames = [
                pixels[0] if image is None else image,
                *([pixels[-1]] if self.with_last else []),
            ]
            pictures = [as_picture(picture) for picture in frames]
            first_picture, *last_picture = (
                processor.preprocess(picture).to(device) for picture in pictures
            )
            tensors = encode_video(vae, pixels)
            tensors["image_latents"] = self._condition(
                pipeline_stub, first_picture, last_picture, len(pixels)
            )
            return tensors if embed is None else {**tensors, "image_embeds": embed(pictures)}

        return encode

    def _as_pipeline(self, vae: Any) -> Any:
        """A stand-in for the pipeline with the attributes that its `prepare_latents` reads."""
        return SimpleNamespace(
            vae=vae,
            vae_scale_factor_temporal=self.vae_config["scale_factor_temporal"],
            vae_scale_factor_spatial=self.vae_config["scale_factor_spatial"],
            config=SimpleNamespace(expand_timesteps=self.token_mask),
        )

    def _condition(
        self, facts: Any, first: torch.Tensor, last: list[torch.Tensor], frames: int
    ) -> torch.Tensor:
        """The condition, by the pipeline's own method: joined with the latents (TI2V-5B: in place of the first)."""
        height, width = first.shape[-2:]
        condition = self.pipeline_class.prepare_latents(
            facts,
            first,
            batch_size=1,
            num_channels_latents=self.vae_config["z_dim"],
            height=height,
            width=width,
            num_frames=frames,
            dtype=torch.float32,
            device=first.device,
            latents=first,  # given latents, so that the method draws none
            last_image=last[0] if last else None,
        )
        # The method returns latents and condition. Take the only sample of the condition.
        return condition[1][0]

    def _clip(self, device: torch.device) -> Embed:
        encoder = load_pretrained(
            CLIPVisionModel, self.path / "image_encoder", dtype=torch.float32, use_safetensors=True
        ).to(device)
        processor = load_pretrained(CLIPImageProcessor, self.path / "image_processor")
        # encode_image reads only these two attributes of the pipeline.
        pipeline_stub = SimpleNamespace(image_processor=processor, image_encoder=encoder)
        return lambda pictures: self.pipeline_class.encode_image(pipeline_stub, pictures, device)

    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Predict the velocity with the condition; equal to one call of the stock pipeline."""
        # (B, C + mask channels + C, F, H, W)
        hidden = torch.cat([noisy, batch["image_latents"].float()], dim=1)
        return self.call(transformer, hidden, timesteps, batch)

    @property
    def in_fp32(self) -> tuple[str, ...]:
        return ("vae", "image_encoder") if self.has_clip else super().in_fp32


@dataclass(frozen=True, kw_only=True)
class WanTokenImageCheckpoint(FirstFrameCheckpoint, WanImageCheckpoint):
    """Wan 2.2 TI2V-5B from an image: the image's latent is the first frame, whose tokens have timestep 0."""

    takes: ClassVar[tuple[str, ...]] = (*WanImageCheckpoint.takes, "data.image_dropout")
    token_mask: ClassVar[bool] = True

    def clean_latents(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The clip's latents, with the first frame replaced by the image for samples that keep it."""
        return self._with_picture(super().clean_latents(batch, given), batch, given)

    def known(
        self, batch: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Conditioning mask (B, 1, F, 1, 1): 1 at the first frame of samples that keep their image, else 0."""
        frames = batch["latent_mean"].shape[2]
        is_first_frame = torch.arange(frames, device=batch["latent_mean"].device) == 0
        has_picture = self.has_picture(batch, given)
        # (B, 1, 1, 1, 1) and (1, 1, F, 1, 1) combine to (B, 1, F, 1, 1).
        return (has_picture.view(-1, 1, 1, 1, 1) & is_first_frame.view(1, 1, -1, 1, 1)).float()

    def drawn_prediction(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        return self._by_tokens(transformer, noisy, timesteps, batch, given)

    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Predict the velocity with the image's latent in the first frame; equal to one call of the stock pipeline."""
        # Without random tensors, every sample keeps its image.
        conditioned = self._with_picture(noisy, batch, {})
        return self._by_tokens(transformer, conditioned, timesteps, batch, {})

    def _with_picture(
        self,
        latents: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        conditioning_mask = self.known(batch, given)
        return torch.where(conditioning_mask > 0, batch["image_latents"].float(), latents)

    def _by_tokens(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Run the transformer with one timestep per token, as the pipeline does: 0 where latents are given clean."""
        _, patch_height, patch_width = self.transformer_config["patch_size"]
        tokens = (noisy.shape[3] // patch_height) * (noisy.shape[4] // patch_width)
        # (B, F), 0 at frames that are given clean.
        frame_timesteps = (1 - self.known(batch, given)).flatten(1) * timesteps[:, None]
        # (B, F, tokens per frame) -> (B, S)
        token_timesteps = frame_timesteps[:, :, None].expand(-1, -1, tokens).flatten(1)
        return self.call(transformer, noisy, token_timesteps, batch)
