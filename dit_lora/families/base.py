"""The contract of diffusion families: all that training knows of an opened checkpoint, in three roles.

A checkpoint holds facts and pure functions. It has no optimizer, no loop and no logging, so that no family can
lose the guard. `Encoders` make what is cached of a sample, the `Denoiser` is what trains, the `Sampler` makes
videos with it; who needs one role takes one. A family's `Checkpoint` is all three, and writes only what is
peculiar to it.

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.media.sound import Sound, SoundFormat
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.opening import load_or_init
from dit_lora.families.pictures import read_pictures
from dit_lora.families.references import References, read_references, scaled, wrong_references
from dit_lora.families.refusals import refuse_options
from dit_lora.families.sampling import Sampling
from dit_lora.families.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import Draws, Streams

Tensors = dict[str, torch.Tensor]
TensorSpec = dict[str, tuple[torch.Size, torch.dtype]]
"""Shapes and dtypes of tensors by name."""
TextEncoder = Callable[[Sequence[str]], Tensors]
"""Captions (or class names) to the tensors that condition the model, each (B, ...)."""


class VideoEncoder(Protocol):
    """Pixels to the tensors that the cache keeps for a sample."""

    def __call__(self, pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
        """`pixels` uint8 (frames, 3, height, width), an image being one frame; `image` uint8 (3, height, width)
        is a first image that the sample has of its own."""


class Trained(Protocol):
    """A checkpoint as the loop knows it."""

    @property
    def path(self) -> Path: ...

    def draws(self, batch: Mapping[str, torch.Tensor]) -> Draws: ...

    def losses(
        self, model: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput: ...


@dataclass(frozen=True)
class TextLimit:
    """The part of a caption that a text encoder reads."""

    tokenizer: Any
    max_tokens: int
    """Number of tokens with the special ones; the text beyond them is cut off."""


@dataclass(frozen=True, kw_only=True)
class Opened(ABC):
    """The facts that all roles share: where the checkpoint is, its configs, and the shapes that it takes."""

    path: Path
    transformer_config: Mapping[str, Any]
    """The transformer's config, changed by `model.from_scratch` and filled up with its family's defaults."""
    vae_config: Mapping[str, Any]
    from_scratch: Mapping[str, Any] | None = None
    """`model.from_scratch`."""
    reference_resolution: int | None = None
    """`data.reference_resolution`: side of a square with as many pixels as a reference has at most."""
    part: str = "transformer"
    """The component that trains: `transformer_2` is a second expert, for the lower noise levels."""

    @property
    def parts(self) -> Mapping[str, str]:
        """The names of several denoisers by their components, such as `transformer`: `high_noise`; empty for one."""
        return {}

    @property
    def references(self) -> References | None:
        """The references that it takes; None if it takes none."""
        return None

    @property
    @abstractmethod
    def side_step(self) -> int:
        """Height and width come in multiples of this many pixels."""

    @abstractmethod
    def wrong_shape(self, shape: VideoShape) -> list[str]:
        """Say what the VAE or the patches cannot take of this shape, each with the nearest that works."""

    def refusal(self, shape: VideoShape) -> str | None:
        """Return why the checkpoint cannot take this shape; None if it can."""
        wrong = self.wrong_shape(shape)
        return listed(f"{self.path.name} cannot take this shape", wrong) if wrong else None

    def check_shape(self, shape: VideoShape) -> None:
        """Raise `DitLoraError` with the refusal of a shape that does not fit."""
        refusal = self.refusal(shape)
        if refusal is not None:
            raise DitLoraError(refusal)


class Encoders(Opened):
    """The role of what is cached of a sample, and of what that depends on."""

    transform: ClassVar[str]
    """Name of the way that pixels are encoded; part of each sample's cache key, so changed whenever they would be encoded otherwise."""
    after_text_encoder: ClassVar[Mapping[str, Any]] = {}
    """Classes of Diffusers' that captions pass after the text encoder, by folder."""

    @property
    def sound_format(self) -> SoundFormat | None:
        """The sound that is encoded beside the video; None if none is trained."""
        return None

    def text_facts(self) -> Mapping[str, Any]:
        """Return what embeddings depend on besides caption and dtype: files (`Path`) and values."""
        return {"text_encoder": self.path / "text_encoder", "tokenizer": self.path / "tokenizer"}

    def video_facts(self) -> Mapping[str, Any]:
        """Return what a clip's cached tensors depend on besides pixels and dtype: files (`Path`) and values."""
        return {"vae": self.path / "vae", "transform": self.transform}

    @abstractmethod
    def text_limit(self) -> TextLimit | None:
        """Load the tokenizer; None where samples have classes in place of captions."""

    @abstractmethod
    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        """Return what one caption's tensors of `load_text_encoder` of that dtype are, known from the configs."""

    @abstractmethod
    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load what conditions the model on a caption; "" is what caption dropout puts in place."""

    @abstractmethod
    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE: it keeps `latent_mean`, with `latent_logvar` where the latent is drawn from the two."""


class Objective(Protocol):
    """The quantity that the network is trained to predict."""

    @property
    def train_timesteps(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Denoiser(Opened):
    """The role of what trains: the transformer, and its losses."""

    objective: Objective
    mask_floor: float = 0.0
    """Weight of the loss where a mask is black."""
    transformer_class: ClassVar[Any]

    @property
    def train_timesteps(self) -> int:
        """Timesteps are drawn from 0 to this minus one."""
        return self.objective.train_timesteps

    @property
    def drawn_timesteps(self) -> range:
        """The whole timesteps among which a step's are."""
        return range(self.train_timesteps)

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        """Load the frozen transformer in `dtype` from the start, on the CPU.

        With `model.from_scratch`, random weights drawn from torch's generator.
        """
        return load_or_init(self.transformer_class, self.path, dtype, self.from_scratch, self.part)

    @abstractmethod
    def draws(self, batch: Mapping[str, torch.Tensor]) -> Draws:
        """Return what `losses` draws for a cached batch; the shapes of its tensors are known, not their values."""

    @abstractmethod
    def losses(
        self, transformer: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput:
        """Return per-sample losses of a cached batch, fp32; every draw is one of `draws`, by `streams.drawn`."""

    @abstractmethod
    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the prediction for noisy latents of a cached batch: one call, as the pipeline's."""

    def context_tokens(self, shape: VideoShape) -> tuple[int, int]:
        """Count text and video tokens of a sample in the transformer, for ranks that share them."""
        raise DitLoraError(f"{self.path.name}: no rule says which tokens its ranks could share")


class Sampler(Opened):
    """The role of what makes videos: the stock pipeline, and how it is called."""

    output: ClassVar[str] = "frames"
    """The field of the pipeline's output: `frames` of videos, or `images`."""
    guided_batch: ClassVar[int] = 2
    """Samples in one call of the transformer for one video with guidance."""
    guided_above: ClassVar[float] = 1.0
    """The largest `guidance_scale` at which the pipeline predicts nothing for an empty prompt."""

    @property
    @abstractmethod
    def pipeline_class(self) -> Any:
        """The stock Diffusers pipeline of this checkpoint."""

    @property
    def in_fp32(self) -> tuple[str, ...]:
        """The components of the pipeline that stay in fp32 whatever the rest of it is in."""
        return ()

    def pipeline(
        self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True
    ) -> Any:
        """Load the stock pipeline, around `transformer` if given; without text encoder unless `text`."""
        return self._load_pipeline(dtype, transformer, text)

    def place(self, pipeline: Any, device: torch.device) -> None:
        """Put a whole pipeline on a device; with two experts, a GPU holds one of its models at a time."""
        if self.parts and device.type == "cuda":
            pipeline.enable_model_cpu_offload(device=device)
        else:
            pipeline.to(device)

    def _load_pipeline(
        self,
        dtype: torch.dtype,
        transformer: nn.Module | None,
        text: bool,
        **arguments: Any,
    ) -> Any:
        """Load it in a dtype, but for what stays `in_fp32`; `arguments` are its constructor's."""
        dtypes: Any = dtype
        if self.in_fp32:
            dtypes = {**dict.fromkeys(self.in_fp32, torch.float32), "default": dtype}
        if transformer is not None:
            arguments[self.part] = transformer
        if not text:
            arguments |= {"text_encoder": None, "tokenizer": None}
        return load_pretrained(
            self.pipeline_class, self.path, dtype=dtypes, use_safetensors=True, **arguments
        )

    @abstractmethod
    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        """Return the pipeline's arguments for a prompt as text, or as its text encoder's tensors with those of ""."""

    @abstractmethod
    def arguments(self, shape: VideoShape) -> dict[str, Any]:
        """Return the pipeline's arguments for a shape, and others that it is always called with."""

    def settings(self, how: Sampling) -> dict[str, Any]:
        """Return further arguments that the pipeline is called with at these settings; over those of `arguments`."""
        return {}

    @property
    def pictures(self) -> tuple[str, ...]:
        """The pictures that it starts from, as `Sampling` and the pipeline name them: `image`, `last_image`."""
        return ()

    def reference_arguments(self, how: Sampling) -> dict[str, Any]:
        """Return the pipeline's arguments for the references of one sample to make."""
        pictures = read_references(self.path.name, self.references, how.references)
        fitting = [scaled(one, self.reference_resolution) for one in pictures]
        return {"image": fitting} if fitting else {}

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        """Make one video, or an image of one frame: uint8 (frames, height, width, 3)."""
        given = {"image": how.image, "last_image": how.last_image}
        made = pipeline(
            **conditions,
            **read_pictures(self.path.name, self.pictures, given, how.shape),
            **self.reference_arguments(how),
            **self.arguments(how.shape) | self.settings(how),
            num_inference_steps=how.inference_steps,
            guidance_scale=how.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(how.seed),
            output_type="np",
        )
        frames = made.images if self.output == "images" else made.frames[0]
        return torch.from_numpy((np.asarray(frames) * 255).round().clip(0, 255).astype("uint8"))

    def generate_with_sound(
        self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling
    ) -> tuple[torch.Tensor, Sound | None]:
        """Make a video as `generate` does, and the sound that it was trained with, if any."""
        return self.generate(pipeline, conditions, how), None


class Checkpoint(Encoders, Denoiser, Sampler):
    """One opened checkpoint of a family, in all roles; `Family.open` makes it, for a recipe or as it is stored."""

    takes: ClassVar[tuple[str, ...]] = ()
    """The options of `refuse_options` that mean something for it."""

    def text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Load the stock pipeline with its text encoder alone, whose `encode_prompt` encodes captions as it does."""
        return load_pretrained(
            self.pipeline_class,
            self.path,
            transformer=None,
            vae=None,
            dtype=dtype,
            use_safetensors=True,
        ).to(device)

    @property
    def class_names(self) -> Sequence[str] | None:
        """The names of the classes that its files have; None where it has no classes."""
        return None

    def lora_targets(self, defaults: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the layers that get an adapter by default: the family's `defaults`, and what its config adds."""
        return tuple(defaults)

    def header(self) -> dict[str, Any]:
        """Return what an adapter's header says of its training beside what every one says."""
        side = self.reference_resolution
        return {} if side is None else {"reference_resolution": side}

    def with_header(self, made: Mapping[str, Any]) -> Self:
        """Return the checkpoint with what a header says that `header` gave, to compare its output or to sample."""
        side = made.get("reference_resolution", self.reference_resolution)
        return replace(self, reference_resolution=side)

    def notes(self, recipe: Recipe) -> list[str]:
        """Return lines about this checkpoint that are said when a run begins."""
        if not self.parts:
            return []
        name, low, high = self.parts[self.part], self.drawn_timesteps[0], self.drawn_timesteps[-1]
        return [f"expert: {name.replace('_', ' ')} ({self.part}), timesteps {low} to {high}"]

    def for_recipe(self, recipe: Recipe) -> Self:
        """Return the checkpoint with what it needs of a recipe; raise where shape or options do not apply to it."""
        self.check_shape(VideoShape.of(recipe.data))
        if self.parts and recipe.model.part is None:
            experts = " or ".join(f"{part} ({name})" for part, name in self.parts.items())
            raise DitLoraError(
                f"model.part is missing: {recipe.model.path} has two experts; give {experts}, or both"
            )
        of_experts = ("validation.other_expert",) if self.parts else ()
        refuse_options(recipe, (*self.takes, *of_experts))
        wrong = wrong_references(recipe, self.references)
        if wrong:
            raise DitLoraError(listed(f"{self.path.name} cannot use this recipe", wrong))
        side, floor = recipe.data.reference_resolution, recipe.data.mask_floor
        return replace(self, reference_resolution=side, mask_floor=floor)

    def index_changes(self) -> dict[str, Any]:
        """Return what a pipeline trained from this says otherwise in its model_index.json; an adapter's header has it too."""
        return {}

    def config_changes(self) -> dict[str, Any]:
        """Return what its transformer's config says otherwise than the files', with what `index_changes` describes."""
        return {}

    def as_trained(self, index: Mapping[str, Any]) -> Self:
        """Return the checkpoint as one that `index_changes` describes."""
        return self
