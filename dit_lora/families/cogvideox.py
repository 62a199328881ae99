"""CogVideoX text-to-video: 2B (sincos positions) and 5B (RoPE), whichever the checkpoint's config says.

Positions, prompts and denoising are the stock pipeline's own code, called here, so that training and
inference cannot drift apart (diffusers/pipelines/cogvideo/pipeline_cogvideox.py).

Shapes: B batch, T text tokens, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from torch import nn

from dit_lora.config import ModelConfig, Recipe
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import (
    Sampling,
    Tensors,
    TextEncoder,
    VideoEncoder,
    VideoShape,
    local_checkpoint,
    read_component_config,
    require_whole_weights,
)
from dit_lora.families.tiny import build_cogvideox
from dit_lora.numerics.streams import Streams, integers, normal
from dit_lora.objectives import LossOutput, VPrediction, mean_squared_error

# Changes whenever the same pixels would be encoded otherwise; part of each clip's cache key.
VIDEO_TRANSFORM = "cogvideox-1: pixels / 127.5 - 1, posterior mean and logvar"


@dataclass(frozen=True)
class CogVideoXCheckpoint:
    """One CogVideoX text-to-video checkpoint."""

    path: Path
    transformer_config: Mapping[str, Any]
    vae_config: Mapping[str, Any]
    objective: VPrediction
    pipeline_class: ClassVar[Any] = CogVideoXPipeline

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent, as the pipeline counts them."""
        return 2 ** (len(self.vae_config["block_out_channels"]) - 1)

    @property
    def temporal_factor(self) -> int:
        return int(self.vae_config["temporal_compression_ratio"])

    @property
    def train_timesteps(self) -> int:
        return len(self.objective.alpha)

    @property
    def text_tokens(self) -> int:
        return self.transformer_config["max_text_seq_length"]

    def check_shape(self, shape: VideoShape) -> None:
        """Frames must be 4n + 1; height and width multiples of VAE factor x patch size (16)."""
        step = self.spatial_factor * self.transformer_config["patch_size"]
        wrong = [
            f"data.{name} must be a multiple of {step}; got {value}, nearest {_multiples(value, step)}"
            for name, value in (("height", shape.height), ("width", shape.width))
            if value % step
        ]
        if (shape.frames - 1) % self.temporal_factor:
            below = (shape.frames - 1) // self.temporal_factor * self.temporal_factor + 1
            wrong.append(
                f"data.frames must be {self.temporal_factor}n + 1; got {shape.frames}, "
                f"nearest {below} and {below + self.temporal_factor}"
            )
        if wrong:
            raise DitLoraError(listed(f"{self.path.name} cannot take this shape", wrong))

    def for_recipe(self, recipe: Recipe) -> "CogVideoXCheckpoint":
        self.check_shape(VideoShape.of(recipe.data))
        return self

    def text_facts(self) -> dict[str, Any]:
        return {
            "text_encoder": self.path / "text_encoder",
            "tokenizer": self.path / "tokenizer",
            "tokens": self.text_tokens,
        }

    def video_facts(self) -> dict[str, Any]:
        return {"vae": self.path / "vae", "transform": VIDEO_TRANSFORM}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """T5 as the pipeline uses it: padded to `max_text_seq_length`, no attention mask."""
        pipeline = CogVideoXPipeline.from_pretrained(
            self.path, transformer=None, vae=None, dtype=dtype, use_safetensors=True
        ).to(device)

        @torch.no_grad()
        def encode(captions: Sequence[str]) -> Tensors:
            embeddings, _ = pipeline.encode_prompt(
                list(captions),
                do_classifier_free_guidance=False,
                max_sequence_length=self.text_tokens,
                device=device,
            )
            return {"prompt_embeds": embeddings}

        return encode

    def load_video_encoder(self, dtype: torch.dtype, device: torch.device) -> VideoEncoder:
        """Keeps the posterior's mean and logvar, (C, F, H, W), so that each epoch draws afresh."""
        vae = AutoencoderKLCogVideoX.from_pretrained(
            self.path, subfolder="vae", dtype=dtype, use_safetensors=True
        ).to(device)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            video = (pixels.to(device).float() / 127.5 - 1).to(dtype)
            posterior = vae.encode(video.transpose(0, 1)[None]).latent_dist
            return {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}

        return encode

    def load_transformer(self, dtype: torch.dtype) -> CogVideoXTransformer3DModel:
        # dtype= and not .to(): .to() would round the sincos position table as well.
        return CogVideoXTransformer3DModel.from_pretrained(
            self.path, subfolder="transformer", dtype=dtype, use_safetensors=True
        ).requires_grad_(False)

    def losses(
        self, transformer: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput:
        """v-prediction losses at uniform timesteps; noising, target and loss are fp32."""
        mean, logvar = batch["latent_mean"].float(), batch["latent_logvar"].float()
        shape, device = mean.shape[1:], mean.device
        posterior_noise = normal(shape, streams("posterior")).to(device)
        clean_BCFHW = mean + torch.exp(0.5 * logvar) * posterior_noise
        clean = clean_BCFHW.transpose(1, 2) * self.vae_config["scaling_factor"]
        noise = normal(shape, streams("noise")).to(device).transpose(1, 2)
        timesteps = integers(0, self.train_timesteps, streams("timestep")).to(device)

        noisy = self.objective.add_noise(clean, noise, timesteps)
        prediction = self.predict(transformer, noisy, timesteps, batch)
        target = self.objective.target(clean, noise, timesteps)
        return LossOutput(mean_squared_error(prediction, target), timesteps)

    def predict(
        self,
        transformer: nn.Module,
        noisy_BFCHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The network's velocity for noisy latents; one call equals one of the stock pipeline's."""
        prompt_embeds = batch["prompt_embeds"]
        frames, height, width = (noisy_BFCHW.shape[i] for i in (1, 3, 4))
        return transformer(
            hidden_states=noisy_BFCHW.to(prompt_embeds.dtype),
            encoder_hidden_states=prompt_embeds,
            timestep=timesteps,
            image_rotary_emb=self._rotary(frames, height, width, noisy_BFCHW.device),
            return_dict=False,
        )[0]

    def pipeline(
        self,
        dtype: torch.dtype,
        transformer: nn.Module | None = None,
        text: bool = True,
    ) -> CogVideoXPipeline:
        given: dict[str, Any] = {} if transformer is None else {"transformer": transformer}
        if not text:
            given |= {"text_encoder": None, "tokenizer": None}
        return CogVideoXPipeline.from_pretrained(
            self.path, dtype=dtype, use_safetensors=True, **given
        )

    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt}
        given = {"prompt_embeds": prompt["prompt_embeds"]}
        return given | ({"negative_prompt_embeds": empty["prompt_embeds"]} if empty else {})

    def index_changes(self) -> dict[str, Any]:
        return {}

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        frames = pipeline(
            **conditions,
            num_frames=how.shape.frames,
            height=how.shape.height,
            width=how.shape.width,
            num_inference_steps=how.inference_steps,
            guidance_scale=how.guidance_scale,
            max_sequence_length=self.text_tokens,
            generator=torch.Generator("cpu").manual_seed(how.seed),
            output_type="np",
        ).frames[0]
        return torch.from_numpy((frames * 255).round().clip(0, 255).astype("uint8"))

    def _rotary(
        self, frames: int, height: int, width: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self.transformer_config["use_rotary_positional_embeddings"]:
            return None
        # The pipeline's method, on the two attributes of a pipeline that it reads.
        return CogVideoXPipeline._prepare_rotary_positional_embeddings(
            self._pipeline_facts,
            height * self.spatial_factor,
            width * self.spatial_factor,
            frames,
            device,
        )

    @cached_property
    def _pipeline_facts(self) -> SimpleNamespace:
        config = SimpleNamespace(**self.transformer_config)
        return SimpleNamespace(
            transformer=SimpleNamespace(config=config),
            vae_scale_factor_spatial=self.spatial_factor,
        )


class CogVideoX:
    """CogVideoX text-to-video, every checkpoint of version 1.0."""

    name = "cogvideox"
    # CogVideo's and Diffusers' own trainers adapt these four (finetune/schemas/args.py).
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    group_patterns: Mapping[str, tuple[str, ...]] = {
        "connector": (
            "patch_embed.*",
            "time_embedding.*",
            "norm_final.*",
            "norm_out.*",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*",),
    }
    tiny_variants = ("cogvideox-2b", "cogvideox-5b")
    pipeline_names = ("CogVideoXPipeline",)

    def open(self, model: ModelConfig) -> CogVideoXCheckpoint:
        path = local_checkpoint(model)
        pipeline_name = read_component_config(path).get("_class_name")
        if pipeline_name != CogVideoXPipeline.__name__:
            raise DitLoraError(
                f"{model.path} is a {pipeline_name} checkpoint; family cogvideox trains "
                f"{CogVideoXPipeline.__name__} (text-to-video)"
            )
        transformer = read_component_config(path, "transformer")
        vae = read_component_config(path, "vae")
        scheduler_config = read_component_config(path, "scheduler")
        require_whole_weights(path, ("transformer", "vae", "text_encoder"))
        if transformer.get("patch_size_t") is not None:
            raise DitLoraError(
                f"{model.path} is CogVideoX 1.5; this version trains 1.0 (2B and 5B)"
            )
        scheduler = CogVideoXDDIMScheduler.from_config(scheduler_config)
        if scheduler.config.prediction_type != "v_prediction":
            raise DitLoraError(
                f"{model.path}: CogVideoX predicts velocity, but its scheduler says "
                f"prediction_type={scheduler.config.prediction_type}"
            )
        return CogVideoXCheckpoint(
            path=path,
            transformer_config=transformer,
            vae_config=vae,
            objective=VPrediction.from_alphas_cumprod(scheduler.alphas_cumprod),
        )

    def build_tiny(self, variant: str, out: Path, seed: int) -> None:
        build_cogvideox(out, seed=seed, rotary=variant == "cogvideox-5b")


def _multiples(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} and {below + step}" if below else str(step)


FAMILY = CogVideoX()
