"""LTX-2's denoiser: flow matching on tokens of video, and of sound if it is trained too.

Packing, the shift and denoising call the stock pipeline's own code (diffusers/pipelines/ltx2/pipeline_ltx2.py).
Without sound, the video does not attend to any: a training step is the call that the pipeline makes for its modality
guidance, `isolate_modalities`.

Shapes: B batch, C latent channels, F latent frames, H and W latent size, S video tokens (F H W), L tokens of sound and
A their width.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from diffusers import LTX2Pipeline, LTX2VideoTransformer3DModel
from torch import nn

from dit_lora.errors import DitLoraError
from dit_lora.families.base import TensorMap
from dit_lora.families.captions import trim_text_padding
from dit_lora.families.flow_matching import FlowDenoiser, compute_mu
from dit_lora.families.ltx2.cross_timesteps import use_modality_timesteps
from dit_lora.families.ltx2.info import LTX2Info
from dit_lora.numerics.objectives import LossOutput, compute_mean_squared_error
from dit_lora.numerics.streams import DrawFunctions, RandomStreams, draw_normal_noise, move_to_device


@dataclass(frozen=True, kw_only=True)
class LTX2Denoiser(FlowDenoiser):
    """LTX-2's transformer and loss, for all tasks. The tasks differ only in the conditioning."""

    info: LTX2Info
    transformer_class: ClassVar[Any] = LTX2VideoTransformer3DModel

    def compute_shift_mu(self, size: torch.Size) -> float:
        """Logarithm of LTX-2's noise-level shift.

        It is the scheduler's line through 1,024 and 4,096 tokens, extended on both sides.

        The vendor's trainer does not clamp it either (Lightricks/LTX-2, ltx-trainer, timestep_samplers.py).
        """
        return compute_mu(self.info.scheduler, prod(size[1:]))

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        """Random tensors of a training step of LTX-2.

        They are those of flow matching, with noise for tokens (S, C), and those of sound if it is trained.

        Sound has its own noise level, shifted by its own number of tokens, as in the vendor's trainer (flexible.py).
        """
        video = dict(super().get_random_input_samplers(batch))
        # Cached clips may have sound that this run does not train.
        if not self.info.has_sound:
            return video
        if "audio_latent_mean" not in batch:
            raise DitLoraError(
                "data.sound: these samples were cached without their sound (audio_latent_mean); set it to false"
            )
        # (L, A), tokens and width of the sound.
        size = batch["audio_latent_mean"].shape[1:]
        # `compute_shift_mu` counts the product of all sizes but the first, which here is the number of tokens.
        shift = self.compute_shift(torch.Size([size[1], size[0]]))
        sound: DrawFunctions = {
            "audio_noise": partial(draw_normal_noise, size),
            "audio_timestep": lambda rows: self.objective.compute_sigmas(draw_normal_noise((), rows), shift),
        }
        # The conditioning's random tensors come last.
        conditioning = {name: video.pop(name) for name in self.conditioning.get_random_input_samplers(batch)}
        return {**video, **sound, **conditioning}

    def losses(self, transformer: nn.Module, batch: TensorMap, streams: RandomStreams) -> LossOutput:
        """LTX-2's velocity loss of each sample.

        With sound, it is the sum of the mean over video and the mean over sound.

        The vendor's trainer adds them in the same way (flexible.py, compute_loss). The reported timesteps are the
        video's.
        """
        if not self.info.has_sound:
            return super().losses(transformer, batch, streams)
        # With sound, this repeats the base class's steps for the video and adds those of the sound.
        draws = streams.draw_random_tensors(self.get_random_input_samplers(batch), batch["latent_mean"].device)
        objective, sigmas = self.objective, draws["timestep"]
        clean, conditioning_mask = (
            self.clean_latents(batch, draws),
            self.conditioning.compute_conditioning_mask(batch, draws),
        )
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

    def _scale_latents(self, latents: torch.Tensor, batch: TensorMap) -> torch.Tensor:
        # The cached ones are normalised.
        return latents

    def _pack_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        return LTX2Pipeline._pack_latents(latents)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity of packed latents (B, S, C); equal to one call of the stock pipeline."""
        # Without random tensors, every sample keeps its image.
        conditioned = self.conditioning.insert_clean_latents(noisy, batch, {})
        return self.predict_velocities(transformer, conditioned, timesteps, batch, {})[0]

    def predict_in_training(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
        random_tensors: TensorMap,
    ) -> torch.Tensor:
        # Without sound in the batch, its velocity is that of a placeholder.
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
        text, mask = trim_text_padding(batch["prompt_embeds"], batch["prompt_attention_mask"])
        audio_text, _ = trim_text_padding(batch["audio_prompt_embeds"], batch["prompt_attention_mask"])
        frames, height, width = batch["latent_mean"].shape[2:]
        audio, audio_timesteps = batch.get("audio_noisy"), batch.get("audio_timestep")
        has_no_audio = audio is None
        # The transformer takes an integer mask.
        mask = None if mask is None else move_to_device(mask.long(), text.device)
        if audio is None:
            channels = self.info.transformer_config["audio_in_channels"]
            # A placeholder of one sound token, which the video does not attend to.
            audio = noisy.new_zeros(len(noisy), 1, channels)
            audio_text = audio_text[:, :1]
        call: dict[str, Any] = {
            "hidden_states": noisy.to(text.dtype),
            "audio_hidden_states": audio.to(text.dtype),
            "encoder_hidden_states": text,
            "audio_encoder_hidden_states": audio_text,
            "timestep": self.conditioning.token_timesteps(timesteps, batch, random_tensors),
            "audio_timestep": timesteps if audio_timesteps is None else audio_timesteps,
            # One noise level per sample, also where tokens have timesteps of their own.
            "sigma": timesteps,
            "audio_sigma": audio_timesteps,
            "encoder_attention_mask": mask,
            "audio_encoder_attention_mask": None if has_no_audio else mask,
            "num_frames": frames,
            "height": height,
            "width": width,
            "fps": self.info.frame_rate,
            "audio_num_frames": audio.shape[1],
            "isolate_modalities": has_no_audio,
            "use_cross_timestep": True,
            "return_dict": False,
        }
        # Without sound there is no attention between the modalities.
        cross_timesteps = nullcontext() if has_no_audio else use_modality_timesteps(transformer)
        with cross_timesteps:
            video, sound = transformer(**self.conditioning.append_conditioning_tokens(call, batch))
        # Drop the output for tokens that the conditioning added.
        return video[:, : noisy.shape[1]], sound
