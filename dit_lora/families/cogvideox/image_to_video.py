"""CogVideoX image-to-video: 5B-I2V (learned positions) and 1.5-I2V (patches over time, an offset embedding).

The image's latent is concatenated with the noisy latents along the channels, at the first latent frame; the other
frames get zeros (diffusers/pipelines/cogvideo/pipeline_cogvideox_image2video.py).

Shapes: B batch, K encodings of one image, C latent channels, F latent frames, H and W latent size.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from diffusers import CogVideoXImageToVideoPipeline
from diffusers.video_processor import VideoProcessor

from dit_lora.config.recipe import Recipe
from dit_lora.families.base import TensorMap, Tensors, VideoEncoder
from dit_lora.families.cogvideox.text_to_video import CogVideoXEncoders, CogVideoXInfo
from dit_lora.families.conditioning import Conditioning
from dit_lora.families.latents import PLAIN_VAE, VaeMemory, sample_posterior
from dit_lora.families.pictures import require_images, to_pil_image
from dit_lora.numerics.streams import DrawFunctions, draw_integers, draw_normal_noise, draw_uniform, make_generator

# Training noise is added to pixels, but latents are cached: encode this many noisy copies of each image.
NUM_NOISY_ENCODINGS = 4
IMAGE_TRANSFORM = "cogvideox-i2v-1: the pipeline's preprocessing; clean, then noised encodings"
# The pipeline's value for the offset embedding of 1.5 (pipeline_cogvideox_image2video.py, `ofs_emb`).


@dataclass(frozen=True, kw_only=True)
class CogVideoXImageInfo(CogVideoXInfo):
    """Info (configs, supported shapes) of a CogVideoX checkpoint for image-to-video."""

    has_image_noise: bool = True
    """True if the first image has encodings with noise too (`data.image_noise`)."""
    pipeline_class: ClassVar[Any] = CogVideoXImageToVideoPipeline
    image_argument_names: ClassVar[tuple[str, ...]] = ("image",)
    supported_options: ClassVar[tuple[str, ...]] = ("data.image_column", "data.image_noise", "validation.images")

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        """Apply the recipe's settings, such as `data.image_noise`.

        Raises `DitLoraError` if prompts lack first images.
        """
        info, problems = super().copy_with_recipe_settings(recipe, training_options), []
        # A flipped clip with an unflipped first image would train on a contradiction.
        if recipe.data.flip:
            problems.append("data.flip does not apply, because the first image would not be mirrored; remove it")
        require_images(self.path.name, recipe.validation, self.image_argument_names, problems)
        # None in the recipe is the default: noise.
        return replace(info, has_image_noise=recipe.data.image_noise is not False)


@dataclass(frozen=True, kw_only=True)
class CogVideoXImageEncoders(CogVideoXEncoders):
    """Text encoder and VAE of a CogVideoX checkpoint for image-to-video."""

    info: CogVideoXImageInfo

    def latent_cache_key(self) -> Mapping[str, Any]:
        encodings = 1 + NUM_NOISY_ENCODINGS * self.info.has_image_noise
        return {**super().latent_cache_key(), "image": f"{IMAGE_TRANSFORM}: {encodings}"}

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE. Samples keep the posteriors of the clip and of its first image, (K, C, 1, H, W).

        The image's first encoding is clean, the others have noise on the pixels.
        """
        vae = self.load_vae(dtype, device, memory)
        processor = VideoProcessor(vae_scale_factor=self.info.spatial_factor)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            picture = pixels[0] if image is None else image
            clean = processor.preprocess(to_pil_image(picture))
            images = [clean, *(generate_noisy_images(picture, clean) if self.info.has_image_noise else ())]
            # One at a time: in a batch, the last bits of a result would depend on the other images.
            posteriors = [vae.encode(pixels_BCHW.to(device, dtype)[:, :, None]).latent_dist for pixels_BCHW in images]
            return self.encode_pixels(vae, pixels) | {
                "image_latent_mean": torch.cat([posterior.mean for posterior in posteriors]),
                "image_latent_logvar": torch.cat([posterior.logvar for posterior in posteriors]),
            }

        return encode


@dataclass(frozen=True, kw_only=True)
class ImageChannelConditioning(Conditioning):
    """Conditioning that appends the first image's latents to the noisy latents as further channels."""

    vae_config: Mapping[str, Any]
    image_dropout: float = 0.0
    """Share of samples that train without their image (`data.image_dropout`)."""
    supported_options: ClassVar[tuple[str, ...]] = ("data.image_dropout",)

    def copy_with_recipe_settings(self, recipe: Recipe) -> Self:
        return replace(self, image_dropout=recipe.data.image_dropout)

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        """Random tensors of image conditioning.

        They are noise for the image's latent, whether the image is dropped, and which of its encodings is used.
        """
        # (B, K, C, 1, H, W): K encodings of one image, each with the shape (C, 1, H, W).
        encodings, *shape = batch["image_latent_mean"].shape[1:]
        image_draws: DrawFunctions = {
            "image_posterior": partial(draw_normal_noise, shape),
            "image_dropout": lambda rows: draw_uniform(rows) >= self.image_dropout,
        }
        noised: DrawFunctions = {"image_noise": partial(draw_integers, 1, encodings)} if encodings > 1 else {}
        return {**image_draws, **noised}

    def append_channels(self, latents: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Latents with the image's as further channels: (B, F, 2 C, H, W) from noisy ones (B, F, C, H, W)."""
        scale = self.vae_config["scaling_factor"]
        # Image latents of 1.5 are divided by the scaling factor instead of multiplied, as its VAE's config says.
        inverted = self.vae_config.get("invert_scale_latents", False)
        # (B, C, 1, H, W) -> (B, 1, C, H, W)
        image = self._sample_image_latents(batch, random_tensors).transpose(1, 2) * (1 / scale if inverted else scale)
        image_channels = torch.zeros_like(latents)
        # Only the first latent frame has the image; the other frames stay zero.
        image_channels[:, :1] = image
        return torch.cat([latents, image_channels], dim=2)

    def _sample_image_latents(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """A latent of the randomly chosen image encoding, (B, C, 1, H, W), or zeros if the image is dropped.

        Without random tensors, the mean latent of the clean image, as in the pipeline.
        """
        mean, logvar = batch["image_latent_mean"], batch["image_latent_logvar"]
        if not random_tensors:
            return mean[:, 0].float()
        rows = torch.arange(len(mean), device=mean.device)
        # Index of the image's encoding per sample; 0 is the clean one.
        encoding_index = random_tensors.get("image_noise", 0 * rows)
        latent = sample_posterior(
            mean[rows, encoding_index], logvar[rows, encoding_index], random_tensors["image_posterior"]
        )
        # A dropped image becomes zeros.
        return latent * random_tensors["image_dropout"].view(-1, 1, 1, 1, 1)


def generate_noisy_images(pixels: torch.Tensor, clean_image: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield copies of `clean_image` with noise of scale exp(N(-3, 0.5)), as in CogVideo (finetune/,
    `image_noise_sigma`).

    The noise is a function of the image's pixels, so a sample is encoded the same way in every run.
    """
    digest = hashlib.sha256(pixels.cpu().contiguous().numpy().data).hexdigest()
    for number in range(NUM_NOISY_ENCODINGS):
        draws = make_generator(0, "image_noise", digest, number)
        sigma = torch.exp(-3.0 + 0.5 * torch.randn((), generator=draws))
        yield clean_image + sigma * torch.randn(clean_image.shape, generator=draws)
