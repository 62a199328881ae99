"""Samples with the video DiT: class names or prompts to videos, decoded by an image VAE frame by frame.

Shapes: B batch, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler
from diffusers.loaders import CogVideoXLoraLoaderMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from diffusers.video_processor import VideoProcessor
from transformers import CLIPTextModel, CLIPTokenizer

from dit_lora.errors import DitLoraError, format_list
from dit_lora.models.video_dit import VideoDiTTransformer3DModel


@dataclass
class VideoDiTPipelineOutput(BaseOutput):
    """Output of `VideoDiTPipeline`. `frames` are the videos in the format of `output_type`.

    "np" gives (B, frames, height, width, 3) in 0..1.
    """

    frames: Any


class VideoDiTPipeline(DiffusionPipeline, CogVideoXLoraLoaderMixin):
    """A video DiT, an image VAE (`AutoencoderKL`) and a DDIM or DDPM scheduler.

    A class-conditional model needs `id2label` (index as text to name). A text-conditional model needs CLIP's
    `text_encoder` and `tokenizer`, or `pooled_projections` in each call. LoRAs load with Diffusers' mixin for
    CogVideoX, the one whose only component is `transformer`.
    """

    model_cpu_offload_seq = "text_encoder->transformer->vae"  # type: ignore[assignment]
    _optional_components: list[str] = ["text_encoder", "tokenizer"]  # noqa: RUF012  (a list for Diffusers)
    transformer: Any
    vae: Any
    scheduler: Any
    text_encoder: Any
    tokenizer: Any

    def __init__(
        self,
        transformer: VideoDiTTransformer3DModel,
        vae: AutoencoderKL,
        scheduler: DDIMScheduler | DDPMScheduler,
        text_encoder: CLIPTextModel | None = None,
        tokenizer: CLIPTokenizer | None = None,
        id2label: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, vae=vae, scheduler=scheduler, text_encoder=text_encoder, tokenizer=tokenizer
        )
        self.register_to_config(id2label=dict(id2label or {}))
        # Class indices by name.
        self.labels = {name: int(index) for index, name in dict(id2label or {}).items()}
        # Each block of the VAE except the last halves height and width.
        self.vae_scale_factor = 2 ** (len(self.vae.config.block_out_channels) - 1) if vae else 8
        self.video_processor = VideoProcessor(vae_scale_factor=self.vae_scale_factor)

    def get_label_ids(self, names: Sequence[str]) -> torch.Tensor:
        """Class indices, int64 (B,), of these names; "" is the null class.

        Raises `DitLoraError` with all class names if one is unknown.
        """
        # The last row of the label table.
        null = self.transformer.config.num_classes
        unknown = [name for name in names if name and name not in self.labels]
        if unknown:
            raise DitLoraError(format_list(f"unknown class {', '.join(unknown)}; choose from", [*self.labels]))
        return torch.tensor([self.labels[name] if name else null for name in names])

    @torch.no_grad()
    def encode_prompt(self, prompts: Sequence[str]) -> torch.Tensor:
        """Encode prompts with CLIP to its pooled output, (B, D): that of the end token, so padding has no influence.

        A tokenizer without a limit reports 1e30; the limit is then CLIP's number of positions, 77.
        """
        # (B, positions), padded and truncated to the same length.
        positions = self.text_encoder.config.max_position_embeddings
        tokens = self.tokenizer(
            list(prompts),
            padding="max_length",
            max_length=min(self.tokenizer.model_max_length, positions),
            truncation=True,
            return_tensors="pt",
        )
        return self.text_encoder(tokens.input_ids.to(self.text_encoder.device)).pooler_output

    def decode_latents(self, latents_BCFHW: torch.Tensor) -> torch.Tensor:
        """Decode latents to pixels (B, 3, frames, height, width), about -1..1, one frame at a time as in encoding."""
        scaled = latents_BCFHW / self.vae.config.scaling_factor
        # (B, C, F, H, W) -> F tensors (B, 3, height, width)
        frames = [self.vae.decode(frame).sample for frame in scaled.unbind(2)]
        return torch.stack(frames, dim=2)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        class_labels: torch.Tensor | None = None,
        pooled_projections: torch.Tensor | None = None,
        negative_pooled_projections: torch.Tensor | None = None,
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 4.0,
        generator: torch.Generator | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "np",
        return_dict: bool = True,
    ) -> VideoDiTPipelineOutput | tuple[Any]:
        """Sample videos for class names or texts in `prompt`, or for `class_labels` or `pooled_projections` (B, ...).

        Frames, height and width are in pixels, by default those of the config. Above guidance scale 1, the model also
        runs with the null class or the empty text (or `negative_pooled_projections`). Guidance is applied to all
        latent channels; OpenDiT applies it to three of four.
        """
        condition, empty = self._prepare_conditions(
            prompt, class_labels, pooled_projections, negative_pooled_projections, guidance_scale
        )
        # Both conditions have one row per video.
        batch = len(next(iter(condition.values())))
        config, device = self.transformer.config, self._execution_device
        shape = (
            batch,
            config.in_channels,
            num_frames or config.sample_frames,
            (height or config.sample_height * self.vae_scale_factor) // self.vae_scale_factor,
            (width or config.sample_width * self.vae_scale_factor) // self.vae_scale_factor,
        )
        # Timesteps come first: init_noise_sigma of some schedulers depends on them.
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        dtype = self.transformer.dtype
        # Random latents are fp32, whatever the model's dtype is.
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        latents = latents * self.scheduler.init_noise_sigma
        for step in self.progress_bar(self.scheduler.timesteps):
            inputs = self.scheduler.scale_model_input(latents, step).to(dtype)
            output = self._predict(inputs, step, condition)
            if empty is not None:
                # A learned variance, in the other channels, stays that of the conditional prediction.
                unconditional = self._predict(inputs, step, empty)[:, : config.in_channels]
                noise = unconditional + guidance_scale * (output[:, : config.in_channels] - unconditional)
                output = torch.cat([noise, output[:, config.in_channels :]], dim=1)
            # A scheduler with a fixed variance only takes the noise.
            if self.scheduler.config.get("variance_type") not in ("learned", "learned_range"):
                output = output[:, : config.in_channels]
            latents = self.scheduler.step(output, step, latents, generator=generator).prev_sample
        video: Any = latents
        if output_type != "latent":
            pixels = self.decode_latents(latents.to(self.vae.dtype)).float()
            video = self.video_processor.postprocess_video(pixels, output_type=output_type)
        self.maybe_free_model_hooks()
        return VideoDiTPipelineOutput(frames=video) if return_dict else (video,)

    def _predict(
        self, latents: torch.Tensor, step: torch.Tensor, condition: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Run the transformer at one timestep for a batch of latents; returns its output in fp32."""
        timesteps = step.expand(len(latents))
        predicted = self.transformer(hidden_states=latents, timestep=timesteps, return_dict=False, **condition)[0]
        # The scheduler steps in fp32.
        return predicted.float()

    def _prepare_conditions(
        self,
        prompt: str | Sequence[str] | None,
        class_labels: torch.Tensor | None,
        pooled_projections: torch.Tensor | None,
        negative_pooled_projections: torch.Tensor | None,
        guidance_scale: float,
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None]:
        """Arguments of the transformer for the condition, and for the null condition (None without guidance)."""
        if sum(value is not None for value in (prompt, class_labels, pooled_projections)) != 1:
            raise DitLoraError("give one of prompt, class_labels and pooled_projections")
        # A single prompt is a batch of one.
        prompts = [prompt] if isinstance(prompt, str) else prompt
        device, null = self._execution_device, self.transformer.config.num_classes
        # A class-conditional model: prompts are names of classes.
        if null is not None:
            labels = self.get_label_ids(prompts) if prompts is not None else class_labels
            if labels is None or ((labels < 0) | (labels > null)).any():
                raise DitLoraError(
                    f"class_labels must be in 0..{null}, of which {null} is the null class; got {labels}"
                )
            labels = labels.to(device)
            empty = {"class_labels": torch.full_like(labels, null)}
            return {"class_labels": labels}, empty if guidance_scale > 1 else None
        # A text-conditional model: prompts are texts.
        pooled = self.encode_prompt(prompts) if prompts is not None else pooled_projections
        if pooled is None:
            raise DitLoraError("this pipeline is conditioned on text; give prompt or pooled_projections")
        conditions = {"pooled_projections": pooled.to(device, self.transformer.dtype)}
        if guidance_scale <= 1:
            return conditions, None
        negative = negative_pooled_projections
        if negative is None:
            negative = self.encode_prompt([""])
        return conditions, {"pooled_projections": negative.to(device, self.transformer.dtype).expand_as(pooled)}
