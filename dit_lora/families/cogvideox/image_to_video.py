"""CogVideoX image-to-video: 5B-I2V (learned positions) and 1.5-I2V (patches over time, an offset embedding).

The first image's latent stands beside the noisy latents, in channels of its own, at the first place in time;
zeros stand at the others (diffusers/pipelines/cogvideo/pipeline_cogvideox_image2video.py).

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
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import Tensors, VideoEncoder
from dit_lora.families.cogvideox.text_to_video import CogVideoXCheckpoint
from dit_lora.families.pictures import as_picture, wrong_pictures
from dit_lora.families.posterior import drawn, encode_video
from dit_lora.families.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.streams import Draws, generator, integers, normal

# Latents are cached, and this noise is on pixels: so many draws of it are encoded for each image.
NOISED_ENCODINGS = 4
IMAGE_TRANSFORM = "cogvideox-i2v-1: the pipeline's preprocessing; clean, then noised encodings"
# What the pipeline gives the offset embedding of 1.5 (pipeline_cogvideox_image2video.py, `ofs_emb`).
OFFSET = 2.0


@dataclass(frozen=True, kw_only=True)
class CogVideoXImageCheckpoint(CogVideoXCheckpoint):
    """One CogVideoX image-to-video checkpoint."""

    image_noise: bool = True
    image_dropout: float = 0.0
    pipeline_class: ClassVar[Any] = CogVideoXImageToVideoPipeline
    pictures: ClassVar[tuple[str, ...]] = ("image",)
    takes: ClassVar[tuple[str, ...]] = (
        "data.image_column",
        "data.image_dropout",
        "data.image_noise",
        "validation.images",
    )

    def for_recipe(self, recipe: Recipe) -> Self:
        """Take `data.image_noise` and `data.image_dropout` from the recipe; refuse prompts without their first images."""
        fitting = super().for_recipe(recipe)
        data, wrong = recipe.data, wrong_pictures(recipe.validation, self.pictures)
        if data.flip:
            wrong.append(
                "data.flip: it would not mirror a first image of the clip's own; remove it"
            )
        if wrong:
            raise DitLoraError(listed(f"{self.path.name} is image-to-video", wrong))
        noise = data.image_noise is not False
        return replace(fitting, image_noise=noise, image_dropout=data.image_dropout)

    def video_facts(self) -> Mapping[str, Any]:
        encodings = 1 + NOISED_ENCODINGS * self.image_noise
        return {**super().video_facts(), "image": f"{IMAGE_TRANSFORM}: {encodings}"}

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """The clip's posterior, and its first image's: (K, C, 1, H, W), a clean encoding and then noised ones."""
        vae = memory.load(AutoencoderKLCogVideoX, self.path, dtype, device)
        processor = VideoProcessor(vae_scale_factor=self.spatial_factor)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            first = pixels[0] if image is None else image
            clean = processor.preprocess(as_picture(first))
            images = [clean, *(noised_images(first, clean) if self.image_noise else ())]
            # One at a time: in a batch, the last bits would depend on the neighbours.
            posteriors = [
                vae.encode(one.to(device, dtype)[:, :, None]).latent_dist for one in images
            ]
            return encode_video(vae, pixels) | {
                "image_latent_mean": torch.cat([posterior.mean for posterior in posteriors]),
                "image_latent_logvar": torch.cat([posterior.logvar for posterior in posteriors]),
            }

        return encode

    def draws(self, batch: Mapping[str, torch.Tensor]) -> Draws:
        """Draws of the clip, and which encoding of the image, its latent, and whether it is left out."""
        encodings, *shape = batch["image_latent_mean"].shape[1:]
        own: Draws = {
            "image_posterior": partial(normal, shape),
            "image_dropout": lambda rows: (
                torch.cat([torch.rand(1, generator=row) for row in rows]) >= self.image_dropout
            ),
        }
        noised: Draws = {"image_noise": partial(integers, 1, encodings)} if encodings > 1 else {}
        return {**super().draws(batch), **own, **noised}

    def _drawn_prediction(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Beside a latent of the image, of the encoding that was drawn, or beside none where it is left out."""
        mean, logvar = batch["image_latent_mean"], batch["image_latent_logvar"]
        rows = torch.arange(len(mean), device=mean.device)
        pick = given.get("image_noise", 0 * rows)
        latent = drawn(mean[rows, pick], logvar[rows, pick], given["image_posterior"])
        kept = given["image_dropout"].view(-1, 1, 1, 1, 1)
        return self._with_image(transformer, noisy, timesteps, batch, latent * kept)

    def predict(
        self,
        transformer: nn.Module,
        noisy_BFCHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The network's velocity beside the clean image's mean latent; one call of the stock pipeline's."""
        clean = batch["image_latent_mean"][:, 0].float()
        return self._with_image(transformer, noisy_BFCHW, timesteps, batch, clean)

    def _with_image(
        self,
        transformer: nn.Module,
        noisy_BFCHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        image_BCFHW: torch.Tensor,
    ) -> torch.Tensor:
        scale = self.vae_config["scaling_factor"]
        # 1.5's image latents were divided where others are multiplied; its VAE's config says so.
        inverted = self.vae_config.get("invert_scale_latents", False)
        image = image_BCFHW.transpose(1, 2) * (1 / scale if inverted else scale)
        beside = torch.zeros_like(noisy_BFCHW)
        beside[:, :1] = image
        prompt_embeds = batch["prompt_embeds"]
        has_offset = self.transformer_config["ofs_embed_dim"] is not None
        arguments = {"ofs": prompt_embeds.new_full((1,), OFFSET)} if has_offset else {}
        hidden = torch.cat([noisy_BFCHW, beside], dim=2)
        return self._call(transformer, hidden, timesteps, prompt_embeds, **arguments)


def noised_images(pixels: torch.Tensor, clean: torch.Tensor) -> Iterator[torch.Tensor]:
    """`clean` with noise of scale exp(N(-3, 0.5)), as CogVideo trains (finetune/, `image_noise_sigma`).

    The draws are a function of the image's pixels, so that a sample is encoded the same in every run.
    """
    digest = hashlib.sha256(pixels.cpu().contiguous().numpy().data).hexdigest()
    for number in range(NOISED_ENCODINGS):
        draws = generator(0, "image_noise", digest, number)
        sigma = torch.exp(-3.0 + 0.5 * torch.randn((), generator=draws))
        yield clean + sigma * torch.randn(clean.shape, generator=draws)
