"""LTX-2 image-to-video: the image is the first latent frame, clean, at timestep 0 and without loss.

The stock pipeline's own methods encode the image (diffusers/pipelines/ltx2/pipeline_ltx2_image2video.py). As there, it
is first compressed like a frame of a video.

Shapes: B batch, C latent channels, F latent frames, H and W latent size, S video tokens (F H W).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from diffusers import LTX2ImageToVideoPipeline
from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf
from diffusers.video_processor import VideoProcessor
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.families.base import Checkpoint, TensorMap, Tensors, VideoEncoder
from dit_lora.families.conditioning import FirstFrameTokenConditioning
from dit_lora.families.latents import PLAIN_VAE, VaeMemory
from dit_lora.families.ltx2.denoiser import LTX2Denoiser
from dit_lora.families.ltx2.encoders import LTX2Encoders
from dit_lora.families.ltx2.info import LTX2Info
from dit_lora.families.ltx2.sampler import LTX2Sampler
from dit_lora.families.pictures import require_images, to_pil_image
from dit_lora.families.refusals import min_frames_errors
from dit_lora.numerics.objectives import FlowMatching

IMAGE_TRANSFORM = "ltx2-i2v-1: H.264 at CRF {}, the pipeline's preprocessing, normalised mode of one frame, fp32"


@dataclass(frozen=True, kw_only=True)
class LTX2ImageInfo(LTX2Info):
    """Info (configs, supported shapes) of an LTX-2, LTX-2.3 or LTX-2.5 checkpoint for image-to-video."""

    pipeline_class: ClassVar[Any] = LTX2ImageToVideoPipeline
    image_argument_names: ClassVar[tuple[str, ...]] = ("image",)
    supported_options: ClassVar[tuple[str, ...]] = (
        *LTX2Info.supported_options,
        "data.image_column",
        "validation.images",
    )

    @property
    def image_crf(self) -> int:
        """Strength of the H.264 compression of a first image: the pipeline's default for this text encoder.

        The pipeline has it from its text encoder, which samples of cached prompts do not load.
        """
        return resolve_default_image_crf(SimpleNamespace(config=SimpleNamespace(model_type=self.text_model_type)))

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        step = self.transformer_config["vae_scale_factors"][0]
        return [*super().find_shape_errors(shape), *min_frames_errors(shape.frames, step)]

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        info = super().copy_with_recipe_settings(recipe, training_options)
        # After the checks of all tasks, whose errors come first.
        require_images(self.path.name, recipe.validation, self.image_argument_names)
        return info


@dataclass(frozen=True, kw_only=True)
class LTX2ImageEncoders(LTX2Encoders):
    """Text encoder and VAEs of an LTX-2 checkpoint for image-to-video."""

    info: LTX2ImageInfo

    def latent_cache_key(self) -> Mapping[str, Any]:
        return {**super().latent_cache_key(), "image": IMAGE_TRANSFORM.format(self.info.image_crf)}

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE in fp32. Samples keep the clip's latents and its image's (C, 1, H, W), both normalised."""
        vae = self.load_vae(dtype, device, memory)
        processor = VideoProcessor(vae_scale_factor=vae.spatial_compression_ratio)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            # (height, width, 3), uint8
            picture = np.array(to_pil_image(pixels[0] if image is None else image))
            compressed = Image.fromarray(apply_image_conditioning_crf(picture, self.info.image_crf))
            values = processor.preprocess(compressed).to(device)
            return {**self.encode_pixels(vae, pixels), "image_latents": self._encode_image_latents(vae, values)}

        return self.add_sound_encoder(encode, device)

    def _encode_image_latents(self, vae: Any, image: torch.Tensor) -> torch.Tensor:
        """Latents (C, 1, H, W) of a first image, encoded by the pipeline's method for a video of one frame."""
        # A stand-in for the pipeline, with the attributes that prepare_latents reads.
        pipeline_stub: Any = SimpleNamespace(
            vae=vae,
            vae_spatial_compression_ratio=vae.spatial_compression_ratio,
            vae_temporal_compression_ratio=vae.temporal_compression_ratio,
            transformer_spatial_patch_size=1,
            transformer_temporal_patch_size=1,
            _normalize_latents=self.info.pipeline_class._normalize_latents,
            _pack_latents=self.info.pipeline_class._pack_latents,
        )
        height, width = image.shape[-2:]
        tokens, _ = self.info.pipeline_class.prepare_latents(
            pipeline_stub,
            image,
            num_channels_latents=vae.config.latent_channels,
            height=height,
            width=width,
            num_frames=1,
            dtype=torch.float32,
            device=image.device,
            # Required by the method, but with a single frame none of the noise remains.
            generator=torch.Generator().manual_seed(0),
        )
        # Latent height and width, to undo the packing.
        grid = (side // vae.spatial_compression_ratio for side in (height, width))
        return self.info.pipeline_class._unpack_latents(tokens, 1, *grid)[0]


@dataclass(frozen=True, kw_only=True)
class LTX2ImageSampler(LTX2Sampler):
    """LTX-2's pipeline arguments for image-to-video."""

    info: LTX2ImageInfo

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        return {**super().shape_kwargs(shape), "image_crf": self.info.image_crf}


def get_image_tokens(batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
    """A batch's image latents, repeated for every frame and packed, (B, S, C)."""
    # (B, C, 1, H, W) -> (B, C, F, H, W), repeated for every frame without a copy.
    latents = batch["image_latents"].float().expand_as(batch["latent_mean"])
    return LTX2ImageToVideoPipeline._pack_latents(latents)


def compose_checkpoint(objective: FlowMatching, **facts: Any) -> Checkpoint:
    """Build an opened LTX-2 checkpoint for image-to-video."""
    info = LTX2ImageInfo(**facts)
    conditioning = FirstFrameTokenConditioning(image_latents=get_image_tokens)
    denoiser = LTX2Denoiser(info=info, objective=objective, conditioning=conditioning)
    return Checkpoint.from_denoiser(denoiser, LTX2ImageEncoders, LTX2ImageSampler)
