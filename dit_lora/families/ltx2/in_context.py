"""LTX-2 in context (IC-LoRA training): a reference clip's latents follow the video's as further tokens.

The reference's tokens have positions of their own. They are clean, at timestep 0 and without loss. The stock pipeline
preprocesses, positions and denoises them (diffusers/pipelines/ltx2/pipeline_ltx2_ic_lora.py). Noise levels depend only
on the number of the video's tokens, as in the vendor's trainer (training_strategies/video_to_video.py).

Shapes: B batch, C latent channels, F latent frames, H and W latent size, S video tokens (F H W), R reference tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import torch
from diffusers import LTX2InContextPipeline
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from diffusers.video_processor import VideoProcessor

from dit_lora.adapters.diffusers_format import DOWNSCALE_KEY
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.families.base import Checkpoint, Sampling, TensorMap, Tensors, VideoEncoder
from dit_lora.families.conditioning import Conditioning
from dit_lora.families.latents import PLAIN_VAE, VaeMemory
from dit_lora.families.ltx2.denoiser import LTX2Denoiser
from dit_lora.families.ltx2.encoders import LTX2Encoders
from dit_lora.families.ltx2.info import LTX2Info
from dit_lora.families.ltx2.sampler import LTX2Sampler
from dit_lora.families.ltx2.sound import AudioEncoder, build_audio_encoder
from dit_lora.families.pictures import to_pil_image
from dit_lora.families.references import (
    ReferenceSpec,
    get_reference_latents,
    name_reference_latents,
    read_reference_clips,
)
from dit_lora.numerics.objectives import FlowMatching
from dit_lora.numerics.streams import move_to_device


@dataclass(frozen=True, kw_only=True)
class LTX2InContextInfo(LTX2Info):
    """Info of an LTX-2, LTX-2.3 or LTX-2.5 checkpoint that generates a video from a reference clip."""

    pipeline_class: ClassVar[Any] = LTX2InContextPipeline
    trained_shape: VideoShape | None = None
    """The recipe's shape; None outside of training."""

    @property
    def reference_spec(self) -> ReferenceSpec:
        return ReferenceSpec(1, 1, self._reference_shape, is_clip=True)

    def compute_reference_downscale(self, shape: VideoShape) -> int:
        """The pipeline's `reference_downscale_factor`, an integer.

        It is the smallest that satisfies `data.reference_resolution`.
        """
        factor, side = 1, self.reference_resolution
        # The smallest integer factor that brings the reference down to `side` squared pixels.
        while side is not None and shape.height * shape.width > (side * factor) ** 2:
            factor += 1
        return factor

    def _reference_shape(self, height: int, width: int, shape: VideoShape) -> VideoShape:
        factor = self.compute_reference_downscale(shape)
        return VideoShape(shape.frames, shape.height // factor, shape.width // factor)

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """Error messages for a shape, also for sides that the downscale factor does not divide into whole tokens.

        Otherwise the reference's positions would not match the video's.
        """
        problems, factor = super().find_shape_errors(shape), self.compute_reference_downscale(shape)
        # The reference, `factor` times smaller, must have whole tokens too.
        step = self.size_multiple * factor
        if problems or not (shape.height % step or shape.width % step):
            return problems
        return [
            f"data.reference_resolution {self.reference_resolution} makes references {factor} times smaller than "
            f"{shape.width} x {shape.height}, whose sides must then be multiples of {step}"
        ]

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        """Copy of the checkpoint's info with the recipe's settings.

        The shape is checked with `data.reference_resolution` applied.
        """
        info = super().copy_with_recipe_settings(recipe, training_options)
        # The base class checked it before `reference_resolution` was set, when the factor was still 1.
        shape = VideoShape.from_data(recipe.data)
        info.check_shape(shape)
        return replace(info, trained_shape=shape)

    def training_metadata(self) -> dict[str, Any]:
        """Training metadata for an adapter's header.

        It includes the downscale factor of references, under the name that other programs read.
        """
        header = super().training_metadata()
        return (
            header
            if self.trained_shape is None
            else {**header, DOWNSCALE_KEY: self.compute_reference_downscale(self.trained_shape)}
        )

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        factor = self.compute_reference_downscale(VideoShape.from_data(recipe.data))
        note = f"references: one clip per sample; the pipeline needs reference_downscale_factor={factor}"
        return [*super().recipe_notes(recipe), note]


@dataclass(frozen=True, kw_only=True)
class LTX2InContextEncoders(LTX2Encoders):
    """Text encoder and VAEs of an LTX-2 checkpoint that trains on clips and their references."""

    info: LTX2InContextInfo

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE in fp32. Samples keep the normalised latents of the clip and of its reference."""
        vae = self.load_vae(dtype, device, memory)
        if not self.info.has_sound:
            return _ClipEncoder(self, vae)
        return _ClipSoundEncoder(self, vae, build_audio_encoder(self.info.path, device))


@dataclass(frozen=True, kw_only=True)
class LTX2InContextSampler(LTX2Sampler):
    """LTX-2's pipeline arguments for generating videos from a reference clip."""

    info: LTX2InContextInfo

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        return {**super().shape_kwargs(shape), DOWNSCALE_KEY: self.info.compute_reference_downscale(shape)}

    def reference_kwargs(self, sampling: Sampling) -> dict[str, Any]:
        """Pipeline arguments with the reference clip, read as in training; the pipeline scales it down."""
        info, fps = self.info, sampling.fps or self.info.frame_rate
        clips = read_reference_clips(info.path.name, info.reference_spec, sampling.references, sampling.shape, fps)
        conditions = [LTX2ReferenceCondition(frames=_to_pil_frames(clip)) for clip in clips]
        return {"reference_conditions": conditions}


@dataclass(frozen=True, kw_only=True)
class ReferenceTokens(Conditioning):
    """Conditioning that appends a reference clip as further tokens of LTX-2's transformer."""

    transformer_config: Mapping[str, Any]

    def append_conditioning_tokens(self, transformer_kwargs: dict[str, Any], batch: TensorMap) -> dict[str, Any]:
        """LTX-2's transformer arguments with the reference's tokens after the video's, (B, S + R, C)."""
        latents, tokens, timesteps = (
            get_reference_latents(batch),
            transformer_kwargs["hidden_states"],
            transformer_kwargs["timestep"],
        )
        reference_tokens = [LTX2InContextPipeline._pack_latents(latent.float()) for latent in latents]
        packed_references = torch.cat(reference_tokens, dim=1).to(tokens.dtype)
        # Positions are in seconds, so the references need the video's frame rate.
        fps = transformer_kwargs["fps"]
        positions = [self._token_positions(batch["latent_mean"], 1, fps)]
        # The latents' widths tell how many times smaller the references are.
        width = batch["latent_mean"].shape[-1]
        positions += [self._token_positions(latent, width // latent.shape[-1], fps) for latent in latents]
        # Positions and timesteps are repeated for each sample of the batch.
        rows = len(tokens)
        token_timesteps = timesteps[:, None].expand(-1, tokens.shape[1])
        return {
            **transformer_kwargs,
            "hidden_states": torch.cat([tokens, packed_references], dim=1),
            # Timesteps per token: the step's for the video, 0 for the clean reference.
            "timestep": torch.cat(
                [token_timesteps, token_timesteps.new_zeros(rows, packed_references.shape[1])], dim=1
            ),
            "video_coords": move_to_device(torch.cat(positions, dim=2), tokens.device).expand(rows, -1, -1, -1),
        }

    def _token_positions(self, latents: torch.Tensor, factor: int, fps: float) -> torch.Tensor:
        """Start and end of tokens in seconds and in the video's pixels, (1, 3, F H W, 2), as in the transformer."""
        config = self.transformer_config
        rope: Any = SimpleNamespace(
            patch_size=config["patch_size"],
            patch_size_t=config["patch_size_t"],
            scale_factors=tuple(config["vae_scale_factors"]),
            causal_offset=config["causal_offset"],
        )
        frames, height, width = latents.shape[-3:]
        positions = LTX2AudioVideoRotaryPosEmbed.prepare_video_coords(
            rope, 1, frames, height, width, torch.device("cpu"), fps=fps
        )
        # Axes 1 and 2 are height and width: spread the smaller reference over the video's area.
        positions[:, 1:] *= factor
        return positions


@dataclass(frozen=True)
class _ClipEncoder:
    """VAE encoder of clips that also encodes their references, as the pipeline does."""

    encoders: LTX2InContextEncoders
    vae: Any

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
        return self.encoders.encode_pixels(self.vae, pixels)

    @torch.no_grad()
    def encode_references(self, references: Sequence[torch.Tensor], shape: VideoShape) -> Tensors:
        return name_reference_latents([self._encode_reference(clip, shape) for clip in references])

    def _encode_reference(self, clip: torch.Tensor, shape: VideoShape) -> torch.Tensor:
        """Latents (C, F, H, W) of a reference clip, encoded by the pipeline's method."""
        vae, info, pipeline = self.vae, self.encoders.info, self.encoders.info.pipeline_class
        # `frames` collects the latents before they are packed.
        ratio, frames = vae.spatial_compression_ratio, []

        def record_and_pack(latents: torch.Tensor, *_sizes: int) -> torch.Tensor:
            frames.append(latents)
            return pipeline._pack_latents(latents)

        pipeline_stub: Any = SimpleNamespace(
            vae=vae,
            # The same as in the pipeline's constructor.
            video_processor=VideoProcessor(vae_scale_factor=ratio, resample="bilinear"),
            transformer_spatial_patch_size=1,
            transformer_temporal_patch_size=1,
            _normalize_latents=pipeline._normalize_latents,
            _pack_latents=record_and_pack,
            transformer=SimpleNamespace(rope=_RopeStandIn()),
        )
        pipeline._encode_reference_conditions(
            pipeline_stub,
            [LTX2ReferenceCondition(frames=_to_pil_frames(clip))],
            shape.height,
            shape.width,
            shape.frames,
            reference_downscale_factor=info.compute_reference_downscale(replace(shape, references=())),
            dtype=torch.float32,
            device=next(vae.parameters()).device,
        )
        # The method packs exactly once, so `record_and_pack` has seen one tensor.
        (latents,) = frames
        return latents[0]


@dataclass(frozen=True)
class _ClipSoundEncoder(_ClipEncoder):
    """Encoder of clips and their references that also encodes the clips' sound."""

    audio_encoder: AudioEncoder

    def encode_sound(self, waveform: torch.Tensor, rate: int) -> Tensors:
        return self.audio_encoder(waveform, rate)


class _RopeStandIn:
    """Stand-in for the transformer's RoPE while a reference is encoded.

    Its positions are empty because they are computed per batch.
    """

    def prepare_video_coords(self, **_sizes: Any) -> torch.Tensor:
        return torch.zeros(1, 3, 0, 2)


def _to_pil_frames(clip: torch.Tensor) -> list[Any]:
    """Convert uint8 (frames, 3, height, width) to the PIL images that the pipeline takes as frames."""
    return [to_pil_image(frame) for frame in clip]


def compose_checkpoint(objective: FlowMatching, **facts: Any) -> Checkpoint:
    """Build an opened LTX-2 checkpoint that generates videos from a reference clip."""
    info = LTX2InContextInfo(**facts)
    # The config has the factors and the offset that positions are computed with.
    conditioning = ReferenceTokens(transformer_config=info.transformer_config)
    denoiser = LTX2Denoiser(info=info, objective=objective, conditioning=conditioning)
    return Checkpoint.from_denoiser(denoiser, LTX2InContextEncoders, LTX2InContextSampler)
