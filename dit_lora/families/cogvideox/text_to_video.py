"""CogVideoX text-to-video: 2B (sincos positions), 5B (RoPE) and 1.5 (patches over time too).

Positions, prompts and denoising call the stock pipeline's own code, so training and inference cannot diverge
(diffusers/pipelines/cogvideo/pipeline_cogvideox.py).

Shapes: B batch, T text tokens, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline, CogVideoXTransformer3DModel
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.families.base import CheckpointInfo, Denoiser, Encoders, Sampler, TensorMap, TensorSpec, TextEncoder
from dit_lora.families.captions import make_padded_encoder
from dit_lora.families.discrete_timesteps import DiscreteTimesteps
from dit_lora.families.latents import compute_loss_weights, sample_posterior
from dit_lora.families.refusals import frame_count_errors, side_errors
from dit_lora.numerics.objectives import LossOutput, VPrediction, compute_mean_squared_error
from dit_lora.numerics.streams import DrawFunctions, RandomStreams, draw_normal_noise

OFFSET = 2.0


@dataclass(frozen=True, kw_only=True)
class CogVideoXInfo(CheckpointInfo):
    """Info (configs, supported shapes) of a CogVideoX checkpoint for text-to-video."""

    pipeline_class: ClassVar[Any] = CogVideoXPipeline

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent along a side, as CogVideoX's pipeline computes it."""
        return 2 ** (len(self.vae_config["block_out_channels"]) - 1)

    @property
    def temporal_factor(self) -> int:
        return int(self.vae_config["temporal_compression_ratio"])

    @property
    def text_tokens(self) -> int:
        return self.transformer_config["max_text_seq_length"]

    @property
    def size_multiple(self) -> int:
        return self.spatial_factor * self.transformer_config["patch_size"]

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """Frames must be 8n + 1; height and width multiples of VAE factor x patch size (16).

        4n + 1 frames do not work: the VAE decodes latent frames in pairs and allows only an odd first one, so the 4
        latents of 13 frames decode to 16 (autoencoder_kl_cogvideox.py, `_decode`).
        """
        return [
            *side_errors(shape, self.size_multiple),
            *frame_count_errors(shape.frames, 2 * self.temporal_factor),
            *self._position_limit_errors(shape),
        ]

    def _position_limit_errors(self, shape: VideoShape) -> list[str]:
        config, factor = self.transformer_config, self.spatial_factor
        requested = {"frames": shape.frames, "height": shape.height, "width": shape.width}
        # The config gives latent sizes; recipes give pixels.
        sizes = {name: config[f"sample_{name}"] * factor for name in ("height", "width")}
        if config["use_learned_positional_embeddings"]:
            # For other lengths, Diffusers recomputes sincos positions and ignores the learned ones.
            learned = {"frames": config["sample_frames"], **sizes}
            return [
                f"data.{name} must be {value}, which its learned positions are for; got {requested[name]}"
                for name, value in learned.items()
                if requested[name] != value
            ]
        if config["patch_size_t"] is None:
            return []
        return [
            f"data.{name} can be {max_size} at most, where its positions end; got {requested[name]}"
            for name, max_size in sizes.items()
            if requested[name] > max_size
        ]


@dataclass(frozen=True, kw_only=True)
class CogVideoXEncoders(Encoders):
    """Text encoder and VAE of a CogVideoX checkpoint for text-to-video."""

    info: CogVideoXInfo
    vae_class = AutoencoderKLCogVideoX
    has_fp32_vae = False
    transform = "cogvideox-1: pixels / 127.5 - 1, posterior mean and logvar"

    def text_cache_key(self) -> Mapping[str, Any]:
        return {**super().text_cache_key(), "tokens": self.info.text_tokens}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        size = (self.info.text_tokens, self.info.transformer_config["text_embed_dim"])
        return {"prompt_embeds": (torch.Size(size), dtype)}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load T5 as CogVideoX's pipeline uses it: padded to `max_text_seq_length`, without an attention mask."""
        return make_padded_encoder(self.load_text_pipeline(dtype, device), self.info.text_tokens, device)


@dataclass(frozen=True, kw_only=True)
class CogVideoXDenoiser(Denoiser):
    """CogVideoX's transformer and loss, for text-to-video and image-to-video.

    The tasks differ only in the conditioning.
    """

    info: CogVideoXInfo
    objective: VPrediction
    discrete_timesteps: DiscreteTimesteps = field(default_factory=DiscreteTimesteps)
    transformer_class: ClassVar[Any] = CogVideoXTransformer3DModel

    @property
    def training_options(self) -> tuple[str, ...]:
        return ("train.timesteps", *super().training_options)

    def apply_training_options(self, recipe: Recipe) -> Self:
        timesteps = DiscreteTimesteps.from_recipe(recipe, self.info.path.name)
        return replace(super().apply_training_options(recipe), discrete_timesteps=timesteps)

    @property
    def timestep_range(self) -> range:
        return self.discrete_timesteps.get_timestep_range(self.num_train_timesteps)

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        channels, frames, *size = batch["latent_mean"].shape[1:]
        return {
            # The posterior has no padding frames: they repeat the first latent frame after it is drawn.
            "posterior": partial(draw_normal_noise, (channels, frames, *size)),
            "noise": partial(draw_normal_noise, (channels, frames + self.num_padding_frames(frames), *size)),
            "timestep": self.discrete_timesteps.make_timestep_sampler(self.num_train_timesteps),
            **self.conditioning.get_random_input_samplers(batch),
        }

    def losses(self, transformer: nn.Module, batch: TensorMap, streams: RandomStreams) -> LossOutput:
        """v-prediction loss of each sample at random timesteps; noising, target and loss are in fp32.

        If patches span two latent frames, the first frame is repeated in front, as CogVideo trains 1.5. The pipeline
        drops the output for it, so it gets no loss here (CogVideo's own trainer does include it).
        """
        # Each tensor is (B, ...), drawn by the samples' own streams.
        draws = streams.draw_random_tensors(self.get_random_input_samplers(batch), batch["latent_mean"].device)
        clean_BCFHW = sample_posterior(batch["latent_mean"], batch["latent_logvar"], draws["posterior"])
        padding = self.num_padding_frames(clean_BCFHW.shape[2])
        # With `num_padding_frames` 0, nothing is put in front.
        clean_BCFHW = torch.cat([clean_BCFHW[:, :, :1]] * padding + [clean_BCFHW], dim=2)
        # The transformer takes (B, F, C, H, W).
        clean = clean_BCFHW.transpose(1, 2) * self.info.vae_config["scaling_factor"]
        noise, timesteps = draws["noise"].transpose(1, 2), draws["timestep"]

        noisy = self.objective.add_noise(clean, noise, timesteps)
        prediction = self.predict_in_training(transformer, noisy, timesteps, batch, draws)
        target = self.objective.compute_target(clean, noise, timesteps)
        weights = compute_loss_weights(batch, self.mask_floor, clean)
        # Leave out the repeated first frames, whose output the pipeline drops.
        losses = compute_mean_squared_error(prediction[:, padding:], target[:, padding:], weights)
        return LossOutput(losses, timesteps)

    def num_padding_frames(self, frames: int) -> int:
        """Number of latent frames that the pipeline adds in front so that temporal patches fit."""
        return -frames % (self.info.transformer_config["patch_size_t"] or 1)

    def count_tokens(self, shape: VideoShape) -> tuple[int, int]:
        """Number of text and video tokens of a sample of this shape in the transformer."""
        # Latent frames: one for the first frame, then one for every `temporal_factor` frames.
        frames = (shape.frames - 1) // self.info.temporal_factor + 1
        frames += self.num_padding_frames(frames)
        # Tokens of one latent frame.
        area = (shape.height // self.info.size_multiple) * (shape.width // self.info.size_multiple)
        return self.info.text_tokens, frames // (self.info.transformer_config["patch_size_t"] or 1) * area

    def predict(
        self, transformer: nn.Module, noisy_BFCHW: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Predict the velocity for noisy latents; equal to one call of the stock pipeline."""
        # Without random tensors, the image is the clean one, at its posterior's mean.
        return self.predict_in_training(transformer, noisy_BFCHW, timesteps, batch, {})

    def predict_in_training(
        self,
        transformer: nn.Module,
        noisy_BFCHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: TensorMap,
        random_tensors: TensorMap,
    ) -> torch.Tensor:
        """Predict the velocity of noisy latents, with the random tensors of the conditioning, if any."""
        # For image-to-video, (B, F, 2 C, H, W).
        hidden_BFCHW = self.conditioning.append_channels(noisy_BFCHW, batch, random_tensors)
        prompt_embeds = batch["prompt_embeds"]
        # Only 1.5 image-to-video embeds an offset.
        has_offset = self.info.transformer_config["ofs_embed_dim"] is not None
        # (B, F, C, H, W): axis 2 holds the channels.
        frames, height, width = (hidden_BFCHW.shape[i] for i in (1, 3, 4))
        return transformer(
            hidden_states=hidden_BFCHW.to(prompt_embeds.dtype),
            encoder_hidden_states=prompt_embeds,
            timestep=timesteps,
            image_rotary_emb=self._rotary_embeddings(frames, height, width, hidden_BFCHW.device),
            return_dict=False,
            **({"ofs": prompt_embeds.new_full((1,), OFFSET)} if has_offset else {}),
        )[0]

    def _rotary_embeddings(
        self, frames: int, height: int, width: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        info = self.info
        if not info.transformer_config["use_rotary_positional_embeddings"]:
            return None
        # Call the pipeline's method on a stand-in with the two attributes that it reads.
        pipeline_stub = SimpleNamespace(
            transformer=SimpleNamespace(config=SimpleNamespace(**info.transformer_config)),
            vae_scale_factor_spatial=info.spatial_factor,
        )
        return info.pipeline_class._prepare_rotary_positional_embeddings(
            pipeline_stub, height * info.spatial_factor, width * info.spatial_factor, frames, device
        )


@dataclass(frozen=True, kw_only=True)
class CogVideoXSampler(Sampler):
    """CogVideoX's pipeline arguments, for text-to-video and image-to-video."""

    info: CogVideoXInfo
    frames_argument = "num_frames"

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        return {**super().shape_kwargs(shape), "max_sequence_length": self.info.text_tokens}
