"""FLUX.1 dev, schnell and Kontext: flow matching on packed latents, conditioned on T5 and CLIP's pooled output.

Prompts, packing, positions, the shift by resolution and denoising call the stock pipeline's own code
(diffusers/pipelines/flux/pipeline_flux.py). FLUX.2 shares these classes in `flux2.checkpoint`.

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size, S image tokens (H W / 4), P
packed channels (4 C).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKL, FluxKontextPipeline, FluxPipeline, FluxTransformer2DModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from PIL import Image
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError
from dit_lora.families.base import (
    Checkpoint,
    CheckpointInfo,
    Encoders,
    Sampler,
    TensorMap,
    Tensors,
    TensorSpec,
    TextEncoder,
    VideoEncoder,
)
from dit_lora.families.captions import make_caption_encoder
from dit_lora.families.conditioning import Conditioning
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, compute_mu, read_flow_scheduler
from dit_lora.families.latents import (
    PACK_SIZE,
    PLAIN_VAE,
    VaeMemory,
    append_references,
    compute_token_grid,
    encode_picture,
)
from dit_lora.families.opening import read_checkpoint
from dit_lora.families.references import (
    PictureEncoder,
    ReferenceSpec,
    compute_scaled_size,
    get_reference_latents,
    min_side_error,
)
from dit_lora.families.refusals import image_frames_errors, side_errors
from dit_lora.numerics.streams import move_to_device

# The value that is meant to switch guidance off: sd-scripts (docs/flux_train_network.md) and musubi-tuner
# (flux_kontext_train_network.py) train with it. Diffusers' scripts use 3.5, which is a sampling value.
TRAINING_GUIDANCE = 1.0
TEXT_COMPONENTS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


@dataclass(frozen=True, kw_only=True)
class FluxInfo(CheckpointInfo):
    """Info (configs, supported shapes) of a FLUX.1 text-to-image checkpoint."""

    scheduler: Mapping[str, Any]
    """The scheduler's config, filled with its class's defaults."""
    guidance: float | None
    """Value of the guidance embedding in training; None if the transformer has none."""
    pipeline_class: Any = FluxPipeline
    supported_options: ClassVar[tuple[str, ...]] = ("train.guidance_scale",)

    @property
    def size_multiple(self) -> int:
        # The pipeline's vae_scale_factor times its packing by two.
        return 2 * 2 ** (len(self.vae_config["block_out_channels"]) - 1)

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        return [*side_errors(shape, self.size_multiple), *image_frames_errors(shape.frames, "FLUX")]

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        info, guidance = super().copy_with_recipe_settings(recipe, training_options), recipe.train.guidance_scale
        # Without the option, the checkpoint's own value stays.
        if guidance is None:
            return info
        if self.guidance is None:
            raise DitLoraError(
                f"train.guidance_scale: {self.path.name} has no guidance embedding (guidance_embeds in its "
                f"transformer's config is false); got {guidance:g}, leave it out"
            )
        return replace(info, guidance=guidance)

    def training_metadata(self) -> dict[str, Any]:
        guidance = {} if self.guidance is None else {"guidance_scale": self.guidance}
        return super().training_metadata() | guidance

    def copy_with_training_metadata(self, metadata: Mapping[str, Any]) -> Self:
        # Adapters that do not record it keep the checkpoint's value.
        guidance = metadata.get("guidance_scale", self.guidance)
        return replace(super().copy_with_training_metadata(metadata), guidance=guidance)

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        # FLUX.1 checkpoints without a guidance embedding, such as schnell, are distilled.
        if self.guidance is not None:
            return [f"guidance: trained at an embedded guidance of {self.guidance:g}"]
        if recipe.has_distillation_safeguard:
            return []
        return [
            f"distilled: {self.path.name} has no guidance embedding, like FLUX.1-schnell: training may lose sampling "
            "in one to four steps. FLUX.1-dev is the usual base; train.target: guided keeps sampling without guidance"
        ]


@dataclass(frozen=True, kw_only=True)
class KontextInfo(FluxInfo):
    """Info of a FLUX.1-Kontext checkpoint, which edits a reference image."""

    pipeline_class: Any = FluxKontextPipeline

    @property
    def reference_spec(self) -> ReferenceSpec:
        return ReferenceSpec(1, 1, self.compute_reference_shape, self._reference_error)

    def compute_reference_shape(self, height: int, width: int, shape: VideoShape) -> VideoShape:
        """Shape at which a reference is encoded.

        It is one of the pipeline's preferred sizes, or its own size within `data.reference_resolution`.
        """
        step = self.size_multiple
        if self.reference_resolution is None:
            # The preferred size with the nearest aspect ratio, as the pipeline selects it.
            ratio = width / height
            _, width, height = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        else:
            height, width = compute_scaled_size(height, width, self.reference_resolution)
        # Round down to whole packed latents.
        return VideoShape(1, height // step * step, width // step * step)

    def _reference_error(self, height: int, width: int) -> str | None:
        if self.reference_resolution is None:
            return None
        return min_side_error(compute_scaled_size(height, width, self.reference_resolution), self.size_multiple)


@dataclass(frozen=True, kw_only=True)
class FluxEncoders(Encoders):
    info: FluxInfo
    vae_class = AutoencoderKL
    tokenizer_folder = "tokenizer_2"  # T5's. CLIP, which gives a single vector, reads 77 tokens.
    transform = "flux-1: pixels / 127.5 - 1, posterior mean and logvar, fp32"

    def text_cache_key(self) -> Mapping[str, Any]:
        # All text components, since a change of any of them changes the embeddings.
        folders = {name: self.info.path / name for name in TEXT_COMPONENTS}
        return {**folders, "tokens": self.info.text_tokens}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        config = self.info.transformer_config
        return {
            "prompt_embeds": (torch.Size((self.info.text_tokens, config["joint_attention_dim"])), dtype),
            "pooled_prompt_embeds": (torch.Size((config["pooled_projection_dim"],)), dtype),
        }

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load T5 and CLIP as FLUX.1's pipeline uses them: T5 and the transformer attend to T5's padding."""
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            # (1, T, D) and (1, pooled width)
            embeddings, pooled = pipeline.encode_prompt(
                prompt=caption, prompt_2=None, device=device, max_sequence_length=self.info.text_tokens
            )[:2]
            return {"prompt_embeds": embeddings, "pooled_prompt_embeds": pooled}

        return make_caption_encoder(encode_caption)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        return encode_picture(vae, pixels)


@dataclass(frozen=True, kw_only=True)
class KontextEncoders(FluxEncoders):
    info: KontextInfo

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE in fp32. Samples keep the image's posterior and the reference's normalised mode, (C, H, W)."""
        vae = self.load_vae(dtype, device, memory)
        pipeline: Any = SimpleNamespace(vae=vae)
        processor = VaeImageProcessor(vae_scale_factor=self.info.size_multiple)

        def encode_reference(picture: Image.Image) -> torch.Tensor:
            shape = self.info.compute_reference_shape(picture.height, picture.width, VideoShape(1, 0, 0))
            resized = processor.resize(picture, shape.height, shape.width)
            values = processor.preprocess(resized, shape.height, shape.width).to(device)
            # Normalised mode of the posterior, (1, C, H, W), so no noise is drawn.
            return FluxKontextPipeline._encode_vae_image(pipeline, values, generator=None)[0]

        return PictureEncoder(partial(self.encode_pixels, vae), encode_reference, self.info.reference_resolution)


@dataclass(frozen=True, kw_only=True)
class FluxDenoiser(FlowDenoiser):
    info: FluxInfo
    transformer_class: ClassVar[Any] = FluxTransformer2DModel

    def compute_shift_mu(self, size: torch.Size) -> float:
        # Packing makes one token of 2 x 2 latents. Tokens of references do not count.
        return compute_mu(self.info.scheduler, size[-2] * size[-1] // PACK_SIZE**2)

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        return pack_latents(latents)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, P); equal to one call of the stock pipeline."""
        text = batch["prompt_embeds"]
        arguments = {
            **build_transformer_arguments(noisy, timesteps, text, self.info.guidance),
            "pooled_projections": batch["pooled_prompt_embeds"],
            # As in encode_prompt: zeros, in the dtype of the text.
            "txt_ids": torch.zeros(text.shape[1], 3, device=text.device, dtype=text.dtype),
            "img_ids": move_to_device(_compute_image_ids(batch["latent_mean"], text.dtype), text.device),
        }
        arguments = self.conditioning.append_conditioning_tokens(arguments, batch)
        # Keep the output for the noisy tokens only.
        return transformer(**arguments, return_dict=False)[0][:, : noisy.shape[1]]


@dataclass(frozen=True, kw_only=True)
class KontextConditioning(Conditioning):
    """Conditioning on references whose tokens follow the noisy ones, clean and at the same timestep."""

    def append_conditioning_tokens(self, transformer_kwargs: dict[str, Any], batch: TensorMap) -> dict[str, Any]:
        # (S, 3), the same for every sample of the batch.
        image_ids = transformer_kwargs["img_ids"]
        for latents in get_reference_latents(batch):
            ids = _compute_image_ids(latents, image_ids.dtype)
            # The first position axis tells the reference (1) from the image (0).
            ids[..., 0] = 1
            image_ids = torch.cat([image_ids, move_to_device(ids, image_ids.device)])
        hidden_states = append_references(transformer_kwargs["hidden_states"], batch, pack_latents)
        return transformer_kwargs | {"hidden_states": hidden_states, "img_ids": image_ids}


@dataclass(frozen=True, kw_only=True)
class FluxSampler(Sampler):
    info: FluxInfo
    output_field = "images"
    guidance_batch_size = 1  # guidance is an input, or a second call

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        # Guidance is an input of the network, so there is no prediction for "".
        return {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)


@dataclass(frozen=True, kw_only=True)
class KontextSampler(FluxSampler):
    info: KontextInfo

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        # By default, the pipeline generates one megapixel, whatever height and width are passed.
        return {
            **super().shape_kwargs(shape),
            "max_area": shape.height * shape.width,
            "_auto_resize": self.info.reference_resolution is None,
        }


def pack_latents(latents: torch.Tensor) -> torch.Tensor:
    """Pack FLUX.1 latents (B, C, H, W) in squares of two by two, (B, S, P), with the pipeline's method."""
    batch, channels, height, width = latents.shape
    return FluxPipeline._pack_latents(latents, batch, channels, height, width)


def build_transformer_arguments(
    noisy: torch.Tensor, timesteps: torch.Tensor, text: torch.Tensor, guidance: float | None
) -> dict[str, Any]:
    """Transformer arguments that FLUX.1 and FLUX.2 share."""
    return {
        "hidden_states": noisy.to(text.dtype),  # the dtype of the pipeline's latents
        # Round before dividing, as the pipeline does: in bf16 the network sees 8 bits of the timestep.
        "timestep": timesteps.to(text.dtype) / 1000,
        # One value for the batch, as in the pipeline.
        "guidance": None if guidance is None else torch.full([1], guidance, device=noisy.device).expand(len(noisy)),
        "encoder_hidden_states": text,
    }


def _compute_image_ids(latents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Positions (S, 3) of the tokens of latents, on the CPU, computed with the pipeline's method."""
    return FluxPipeline._prepare_latent_image_ids(
        len(latents), *compute_token_grid(latents), torch.device("cpu"), dtype
    )


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a FLUX.1 checkpoint. Raises as `DiffusionFamily.open` does."""
    index, fields = read_flux_checkpoint(
        model, family, weights=("vae", "text_encoder", "text_encoder_2"), transformer_class=FluxTransformer2DModel
    )
    objective = build_flow_matching(fields["scheduler"])
    if index["_class_name"] == FluxKontextPipeline.__name__:
        kontext_info = KontextInfo(**fields)
        denoiser = FluxDenoiser(info=kontext_info, objective=objective, conditioning=KontextConditioning())
        return Checkpoint.from_denoiser(denoiser, KontextEncoders, KontextSampler)
    info = FluxInfo(**fields)
    denoiser = FluxDenoiser(info=info, objective=objective)
    return Checkpoint.from_denoiser(denoiser, FluxEncoders, FluxSampler)


def read_flux_checkpoint(
    model: ModelConfig,
    family: DiffusionFamily,
    *,
    weights: Sequence[str] = ("vae", "text_encoder"),
    transformer_class: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Index and info fields of a FLUX.1 or FLUX.2 checkpoint, as `read_checkpoint` returns them."""
    index, fields = read_checkpoint(model, family.pipeline_names, weights=weights, transformer_class=transformer_class)
    guidance = TRAINING_GUIDANCE if fields["transformer_config"]["guidance_embeds"] else None
    return index, {**fields, "scheduler": read_flow_scheduler(model, fields["path"]), "guidance": guidance}
