"""LTX-2 text-to-video: flow matching on tokens of video, and of sound if it is trained too.

Prompts, packing, normalisation, the shift and denoising call the stock pipeline's own code
(diffusers/pipelines/ltx2/pipeline_ltx2.py). Without sound, the video does not attend to any: a training step is the
call that the pipeline makes for its modality guidance, `isolate_modalities`.

Shapes: B batch, T text tokens, C latent channels, F latent frames, H and W latent size, S video tokens (F H W), L
tokens of sound and A their width.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import lcm, prod
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKLLTX2Video, LTX2Pipeline, LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.media.sound import Sound
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Sampling, TensorMap, Tensors, TensorSpec, TextEncoder, TextLimit, VideoEncoder
from dit_lora.families.flow_matching import FlowCheckpoint
from dit_lora.families.flow_scheduler import compute_mu, require_min_steps
from dit_lora.families.loss_mask import compute_packed_loss_weights
from dit_lora.families.ltx2.cross_timesteps import use_modality_timesteps
from dit_lora.families.ltx2.guidance import guidance_kwargs
from dit_lora.families.ltx2.hearing import SoundCheckpoint
from dit_lora.families.ltx2.layers import ATTENTION_LAYERS, refuse_sound_layers
from dit_lora.families.ltx2.text import bypass_connectors, join_prompt_tensors, make_text_encoder
from dit_lora.families.opening import get_call_default
from dit_lora.families.posterior import encode_video, make_pixel_encoder
from dit_lora.families.refusals import frame_count_errors, side_errors
from dit_lora.families.text.limit import load_text_limit
from dit_lora.families.text.mask import cut_text
from dit_lora.families.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.objectives import LossOutput, compute_mean_squared_error
from dit_lora.numerics.streams import DrawFunctions, RandomStreams, move_to_device, normal

PIPELINE_MULTIPLE = 32  # required by check_inputs of both pipelines, for any autoencoder


@dataclass(frozen=True, kw_only=True)
class LTX2Checkpoint(SoundCheckpoint):
    """An LTX-2 or LTX-2.3 checkpoint for text-to-video."""

    scheduler: Mapping[str, Any]
    """The scheduler's config, filled with its class's defaults."""
    connectors: Mapping[str, Any]
    """The connectors' config."""
    fps: float | None = None
    """Frames per second: positions are in seconds. None for the pipeline's default."""
    has_task_override: bool = False
    """True if the recipe selects another task than the checkpoint's pipeline."""
    pipeline_class: ClassVar[Any] = LTX2Pipeline
    transformer_class: ClassVar[Any] = LTX2VideoTransformer3DModel
    text_postprocessors: ClassVar[Mapping[str, Any]] = {"connectors": LTX2TextConnectors}
    transform = "ltx2-1: pixels / 127.5 - 1, posterior mean, normalised by the VAE's own statistics, fp32"
    supported_options: ClassVar[tuple[str, ...]] = (*FlowCheckpoint.supported_options, "model.task", "data.sound")

    @property
    def is_distilled(self) -> bool:
        """True if it generates videos in few steps: its scheduler does not shift by size, unlike the base model's."""
        return not self.scheduler["use_dynamic_shifting"]

    @property
    def frame_rate(self) -> float:
        return self.fps or get_call_default(self.pipeline_class, "frame_rate")

    @property
    def text_tokens(self) -> int:
        """Number of tokens of every caption: the pipeline's default."""
        return get_call_default(self.pipeline_class, "max_sequence_length")

    @property
    def size_multiple(self) -> int:
        # Temporal factor first, then those of height and width.
        _, *sides = self.transformer_config["vae_scale_factors"]
        return lcm(PIPELINE_MULTIPLE, *sides)

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """Frames must be 8n + 1: the pipeline silently drops the rest."""
        temporal = self.transformer_config["vae_scale_factors"][0]
        return [*side_errors(shape, self.size_multiple), *frame_count_errors(shape.frames, temporal)]

    def apply_recipe(self, recipe: Recipe) -> Self:
        """Apply frames per second, which set positions, and sound.

        Raises `DitLoraError` for a distilled base model and for layers that would get no gradient.
        """
        checkpoint = super().apply_recipe(recipe)
        data = recipe.data
        if self.is_distilled and not recipe.lora.under:
            raise DitLoraError(
                f"{self.path.name} is step-distilled (its scheduler does not shift by size), and training on it "
                "undoes that; train its base, whose adapter loads into both, and sample from this one with "
                "validation.model; or give an adapter that undoes it in lora.under"
            )
        # Check now: otherwise validation samples would fail in the middle of a run.
        steps = recipe.validation.inference_steps
        require_min_steps(self.scheduler, steps, "validation.inference_steps")
        if not data.sound:
            refuse_sound_layers(recipe)
        return replace(checkpoint, fps=data.fps, has_sound=data.sound)

    def lora_targets(self, defaults: Sequence[str]) -> tuple[str, ...]:
        """The video's attention layers, or all attention layers if sound is trained."""
        return ATTENTION_LAYERS if self.has_sound else tuple(defaults)

    def with_training_metadata(self, metadata: Mapping[str, Any]) -> Self:
        # Frames per second are one of the common fields of the header.
        fps = metadata.get("video", {}).get("fps", self.fps)
        return replace(super().with_training_metadata(metadata), fps=fps)

    def notes(self, recipe: Recipe) -> list[str]:
        notes = super().notes(recipe)
        if self.has_sound:
            return [*notes, "sound: trained with the video, at its own noise levels; samples have sound"]
        return [
            *notes,
            "sound: not trained (data.sound: false). Samples have no sound",
        ]

    def load_text_limit(self) -> TextLimit:
        return load_text_limit(self.path, self.text_tokens)

    def text_cache_key(self) -> Mapping[str, Any]:
        # The cached tensors come from the connectors, which differ between 2.0 and 2.3 although the text encoder is
        # the same.
        folder = self.path / "connectors"
        return {**super().text_cache_key(), "connectors": folder, "tokens": self.text_tokens}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        tokens, audio_width = self.text_tokens, self._text_width("audio")
        return {
            "prompt_embeds": (torch.Size((tokens, self._text_width("video"))), dtype),
            "audio_prompt_embeds": (torch.Size((tokens, audio_width)), dtype),
            "prompt_attention_mask": (torch.Size((tokens,)), torch.int64),
        }

    def _text_width(self, modality: str) -> int:
        # The connectors' output has as many channels as their attention.
        heads, width = (
            self.connectors[f"{modality}_connector_{name}"] for name in ("num_attention_heads", "attention_head_dim")
        )
        return int(heads * width)

    def load_text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Load the pipeline with only its text encoder and connectors."""
        # None leaves a component out. The connectors stay, because captions pass through them.
        components = dict.fromkeys(("transformer", "vae", "audio_vae", "vocoder"))
        return load_pretrained(self.pipeline_class, self.path, dtype=dtype, use_safetensors=True, **components).to(
            device
        )

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load Gemma and the connectors as the pipeline uses them."""
        return make_text_encoder(self.load_text_pipeline(dtype, device), self.text_tokens, device)

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE. Samples keep the posterior's normalised mean, (C, F, H, W), as in the vendor's trainer.

        It encodes in fp32 regardless of `dtype`.
        """
        vae = memory.load(AutoencoderKLLTX2Video, self.path, torch.float32, device)
        return self.add_sound_encoder(make_pixel_encoder(vae, self.encode_clip), device)

    def encode_clip(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        """A clip's latents as they are cached, normalised with the statistics in the VAE's weights."""
        mean = encode_video(vae, pixels)["latent_mean"]
        factor = vae.config.scaling_factor
        latents = self.pipeline_class._normalize_latents(mean[None], vae.latents_mean, vae.latents_std, factor)
        return {"latent_mean": latents[0]}

    def mu(self, size: torch.Size) -> float:
        """Logarithm of the shift: the scheduler's line through 1,024 and 4,096 tokens, extended on both sides.

        The vendor's trainer does not clamp it either (Lightricks/LTX-2, ltx-trainer, timestep_samplers.py).
        """
        return compute_mu(self.scheduler, prod(size[1:]))

    def draw_functions(self, batch: TensorMap) -> DrawFunctions:
        """The random tensors of flow matching, with noise for tokens (S, C), and those of sound if it is trained.

        Sound has its own noise level, shifted by its own number of tokens, as in the vendor's trainer (flexible.py).
        """
        channels, *grid = batch["latent_mean"].shape[1:]
        video: DrawFunctions = {**super().draw_functions(batch), "noise": partial(normal, (prod(grid), channels))}
        # Cached clips may have sound that this run does not train.
        if not self.has_sound:
            return video
        if "audio_latent_mean" not in batch:
            raise DitLoraError(
                "data.sound: these samples were cached without their sound (audio_latent_mean); set it to false"
            )
        # (L, A), tokens and width of the sound.
        size = batch["audio_latent_mean"].shape[1:]
        # `mu` counts the product of all sizes but the first, which here is the number of tokens.
        shift = self.compute_shift(torch.Size([size[1], size[0]]))
        return {
            **video,
            "audio_noise": partial(normal, size),
            "audio_timestep": lambda rows: self.objective.compute_sigmas(normal((), rows), shift),
        }

    def clean_latents(self, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Packed latents, (B, S, C). The cached ones are already normalised."""
        return LTX2Pipeline._pack_latents(batch["latent_mean"].float())

    def compute_mask_loss_weights(self, batch: TensorMap) -> torch.Tensor | None:
        """Loss weights from masks, packed like the video's latents, (B, S, C). Sound is never masked."""
        return compute_packed_loss_weights(batch, self.mask_floor, LTX2Pipeline._pack_latents)

    def losses(self, transformer: nn.Module, batch: TensorMap, streams: RandomStreams) -> LossOutput:
        """Velocity loss of each sample; with sound, the sum of its mean over video and its mean over sound.

        The vendor's trainer adds them in the same way (flexible.py, compute_loss). The reported timesteps are the
        video's.
        """
        if not self.has_sound:
            return super().losses(transformer, batch, streams)
        # With sound, this repeats the base class's steps for the video and adds those of the sound.
        draws = streams.draw_tensors(self.draw_functions(batch), batch["latent_mean"].device)
        objective, sigmas = self.objective, draws["timestep"]
        clean, conditioning_mask = (self.clean_latents(batch, draws), self.conditioning_mask(batch, draws))
        noisy = objective.add_noise(clean, draws["noise"], sigmas)
        if conditioning_mask is not None:
            noisy = torch.where(conditioning_mask > 0, clean, noisy)
        # Sound has its own noise and noise levels.
        sound, levels = batch["audio_latent_mean"].float(), draws["audio_timestep"]
        noisy_batch = {
            **batch,
            "audio_noisy": objective.add_noise(sound, draws["audio_noise"], levels),
            "audio_timestep": levels * self.num_train_timesteps,
        }
        timesteps = sigmas * self.num_train_timesteps
        # (B, S, C) and (B, L, A)
        video, audio = self.predict_velocities(transformer, noisy, timesteps, noisy_batch, draws)
        target = objective.compute_target(clean, draws["noise"])
        losses = compute_mean_squared_error(video, target, self._loss_weights(batch, conditioning_mask))
        # Each term is a mean, so video and sound have equal weight whatever their numbers of tokens.
        losses = losses + compute_mean_squared_error(audio, objective.compute_target(sound, draws["audio_noise"]))
        return LossOutput(losses, objective.convert_to_timesteps(sigmas))

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, C); equal to one call of the stock pipeline."""
        return self.predict_velocities(transformer, noisy, timesteps, batch, {})[0]

    def predict_in_training(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
        random_tensors: TensorMap,
    ) -> torch.Tensor:
        return self.predict_velocities(transformer, noisy, timesteps, batch, random_tensors)[0]

    def predict_velocities(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
        random_tensors: TensorMap,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict the velocities of video (B, S, C) and sound (B, L, A) in one call.

        A batch without `audio_noisy` and `audio_timestep` predicts only the video. The transformer requires at least
        one sound token, but the video does not attend to it, so its value does not change a bit of the video.
        """
        # Both texts have the same mask, so they are cut to the same length.
        text, mask = cut_text(batch["prompt_embeds"], batch["prompt_attention_mask"])
        audio_text, _ = cut_text(batch["audio_prompt_embeds"], batch["prompt_attention_mask"])
        frames, height, width = batch["latent_mean"].shape[2:]
        audio, audio_timesteps = batch.get("audio_noisy"), batch.get("audio_timestep")
        has_no_audio = audio is None
        # The transformer takes an integer mask.
        mask = None if mask is None else move_to_device(mask.long(), text.device)
        if audio is None:
            channels = self.transformer_config["audio_in_channels"]
            # A placeholder of one sound token, which the video does not attend to.
            audio = noisy.new_zeros(len(noisy), 1, channels)
            audio_text = audio_text[:, :1]
        call: dict[str, Any] = {
            "hidden_states": noisy.to(text.dtype),
            "audio_hidden_states": audio.to(text.dtype),
            "encoder_hidden_states": text,
            "audio_encoder_hidden_states": audio_text,
            "timestep": self.token_timesteps(timesteps, batch, random_tensors),
            "audio_timestep": timesteps if audio_timesteps is None else audio_timesteps,
            # One noise level per sample, also where tokens have timesteps of their own.
            "sigma": timesteps,
            "audio_sigma": audio_timesteps,
            "encoder_attention_mask": mask,
            "audio_encoder_attention_mask": None if has_no_audio else mask,
            "num_frames": frames,
            "height": height,
            "width": width,
            "fps": self.frame_rate,
            "audio_num_frames": audio.shape[1],
            "isolate_modalities": has_no_audio,
            "use_cross_timestep": True,
            "return_dict": False,
        }
        # Without sound there is no attention between the modalities.
        cross_timesteps = nullcontext() if has_no_audio else use_modality_timesteps(transformer)
        with cross_timesteps:
            video, sound = transformer(**self.append_reference_tokens(call, batch))
        # Drop the output for tokens that `append_reference_tokens` added.
        return video[:, : noisy.shape[1]], sound

    def append_reference_tokens(self, transformer_kwargs: dict[str, Any], batch: TensorMap) -> dict[str, Any]:
        """The transformer's arguments with further tokens after the video's. There are none here."""
        return transformer_kwargs

    def token_timesteps(self, timesteps: torch.Tensor, batch: TensorMap, random_tensors: TensorMap) -> torch.Tensor:
        """Timesteps of the video's tokens: one per sample (B,), or one per token (B, S)."""
        return timesteps

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        # Without the text encoder, the connectors are not needed either.
        components = {} if text else {"connectors": None}
        return self._load_pipeline(dtype, transformer, text, **components)

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        return {"prompt": prompt} if isinstance(prompt, str) else join_prompt_tensors(prompt, empty_prompt)

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        return {
            "num_frames": shape.frames,
            "height": shape.height,
            "width": shape.width,
            "frame_rate": float(self.frame_rate),
        }

    def sampling_kwargs(self, sampling: Sampling) -> dict[str, Any]:
        """Frames per second and guidance. Raises `DitLoraError` for a single step if its timestep would be NaN."""
        require_min_steps(self.scheduler, sampling.inference_steps, f"{self.path.name}: inference steps")
        # Without a frame rate, that of `shape_kwargs` applies.
        rate = {} if sampling.fps is None else {"frame_rate": float(sampling.fps)}
        perturbed = self.transformer_config["perturbed_attn"]
        return rate | guidance_kwargs(sampling.guidance_scale, has_perturbed_attention=perturbed)

    def generate(self, pipeline: Any, prompt_kwargs: Mapping[str, Any], sampling: Sampling) -> torch.Tensor:
        with bypass_connectors(pipeline, prompt_kwargs, self._text_width("video")):
            return super().generate(pipeline, prompt_kwargs, sampling)

    def generate_with_sound(
        self, pipeline: Any, prompt_kwargs: Mapping[str, Any], sampling: Sampling
    ) -> tuple[torch.Tensor, Sound | None]:
        if not self.has_sound:
            return super().generate_with_sound(pipeline, prompt_kwargs, sampling)
        # The base class returns only the video, so keep the sound of the pipeline's output on the way.
        waveforms: list[torch.Tensor] = []

        def call_pipeline(**arguments: Any) -> Any:
            output = pipeline(**arguments)
            waveforms.extend(output.audio)
            return output

        with bypass_connectors(pipeline, prompt_kwargs, self._text_width("video")):
            video = super().generate(call_pipeline, prompt_kwargs, sampling)
        return video, Sound(waveforms[0], pipeline.vocoder.config.output_sampling_rate)

    def index_changes(self) -> dict[str, Any]:
        """The pipeline class, if another task than the checkpoint's was trained."""
        return {"_class_name": self.pipeline_class.__name__} if self.has_task_override else {}
