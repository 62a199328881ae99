"""CogVideoX image-to-video: 5B-I2V (learned positions) and 1.5-I2V (patches over time, an offset embedding).

The image's latent is concatenated with the noisy latents along the channels, at the first latent frame; the other
frames get zeros (diffusers/pipelines/cogvideo/pipeline_cogvideox_image2video.py).

Shapes: B batch, K encodings of one image, C latent channels, F latent frames, H and W latent size.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXImageToVideoPipeline
from diffusers.video_processor import VideoProcessor
from torch import nn

from dit_lora.config.recipe import Recipe
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import TensorMap, Tensors, VideoEncoder
from dit_lora.families.cogvideox.text_to_video import CogVideoXCheckpoint
from dit_lora.families.pictures import image_errors, to_pil_image
from dit_lora.families.posterior import encode_video, sample_posterior
from dit_lora.families.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.streams import DrawFunctions, draw_integers, draw_uniform, make_generator, normal

# Training noise is added to pixels, but latents are cached: encode this many noisy copies of each image.
NUM_NOISY_ENCODINGS = 4
IMAGE_TRANSFORM = "cogvideox-i2v-1: the pipeline's preprocessing; clean, then noised encodings"
# The pipeline's value for the offset embedding of 1.5 (pipeline_cogvideox_image2video.py, `ofs_emb`).
OFFSET = 2.0


@dataclass(frozen=True, kw_only=True)
class CogVideoXImageCheckpoint(CogVideoXCheckpoint):
    """A CogVideoX image-to-video checkpoint."""

    has_image_noise: bool = True
    image_dropout: float = 0.0
    pipeline_class: ClassVar[Any] = CogVideoXImageToVideoPipeline
    image_arguments: ClassVar[tuple[str, ...]] = ("image",)
    supported_options: ClassVar[tuple[str, ...]] = (
        "data.image_column",
        "data.image_dropout",
        "data.image_noise",
        "validation.images",
    )

    def apply_recipe(self, recipe: Recipe) -> Self:
        """Apply `data.image_noise` and `data.image_dropout`. Raises `DitLoraError` if prompts lack first images."""
        checkpoint = super().apply_recipe(recipe)
        data, problems = recipe.data, image_errors(recipe.validation, self.image_arguments)
        # A flipped clip with an unflipped first image would train on a contradiction.
        if data.flip:
            problems.append("data.flip does not apply, because the first image would not be mirrored; remove it")
        if problems:
            raise DitLoraError(format_list(f"{self.path.name} is image-to-video", problems))
        noise = data.image_noise is not False
        return replace(checkpoint, has_image_noise=noise, image_dropout=data.image_dropout)

    def latent_cache_key(self) -> Mapping[str, Any]:
        encodings = 1 + NUM_NOISY_ENCODINGS * self.has_image_noise
        return {**super().latent_cache_key(), "image": f"{IMAGE_TRANSFORM}: {encodings}"}

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE. Samples keep the posteriors of the clip and of its first image, (K, C, 1, H, W).

        The image's first encoding is clean, the others have noise on the pixels.
        """
        vae = memory.load(AutoencoderKLCogVideoX, self.path, dtype, device)
        processor = VideoProcessor(vae_scale_factor=self.spatial_factor)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            picture = pixels[0] if image is None else image
            clean = processor.preprocess(to_pil_image(picture))
            images = [clean, *(generate_noisy_images(picture, clean) if self.has_image_noise else ())]
            # One at a time: in a batch, the last bits of a result would depend on the other images.
            posteriors = [vae.encode(pixels_BCHW.to(device, dtype)[:, :, None]).latent_dist for pixels_BCHW in images]
            return encode_video(vae, pixels) | {
                "image_latent_mean": torch.cat([posterior.mean for posterior in posteriors]),
                "image_latent_logvar": torch.cat([posterior.logvar for posterior in posteriors]),
            }

        return encode

    def draw_functions(self, batch: TensorMap) -> DrawFunctions:
        """Random tensors of the clip, plus the image's encoding, its latent, and whether the image is dropped."""
        # (B, K, C, 1, H, W): K encodings of one image, each with the shape (C, 1, H, W).
        encodings, *shape = batch["image_latent_mean"].shape[1:]
        image_draws: DrawFunctions = {
            "image_posterior": partial(normal, shape),
            "image_dropout": lambda rows: draw_uniform(rows) >= self.image_dropout,
        }
        noised: DrawFunctions = {"image_noise": partial(draw_integers, 1, encodings)} if encodings > 1 else {}
        return {**super().draw_functions(batch), **image_draws, **noised}

    def _predict_in_training(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
        random_tensors: TensorMap,
    ) -> torch.Tensor:
        """Predict with a latent of the randomly chosen image encoding, or with zeros if the image is dropped."""
        mean, logvar = batch["image_latent_mean"], batch["image_latent_logvar"]
        rows = torch.arange(len(mean), device=mean.device)
        # Index of the image's encoding per sample; 0 is the clean one.
        encoding_index = random_tensors.get("image_noise", 0 * rows)
        latent = sample_posterior(
            mean[rows, encoding_index], logvar[rows, encoding_index], random_tensors["image_posterior"]
        )
        # A dropped image becomes zeros.
        has_image = random_tensors["image_dropout"].view(-1, 1, 1, 1, 1)
        return self._predict_with_image(transformer, noisy, timesteps, batch, latent * has_image)

    def predict(
        self,
        transformer: nn.Module,
        noisy_BFCHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
    ) -> torch.Tensor:
        """Predict the velocity with the mean latent of the clean image; equal to one call of the stock pipeline."""
        clean = batch["image_latent_mean"][:, 0].float()
        return self._predict_with_image(transformer, noisy_BFCHW, timesteps, batch, clean)

    def _predict_with_image(
        self,
        transformer: nn.Module,
        noisy_BFCHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
        image_BCFHW: torch.Tensor,
    ) -> torch.Tensor:
        scale = self.vae_config["scaling_factor"]
        # Image latents of 1.5 are divided by the scaling factor instead of multiplied, as its VAE's config says.
        inverted = self.vae_config.get("invert_scale_latents", False)
        # (B, C, 1, H, W) -> (B, 1, C, H, W)
        image = image_BCFHW.transpose(1, 2) * (1 / scale if inverted else scale)
        image_channels = torch.zeros_like(noisy_BFCHW)
        # Only the first latent frame has the image; the other frames stay zero.
        image_channels[:, :1] = image
        prompt_embeds = batch["prompt_embeds"]
        has_offset = self.transformer_config["ofs_embed_dim"] is not None
        arguments = {"ofs": prompt_embeds.new_full((1,), OFFSET)} if has_offset else {}
        # (B, F, 2 C, H, W)
        hidden = torch.cat([noisy_BFCHW, image_channels], dim=2)
        return self._run_transformer(transformer, hidden, timesteps, prompt_embeds, **arguments)


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
