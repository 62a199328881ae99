"""Latte text-to-video (Latte-1): noise prediction with a learned variance, space and time attended in turn.

Text, token masks and denoising are those of the stock pipeline (diffusers/pipelines/latte/pipeline_latte.py).
Diffusers has the text model alone: Latte's class-conditional and unconditional checkpoints (UCF101, SkyTimelapse,
FaceForensics, Taichi) have no Diffusers class and are not trained here; family `video_dit` is for classes.

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import LattePipeline, LatteTransformer3DModel
from torch import nn

from dit_lora.config import ModelConfig, Recipe
from dit_lora.data_config import VideoShape
from dit_lora.errors import DitLoraError
from dit_lora.families.base import (
    Sampling,
    Tensors,
    TensorSpec,
    TextEncoder,
    TextLimit,
    VideoEncoder,
    load_or_init,
    local_checkpoint,
    read_component_config,
    refuse_options,
    require_whole_weights,
    text_limit,
    to_uint8,
)
from dit_lora.families.noise_prediction import (
    VIDEO_TRANSFORM,
    check_patches,
    learns_variance,
    load_frame_encoder,
    noise_losses,
    noise_objective,
    scaling_factor,
    spatial_factor,
    trains_variance,
)
from dit_lora.families.tiny_video_dit import build_latte
from dit_lora.models.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.streams import Streams
from dit_lora.objectives import EpsilonPrediction, LossOutput
from dit_lora.pretrained import load_pretrained

TEXT_TOKENS = 120  # pipeline_latte.py, encode_prompt: max_length
MASKED = -10000.0  # latte_transformer_3d.py, forward: the bias of a token to leave out


@dataclass(frozen=True)
class LatteCheckpoint:
    """One Latte text-to-video checkpoint."""

    path: Path
    transformer_config: Mapping[str, Any]
    vae_config: Mapping[str, Any]
    objective: EpsilonPrediction
    scratch: Mapping[str, Any] | None = None
    """`model.from_scratch`."""
    vlb: bool = True
    """Train the variance."""
    pipeline_class: ClassVar[Any] = LattePipeline

    @property
    def train_timesteps(self) -> int:
        return len(self.objective.alpha)

    @property
    def side_step(self) -> int:
        return spatial_factor(self.vae_config) * self.transformer_config["patch_size"]

    def text_limit(self) -> TextLimit:
        return text_limit(self.path, TEXT_TOKENS)

    def check_shape(self, shape: VideoShape) -> None:
        """Frames as the temporal position table has, or one; height and width multiples of 16."""
        check_patches(self.path.name, shape, 1, self.side_step)
        frames = self.transformer_config["video_length"]
        if shape.frames not in (1, frames):
            raise DitLoraError(
                f"{self.path.name} cannot take this shape: data.frames must be {frames}, as its config's "
                f"video_length, or 1 for images; got {shape.frames}"
            )

    def for_recipe(self, recipe: Recipe) -> "LatteCheckpoint":
        self.check_shape(VideoShape.of(recipe.data))
        refuse_options(recipe, takes=("train.vlb",))
        return replace(self, vlb=trains_variance(recipe, self.path.name, learned=True))

    def text_facts(self) -> dict[str, Any]:
        return {
            "text_encoder": self.path / "text_encoder",
            "tokenizer": self.path / "tokenizer",
            "tokens": TEXT_TOKENS,
        }

    def video_facts(self) -> dict[str, Any]:
        return {"vae": self.path / "vae", "transform": VIDEO_TRANSFORM}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        size = (TEXT_TOKENS, self.transformer_config["caption_channels"])
        return {
            "prompt_embeds": (torch.Size(size), dtype),
            "prompt_mask": (torch.Size(size[:1]), torch.bool),
        }

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """T5 as the pipeline uses it: all 120 tokens, padding too, and a mask of those that are text.

        Captions are taken as they are, in lower case: the pipeline's `clean_caption` does something only
        where ftfy and bs4 are installed.
        """
        pipeline: Any = load_pretrained(
            LattePipeline, self.path, transformer=None, vae=None, dtype=dtype, use_safetensors=True
        ).to(device)

        @torch.no_grad()
        def encode(captions: Sequence[str]) -> Tensors:
            embeddings, _ = pipeline.encode_prompt(
                list(captions),
                do_classifier_free_guidance=False,
                mask_feature=False,
                clean_caption=False,
                device=device,
            )
            tokens = pipeline.tokenizer(
                pipeline._text_preprocessing(list(captions)),
                padding="max_length",
                max_length=TEXT_TOKENS,
                truncation=True,
                return_tensors="pt",
            )
            return {"prompt_embeds": embeddings, "prompt_mask": tokens.attention_mask.bool()}

        return encode

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        return load_frame_encoder(self.path, device, memory)

    def load_transformer(self, dtype: torch.dtype) -> LatteTransformer3DModel:
        return load_or_init(LatteTransformer3DModel, self.path, dtype, self.scratch)

    def losses(
        self, transformer: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput:
        return noise_losses(
            self.objective,
            lambda noisy, timesteps: self.predict(transformer, noisy, timesteps, batch),
            batch,
            streams,
            scale=scaling_factor(self.vae_config),
            vlb=self.vlb,
        )

    def predict(
        self,
        transformer: nn.Module,
        noisy_BCFHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Noise, and behind it the variance's fraction: (B, 2 C, F, H, W).

        Each sample attends to its own text alone. The pipeline cuts one prompt to its length; several are
        cut to the longest, and a bias leaves out what the shorter ones lack.
        """
        embeddings, mask = batch["prompt_embeds"], batch["prompt_mask"]
        lengths = mask.sum(1)
        longest, shortest = torch.stack([lengths.max(), lengths.min()]).tolist()
        embeddings, mask = embeddings[:, :longest], mask[:, :longest]
        bias = None
        if shortest < longest:
            bias = torch.where(mask, 0.0, MASKED).to(embeddings.dtype)[:, None]
            bias = bias.repeat_interleave(
                noisy_BCFHW.shape[2], dim=0
            )  # spatial blocks: one row a frame
        return transformer(
            hidden_states=noisy_BCFHW.to(embeddings.dtype),
            encoder_hidden_states=embeddings,
            encoder_attention_mask=bias,
            timestep=timesteps,
            return_dict=False,
        )[0]

    def pipeline(
        self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True
    ) -> LattePipeline:
        given: dict[str, Any] = {} if transformer is None else {"transformer": transformer}
        if not text:
            given |= {"text_encoder": None, "tokenizer": None}
        return load_pretrained(LattePipeline, self.path, dtype=dtype, use_safetensors=True, **given)

    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        """As the pipeline: the text's own tokens, and as many of the empty prompt, padding too."""
        if isinstance(prompt, str):
            return {"prompt": prompt, "clean_caption": False}
        kept = int(prompt["prompt_mask"].sum())
        given = {"prompt_embeds": prompt["prompt_embeds"][:, :kept], "negative_prompt": None}
        if empty:
            given["negative_prompt_embeds"] = empty["prompt_embeds"][:, :kept]
        return given

    def index_changes(self) -> dict[str, Any]:
        return {}

    def as_trained(self, index: Mapping[str, Any]) -> "LatteCheckpoint":
        return self

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        video = pipeline(
            **conditions,
            video_length=how.shape.frames,
            height=how.shape.height,
            width=how.shape.width,
            num_inference_steps=how.inference_steps,
            guidance_scale=how.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(how.seed),
            decode_chunk_size=1,
            output_type="np",
        ).frames[0]
        return to_uint8(video)


class Latte:
    """Latte text-to-video."""

    name = "latte"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    group_patterns: Mapping[str, tuple[str, ...]] = {
        "connector": (
            "pos_embed.*",
            "adaln_single.*",
            "caption_projection.*",
            "scale_shift_table",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*", "temporal_transformer_blocks.*"),
    }
    tiny_variants = ("latte",)
    pipeline_names = ("LattePipeline",)

    def open(self, model: ModelConfig) -> LatteCheckpoint:
        path = local_checkpoint(model)
        name = read_component_config(path).get("_class_name")
        if name not in self.pipeline_names:
            raise DitLoraError(
                f"{model.path} is a {name} checkpoint; family latte trains LattePipeline (text-to-video)"
            )
        scratch = model.from_scratch
        weights = ["vae", "text_encoder"]
        require_whole_weights(path, weights if scratch is not None else ["transformer", *weights])
        config = {**read_component_config(path, "transformer"), **(scratch or {})}
        config["out_channels"] = config.get("out_channels") or config["in_channels"]
        if not learns_variance(model.path, config):
            raise DitLoraError(
                f"{model.path}: LattePipeline takes the first half of what its transformer gives as the noise, "
                f"so out_channels must be {2 * config['in_channels']}; got {config['out_channels']}"
            )
        # Left out of older files: the model's own default.
        config.setdefault("video_length", 16)
        return LatteCheckpoint(
            path=path,
            transformer_config=config,
            vae_config=read_component_config(path, "vae"),
            objective=noise_objective(model, read_component_config(path, "scheduler")),
            scratch=scratch,
        )

    def build_tiny(self, variant: str, out: Path, seed: int) -> None:
        build_latte(out, seed=seed)


FAMILY = Latte()
