"""Z-Image text-to-image, base and Turbo: flow matching on FLUX.1's latents, conditioned on Qwen3.

Prompts and denoising call the stock pipeline's own code (diffusers/pipelines/z_image/pipeline_z_image.py). The network
takes a list of samples and a list of captions, each at its own length. Its time runs from noise to clean, and its
output is the negative velocity.

Shapes: B batch, T text tokens, D text width, C latent channels, H and W latent size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, ZImagePipeline, ZImageTransformer2DModel
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
    TextLimit,
)
from dit_lora.families.captions import (
    compute_caption_token_limit,
    get_caption_spec,
    get_unpadded_kwargs,
    make_unpadded_encoder,
    unpad_captions,
)
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.flow_matching import FlowDenoiser, read_flow_scheduler
from dit_lora.families.latents import encode_picture
from dit_lora.families.opening import read_checkpoint
from dit_lora.families.refusals import (
    image_frames_errors,
    is_named_dedistilled,
    is_named_distilled,
    position_limit_errors,
    side_errors,
)
from dit_lora.numerics.objectives import FlowMatching

PATCH_SIZE = 2  # default of the transformer's `patch_size`, which the pipeline does not change
# From the published scheduler_config.json files, the only files in which base and Turbo differ. InvokeAI tells them
# apart in the same way (invoke-ai/InvokeAI#8799).
BASE_SHIFT, TURBO_SHIFT = 6.0, 3.0
TRAINING_SHIFT = 2.0
"""Shift of the noise levels in training, for base and Turbo, as musubi-tuner recommends.

Source: musubi-tuner, docs/zimage.md, `--discrete_flow_shift 2.0`. With the base's sampling shift of 6, 3.7 % of the
noise levels would be below 0.5; with 2 it is 24 %.
"""
DE_DISTILLATION_ADAPTER = "ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors"


@dataclass(frozen=True, kw_only=True)
class ZImageInfo(CheckpointInfo):
    """Info (configs, supported shapes) of a Z-Image checkpoint."""

    scheduler_shift: float
    """Shift that the pipeline samples with. Training uses `TRAINING_SHIFT`."""
    pipeline_class: ClassVar[Any] = ZImagePipeline

    @property
    def size_multiple(self) -> int:
        # The pipeline's vae_scale_factor times the patch size.
        return int(PATCH_SIZE * 2 ** (len(self.vae_config["block_out_channels"]) - 1))

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        # Numbers of positions for text and images, rows and columns.
        _, rows, columns = self.transformer_config["axes_lens"]
        step = self.size_multiple
        ends = {"height": (shape.height, rows * step), "width": (shape.width, columns * step)}
        return [
            *side_errors(shape, step),
            *image_frames_errors(shape.frames, "Z-Image"),
            *position_limit_errors(ends, "axes_lens"),
        ]

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        name = recipe.model.path
        turbo_sign = None if self.from_scratch is not None else find_turbo_reason(name, self.scheduler_shift)
        if turbo_sign is None or recipe.has_distillation_safeguard:
            return []
        return [
            f"distilled: {name} may be Z-Image-Turbo, by {turbo_sign} (no file of it says so): training it "
            "directly breaks sampling in eight steps. Train it over a de-distillation adapter "
            f"(lora.under=[{DE_DISTILLATION_ADAPTER}]), or train Tongyi-MAI/Z-Image and sample from this one "
            "with validation.model, or set train.target: guided"
        ]


@dataclass(frozen=True, kw_only=True)
class ZImageEncoders(Encoders):
    info: ZImageInfo
    vae_class = AutoencoderKL
    transform = "z-image-1: pixels / 127.5 - 1, posterior mean and logvar, fp32"

    def load_text_limit(self) -> TextLimit:
        """Number of caption tokens that fit in the chat template of Z-Image's text encoder."""
        return compute_caption_token_limit(
            self.info.pipeline_class, self.load_tokenizer(), self.info.text_tokens, do_classifier_free_guidance=False
        )

    def text_cache_key(self) -> Mapping[str, Any]:
        return {**super().text_cache_key(), "tokens": self.info.text_tokens}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        # The cache stores captions at one length, although the pipeline does not pad them.
        return get_caption_spec(self.info.text_tokens, self.info.transformer_config["cap_feat_dim"], dtype)

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Qwen3 as Z-Image's pipeline uses it: captions in its chat template, second to last hidden states.

        The pipeline's embeddings have no padding. The cache pads them with zeros to one length and keeps a mask.
        """
        pipeline = self.load_text_pipeline(dtype, device)

        def encode_caption(caption: str) -> torch.Tensor:
            # Pass a new list, because the pipeline writes the templated caption into it.
            (embeddings,), _ = pipeline.encode_prompt(
                [caption], device=device, do_classifier_free_guidance=False, max_sequence_length=self.info.text_tokens
            )
            return embeddings  # type: ignore[no-any-return]

        return make_unpadded_encoder(encode_caption, self.info.text_tokens)

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        return encode_picture(vae, pixels)


@dataclass(frozen=True, kw_only=True)
class ZImageDenoiser(FlowDenoiser):
    info: ZImageInfo
    transformer_class: ClassVar[Any] = ZImageTransformer2DModel

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity for noisy latents (B, C, H, W); equal to one call of the stock pipeline.

        Each sample has its own length. The network pads it to a multiple of 32 tokens, which it is trained to attend
        to. The rest, up to the longest sample of the batch, is masked.
        """
        embeddings = batch["prompt_embeds"]
        latents = noisy.to(embeddings.dtype).unsqueeze(2)  # (B, C, 1, H, W)
        outputs = transformer(
            list(latents.unbind(0)),
            # From 0 at pure noise to 1 at a clean image.
            (1000 - timesteps) / 1000,
            unpad_captions(embeddings, batch["prompt_attention_mask"]),
            return_dict=False,
        )[0]
        # The network's time and velocity are reversed.
        return -torch.stack(outputs).squeeze(2)


@dataclass(frozen=True, kw_only=True)
class ZImageSampler(Sampler):
    info: ZImageInfo
    output_field = "images"
    guidance_threshold = 0.0  # the pipeline computes cond + w (cond - uncond)

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt}
        return get_unpadded_kwargs(prompt, empty_prompt)


def find_turbo_reason(name: str, shift: float) -> str | None:
    """Reason to assume that a Z-Image checkpoint is Turbo: its folder or Hub name, or its scheduler's shift.

    Else None.
    """
    if is_named_dedistilled(name):
        return None
    if is_named_distilled(name):
        return "its name"
    if shift == TURBO_SHIFT:
        return f"its scheduler's shift of {shift:g}, where the base has {BASE_SHIFT:g}"
    return None


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a Z-Image checkpoint. Raises as `DiffusionFamily.open` does."""
    _, fields = read_checkpoint(model, family.pipeline_names, transformer_class=ZImageTransformer2DModel)
    scheduler = read_flow_scheduler(model, fields["path"])
    if scheduler["use_dynamic_shifting"]:
        raise DitLoraError(
            f"{model.path}: its scheduler shifts by image size (use_dynamic_shifting); Z-Image's checkpoints have "
            "one shift"
        )
    config = fields["transformer_config"]
    if (PATCH_SIZE, 1) not in zip(config["all_patch_size"], config["all_f_patch_size"], strict=True):
        raise DitLoraError(
            f"{model.path}: ZImagePipeline asks for patches of {PATCH_SIZE}x{PATCH_SIZE}x1; its transformer has "
            f"all_patch_size={list(config['all_patch_size'])}, all_f_patch_size={list(config['all_f_patch_size'])}"
        )
    info = ZImageInfo(**fields, scheduler_shift=float(scheduler["shift"]))
    # A caption's positions begin at 1; the image takes the position after its last token.
    required, max_positions = info.text_tokens + 2, config["axes_lens"][0]
    if max_positions < required:
        raise DitLoraError(
            f"{model.path}: captions of {info.text_tokens} tokens and the picture behind them need {required} "
            f"positions; its transformer has {max_positions} (axes_lens)"
        )
    # Training has its own shift; the scheduler's is for sampling.
    objective = FlowMatching(TRAINING_SHIFT, scheduler["num_train_timesteps"])
    denoiser = ZImageDenoiser(info=info, objective=objective)
    return Checkpoint.from_denoiser(denoiser, ZImageEncoders, ZImageSampler)
