"""FLUX.2, from text and any number of references: klein-base (Qwen3), and dev (Mistral 3, embedded guidance).

Like FLUX.1, it is flow matching on packed latents. Prompts, packing, normalisation, positions, the shift and denoising
call the stock pipelines' own code (diffusers/pipelines/flux2/pipeline_flux2.py, pipeline_flux2_klein.py).

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size, S image tokens (H W / 4), P
packed channels (4 C).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from PIL import Image
from torch import nn
from transformers import AutoTokenizer

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError
from dit_lora.families.base import (
    Checkpoint,
    Encoders,
    TensorMap,
    Tensors,
    TensorSpec,
    TextEncoder,
    TextLimit,
    VideoEncoder,
)
from dit_lora.families.captions import compute_caption_token_limit, make_caption_encoder
from dit_lora.families.conditioning import Conditioning
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, build_flow_matching, compute_mu
from dit_lora.families.flux.checkpoint import (
    FluxInfo,
    FluxSampler,
    build_transformer_arguments,
    pack_latents,
    read_flux_checkpoint,
)
from dit_lora.families.latents import PACK_SIZE, PLAIN_VAE, VaeMemory, append_references
from dit_lora.families.opening import get_call_default
from dit_lora.families.references import (
    PictureEncoder,
    ReferenceSpec,
    compute_scaled_size,
    get_reference_latents,
    min_side_error,
)
from dit_lora.families.refusals import KEEP_DISTILLATION
from dit_lora.numerics.streams import move_to_device

# The pipelines' limits for references (Flux2ImageProcessor.check_image_input), and the size to which they scale larger
# ones by default.
_MIN_SIDE, _MAX_RATIO, _MAX_PIXELS = 64, 8, 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Flux2Info(FluxInfo):
    """Info (configs, supported shapes) of a FLUX.2 dev or klein checkpoint."""

    pipeline_class: Any = Flux2Pipeline
    is_distilled: bool = False
    """`is_distilled` of klein's model_index.json: the checkpoint samples in four steps."""

    @property
    def is_klein(self) -> bool:
        # Only model_index.json tells klein from dev, by the pipeline's class.
        return self.pipeline_class is Flux2KleinPipeline

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        if self.is_distilled and not recipe.has_distillation_safeguard:
            raise DitLoraError(
                f"{self.path.name} is step-distilled (is_distilled in its model_index.json), and training on it "
                "undoes that; train its base, black-forest-labs/FLUX.2-klein-base-4B or -9B, whose adapter loads "
                f"into both, and sample from this one with validation.model; or {KEEP_DISTILLATION}"
            )
        return super().copy_with_recipe_settings(recipe, training_options)

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        # FLUX.1's notes are not true of klein: its base has no guidance embedding either, but is not distilled.
        return [] if self.is_klein else super().recipe_notes(recipe)

    def lora_targets(self, defaults: Sequence[str]) -> tuple[str, ...]:
        """Default LoRA targets of FLUX.2: the family's, plus the output layer of each single block by its full name.

        Those output layers are linear layers called `to_out`. In the double blocks `to_out` is a list, so the short
        name would match both.
        """
        single = range(self.transformer_config["num_single_layers"])
        return (*defaults, *(f"single_transformer_blocks.{i}.attn.to_out" for i in single))

    @property
    def max_reference_pixels(self) -> int:
        """Maximum number of pixels of a reference; larger ones are scaled down.

        It is the pipeline's 1024x1024, or `data.reference_resolution` squared if that is larger. Black Forest Labs'
        own code allows 2024x2024 pixels for a single reference and 1024x1024 for each of several.
        """
        return max(_MAX_PIXELS, (self.reference_resolution or 0) ** 2)

    @property
    def reference_spec(self) -> ReferenceSpec:
        return ReferenceSpec(0, None, self._reference_shape, self._reference_error)

    def _reference_shape(self, height: int, width: int, shape: VideoShape) -> VideoShape:
        """Shape at which a reference is encoded.

        It is the reference's size, limited to `max_reference_pixels` and rounded down to `size_multiple`.
        """
        # First the recipe's limit, then the pipeline's.
        height, width = compute_scaled_size(height, width, self.reference_resolution)
        if height * width > self.max_reference_pixels:
            # Flux2ImageProcessor._resize_to_target_area
            scale = math.sqrt(self.max_reference_pixels / (width * height))
            height, width = int(height * scale), int(width * scale)
        step = self.size_multiple
        return VideoShape(1, height // step * step, width // step * step)

    def _reference_error(self, height: int, width: int) -> str | None:
        """Error message for a reference of this size that the pipeline's `check_image_input` would reject.

        None if it accepts it.
        """
        height, width = compute_scaled_size(height, width, self.reference_resolution)
        if max(height, width) > _MAX_RATIO * min(height, width):
            return f"it is {width} x {height}, and one side may be {_MAX_RATIO} times the other"
        return min_side_error((height, width), _MIN_SIDE)


@dataclass(frozen=True, kw_only=True)
class Flux2Encoders(Encoders):
    info: Flux2Info
    vae_class = AutoencoderKLFlux2
    transform = "flux2-1: pixels / 127.5 - 1, posterior mode, normalised in squares of two by two, fp32"

    def load_text_limit(self) -> TextLimit:
        """Number of caption tokens that fit in the chat template of FLUX.2's text encoder."""
        return compute_caption_token_limit(self.info.pipeline_class, load_tokenizer(self.info), self.info.text_tokens)

    def text_cache_key(self) -> Mapping[str, Any]:
        return {
            **super().text_cache_key(),
            "tokens": self.info.text_tokens,
            # The hidden states of these layers, concatenated, are the embeddings.
            "layers": list(self._text_encoder_layers),
            # dev's pipeline puts a system message before each caption.
            "system_message": None if self.info.is_klein else SYSTEM_MESSAGE,
        }

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        # Three layers of hidden states side by side have the width that the transformer expects.
        size = (self.info.text_tokens, self.info.transformer_config["joint_attention_dim"])
        return {"prompt_embeds": (torch.Size(size), dtype)}

    def load_text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        # Pass the tokenizer, because the pipeline would load dev's image processor in its place.
        return self._load_text_pipeline(dtype, device, tokenizer=load_tokenizer(self.info))

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load FLUX.2's language model; embeddings are hidden states of three layers, concatenated.

        The transformer attends to the padding, as in the pipeline.
        """
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> Tensors:
            encoded = pipeline.encode_prompt(
                prompt=caption,
                device=device,
                max_sequence_length=self.info.text_tokens,
                text_encoder_out_layers=self._text_encoder_layers,
            )
            return {"prompt_embeds": encoded[0]}

        return make_caption_encoder(encode_caption)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        return {"latent_mean": _encode_latents(vae, pixels.float() / 127.5 - 1)}

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE. Images and references are kept as the normalised mode of the posterior, (C, H, W)."""
        vae = self.load_vae(dtype, device, memory)
        processor = Flux2ImageProcessor(vae_scale_factor=self.info.size_multiple)

        def encode_reference(picture: Image.Image) -> torch.Tensor:
            # The same three steps as in the pipeline: scale down, round the sides down, crop.
            picture = Flux2ImageProcessor._resize_if_exceeds_area(picture, self.info.max_reference_pixels)
            height, width = (side // self.info.size_multiple * self.info.size_multiple for side in picture.size[::-1])
            return _encode_latents(vae, processor.preprocess(picture, height, width, resize_mode="crop"))

        return PictureEncoder(partial(self.encode_pixels, vae), encode_reference, self.info.reference_resolution)

    @property
    def _text_encoder_layers(self) -> tuple[int, ...]:
        return tuple(get_call_default(self.info.pipeline_class, "text_encoder_out_layers"))


def _encode_latents(vae: Any, values: Any) -> torch.Tensor:
    """Latents (C, H, W) of an image (1, 3, height, width) from -1 to 1, normalised with the pipeline's methods."""
    pipeline: Any = SimpleNamespace(vae=vae, _patchify_latents=Flux2Pipeline._patchify_latents)
    squares = Flux2Pipeline._encode_vae_image(pipeline, values.to(vae.device), generator=None)
    return Flux2Pipeline._unpatchify_latents(squares)[0]


@dataclass(frozen=True, kw_only=True)
class Flux2Denoiser(FlowDenoiser):
    """The denoiser of FLUX.2 dev and klein.

    Noise levels are shifted along FLUX.1's line, which FLUX.2's scheduler config contains too: mu is 0.5 at 256 tokens
    and 1.15 at 4,096. musubi-tuner trains with the same line (`flux2_shift`, training/trainer_base.py). The pipeline's
    own mu for 50 steps is 2.02 at 1024x1024; with it, only 2 % of the noise levels would be below 0.5, instead of 12
    %.
    """

    info: Flux2Info
    transformer_class: ClassVar[Any] = Flux2Transformer2DModel

    def compute_shift_mu(self, size: torch.Size) -> float:
        # Packing makes one token of 2 x 2 latents. Tokens of references do not count.
        return compute_mu(self.info.scheduler, size[-2] * size[-1] // PACK_SIZE**2)

    def _scale_latents(self, latents: torch.Tensor, batch: TensorMap) -> torch.Tensor:
        # The cached ones are normalised.
        return latents

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        return pack_latents(latents)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, P); equal to one call of the stock pipeline."""
        text = batch["prompt_embeds"]
        # Every second latent in both directions has the size of the packed grid, which is all the method reads. Its
        # result is expanded over the batch, and memory that several rows share cannot be pinned.
        image_ids = Flux2Pipeline._prepare_latent_ids(batch["latent_mean"][..., ::2, ::2]).contiguous()
        arguments = {
            **build_transformer_arguments(noisy, timesteps, text, self.info.guidance),
            "txt_ids": move_to_device(Flux2Pipeline._prepare_text_ids(text), text.device),
            "img_ids": move_to_device(image_ids, text.device),
        }
        arguments = self.conditioning.append_conditioning_tokens(arguments, batch)
        # Keep the output for the noisy tokens only.
        return transformer(**arguments, return_dict=False)[0][:, : noisy.shape[1]]


@dataclass(frozen=True, kw_only=True)
class Flux2Conditioning(Conditioning):
    """Conditioning on any number of references, whose tokens follow the noisy ones, clean and at the same timestep."""

    def append_conditioning_tokens(self, transformer_kwargs: dict[str, Any], batch: TensorMap) -> dict[str, Any]:
        # The method takes the references of one sample and reads only their sizes.
        references = [latents[:1, :, ::2, ::2] for latents in get_reference_latents(batch)]
        if not references:
            return transformer_kwargs
        hidden_states, image_ids = transformer_kwargs["hidden_states"], transformer_kwargs["img_ids"]
        reference_ids = move_to_device(Flux2Pipeline._prepare_image_ids(references), image_ids.device)
        return transformer_kwargs | {
            "hidden_states": append_references(hidden_states, batch, pack_latents),
            # The positions are the same for every sample of a batch.
            "img_ids": torch.cat([image_ids, reference_ids.expand(len(image_ids), -1, -1)], dim=1),
        }


@dataclass(frozen=True, kw_only=True)
class Flux2Sampler(FluxSampler):
    info: Flux2Info

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        tokenizer = load_tokenizer(self.info) if text else None
        pipeline = self._load_pipeline(dtype, transformer, text, tokenizer=tokenizer)
        if self.info.max_reference_pixels > _MAX_PIXELS:
            # The pipeline's limit is hard-coded in `__call__`. Replace its resize so that samples use references as
            # large as in training.
            pipeline.image_processor._resize_to_target_area = self._resize_reference
        return pipeline

    def _resize_reference(self, picture: Image.Image, target_area: int) -> Image.Image:
        """Scale a reference down to this checkpoint's pixel limit.

        It replaces the pipeline's `_resize_to_target_area`.
        """
        return Flux2ImageProcessor._resize_if_exceeds_area(picture, self.info.max_reference_pixels)

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        arguments = super().prompt_kwargs(prompt)
        # Unlike dev, klein-base uses classifier-free guidance, so it takes a negative prompt.
        if empty_prompt and self.info.is_klein:
            arguments["negative_prompt_embeds"] = empty_prompt["prompt_embeds"]
        return arguments


def load_tokenizer(info: Flux2Info) -> Any:
    """Load only the text encoder's tokenizer. dev publishes it inside an image processor, which needs torchvision."""
    return load_pretrained(AutoTokenizer, info.path / "tokenizer")


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a FLUX.2 checkpoint. Raises as `DiffusionFamily.open` does."""
    index, fields = read_flux_checkpoint(model, family, transformer_class=Flux2Transformer2DModel)
    if index["_class_name"] == Flux2KleinPipeline.__name__:
        fields |= {"pipeline_class": Flux2KleinPipeline, "is_distilled": bool(index.get("is_distilled", False))}
    info, objective = Flux2Info(**fields), build_flow_matching(fields["scheduler"])
    denoiser = Flux2Denoiser(info=info, objective=objective, conditioning=Flux2Conditioning())
    return Checkpoint.from_denoiser(denoiser, Flux2Encoders, Flux2Sampler)
