"""Chroma text-to-image: flow matching on FLUX.1's packed latents, conditioned on T5.

Prompts, packing, positions and denoising call the stock pipeline's own code
(diffusers/pipelines/chroma/pipeline_chroma.py), except for the mask of captions. Chroma attends to a caption and one
pad behind it. Diffusers 0.42.1 adds its mask of ones and zeros to the logits of attention, so that pads are attended
to, and leaves it out of the single blocks under gradient checkpointing. Here captions are cut to their length and one
pad, so that attention needs no mask, and samples are predicted one by one.

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size, S image tokens (H W / 4), P
packed channels (4 C).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, ChromaPipeline, ChromaTransformer2DModel
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.families.base import Checkpoint, Encoders, Sampler, TensorMap, Tensors, TensorSpec, TextEncoder
from dit_lora.families.captions import get_caption_spec, make_caption_encoder, trim_text_padding
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, compute_mu, read_flow_scheduler
from dit_lora.families.flux.checkpoint import FluxInfo, build_transformer_arguments, pack_latents
from dit_lora.families.latents import PACK_SIZE, compute_token_grid, encode_picture
from dit_lora.families.opening import read_checkpoint
from dit_lora.families.refusals import image_frames_errors, is_named_distilled, side_errors
from dit_lora.numerics.streams import move_to_device


@dataclass(frozen=True, kw_only=True)
class ChromaInfo(FluxInfo):
    """Info (configs, supported shapes) of a Chroma checkpoint."""

    guidance: None = None
    pipeline_class: Any = ChromaPipeline
    supported_options = ()

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        return [*side_errors(shape, self.size_multiple), *image_frames_errors(shape.frames, "Chroma")]

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        name = recipe.model.path
        if self.from_scratch is not None or recipe.has_distillation_safeguard or not is_named_distilled(name, "flash"):
            return []
        return [
            f"distilled: {name} is Chroma1-Flash by its name (no file of it says so): training it directly breaks "
            "sampling in few steps. Train lodestones/Chroma1-HD and sample from this one with validation.model, or "
            "set train.target: guided"
        ]


@dataclass(frozen=True, kw_only=True)
class ChromaEncoders(Encoders):
    info: ChromaInfo
    vae_class = AutoencoderKL
    transform = "chroma-1: pixels / 127.5 - 1, posterior mean and logvar, fp32"

    def text_cache_key(self) -> Mapping[str, Any]:
        return {**super().text_cache_key(), "tokens": self.info.text_tokens}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return get_caption_spec(self.info.text_tokens, self.info.transformer_config["joint_attention_dim"], dtype)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load T5 as Chroma's pipeline uses it: padding is masked, and the mask keeps one pad behind the caption."""
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            # (1, T, D), positions, and ones and zeros (1, T)
            embeddings, _, mask = pipeline.encode_prompt(
                caption,
                device=device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.info.text_tokens,
            )[:3]
            return {"prompt_embeds": embeddings, "prompt_attention_mask": mask == 1}

        return make_caption_encoder(encode_caption)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        return encode_picture(vae, pixels)


@dataclass(frozen=True, kw_only=True)
class ChromaDenoiser(FlowDenoiser):
    info: ChromaInfo
    transformer_class: ClassVar[Any] = ChromaTransformer2DModel

    def compute_shift_mu(self, size: torch.Size) -> float:
        if not self.info.scheduler["use_dynamic_shifting"]:
            return super().compute_shift_mu(size)
        # Packing makes one token of 2 x 2 latents.
        return compute_mu(self.info.scheduler, size[-2] * size[-1] // PACK_SIZE**2)

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        return pack_latents(latents)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, P), with one call of the transformer for each sample.

        The number of calls depends only on the batch's size: ranks of DDP and FSDP must make equally many.
        """
        rows = [
            self._predict_sample(
                transformer, noisy[row : row + 1], timesteps[row : row + 1], text[None, :length], batch
            )
            for row, (text, length) in enumerate(
                zip(batch["prompt_embeds"], batch["prompt_attention_mask"].sum(1).tolist(), strict=True)
            )
        ]
        return torch.cat(rows)

    def _predict_sample(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        text: torch.Tensor,
        batch: TensorMap,
    ) -> torch.Tensor:
        """One call of the transformer for one sample, with text (1, T, D) that has no padding but its one pad."""
        arguments = build_transformer_arguments(noisy, timesteps, text, self.info.guidance)
        del arguments["guidance"]  # no argument of Chroma's transformer
        image_ids = ChromaPipeline._prepare_latent_image_ids(
            len(noisy), *compute_token_grid(batch["latent_mean"]), torch.device("cpu"), text.dtype
        )
        return transformer(
            **arguments,
            # As in encode_prompt: zeros, in the dtype of the text.
            txt_ids=torch.zeros(text.shape[1], 3, device=text.device, dtype=text.dtype),
            img_ids=move_to_device(image_ids, text.device),
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class ChromaSampler(Sampler):
    info: ChromaInfo
    output_field = "images"
    guidance_batch_size = 1  # guidance is a second call

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        """Load the stock pipeline, changed to cut prompts like captions, and to attend without a mask."""
        pipeline = self._load_pipeline(dtype, transformer, text)
        encode = pipeline._get_t5_prompt_embeds

        def encode_cut(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            embeddings, mask = encode(*args, **kwargs)
            caption = _cut_caption({"prompt_embeds": embeddings, "prompt_attention_mask": mask == 1})
            return caption["prompt_embeds"], caption["prompt_attention_mask"]

        pipeline._get_t5_prompt_embeds = encode_cut
        pipeline._prepare_attention_mask = lambda **_: None
        return pipeline

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt}
        return super().prompt_kwargs(_cut_caption(prompt), empty_prompt and _cut_caption(empty_prompt))


def _cut_caption(text: Tensors) -> Tensors:
    embeddings, mask = trim_text_padding(text["prompt_embeds"], text["prompt_attention_mask"])
    # The pipeline requires a mask.
    mask = torch.ones(embeddings.shape[:2], dtype=torch.bool) if mask is None else mask
    return {"prompt_embeds": embeddings, "prompt_attention_mask": mask.to(embeddings.device)}


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a Chroma checkpoint. Raises as `DiffusionFamily.open` does."""
    _, fields = read_checkpoint(model, family.pipeline_names, transformer_class=ChromaTransformer2DModel)
    info = ChromaInfo(**fields, scheduler=read_flow_scheduler(model, fields["path"]))
    denoiser = ChromaDenoiser(info=info, objective=build_flow_matching(info.scheduler))
    return Checkpoint.from_denoiser(denoiser, ChromaEncoders, ChromaSampler)
