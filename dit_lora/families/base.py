"""The contract of diffusion families: all that training needs from an opened checkpoint, split into three roles.

A checkpoint holds facts and pure functions. It has no optimizer, training loop or logging, so no family can bypass the
guard. `Encoders` compute the tensors that are cached per sample, the `Denoiser` is the model that trains, and the
`Sampler` generates videos with it. All three share the checkpoint's facts, `CheckpointInfo`. Code that needs one role
takes that role as its argument. A family implements the roles and contains only what is specific to it.

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.media.sound import Sound, SoundFormat
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.conditioning import Conditioning
from dit_lora.families.latents import PLAIN_VAE, VaeMemory, encode_video
from dit_lora.families.opening import get_call_default, load_or_init_transformer
from dit_lora.families.pictures import read_conditioning_images
from dit_lora.families.references import ReferenceSpec, read_references, reference_errors, scale_image
from dit_lora.families.refusals import refuse_options
from dit_lora.numerics.objectives import LossOutput
from dit_lora.numerics.streams import DrawFunctions, RandomStreams

Tensors = dict[str, torch.Tensor]
TensorMap = Mapping[str, torch.Tensor]
"""Tensors by name that are only read, each (B, ...): a cached batch, or the random tensors of a training step."""
TensorSpec = dict[str, tuple[torch.Size, torch.dtype]]
"""Shapes and dtypes of tensors by name."""
TextEncoder = Callable[[Sequence[str]], Tensors]
"""Encodes captions (or class names) into the tensors that condition the model, each (B, ...)."""


# text_encoder, tokenizer, text_encoder_2 and so on: encoders at even indices, tokenizers at odd ones.
TEXT_COMPONENTS = tuple(f"{part}{number}" for number in ("", "_2", "_3") for part in ("text_encoder", "tokenizer"))


class VideoEncoder(Protocol):
    """Protocol of a VAE wrapper that encodes pixels into the tensors that are cached for a sample."""

    def __call__(self, pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
        """Encode one sample.

        Args:
            pixels: uint8 (frames, 3, height, width); an image is one frame.
            image: uint8 (3, height, width), a separate first image of the sample. None if it has none.
        """


class TrainableCheckpoint(Protocol):
    """Protocol of the parts of an opened checkpoint that the training loop uses."""

    @property
    def path(self) -> Path: ...

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions: ...

    def losses(self, model: nn.Module, batch: TensorMap, streams: RandomStreams) -> LossOutput: ...


@dataclass(frozen=True)
class TextLimit:
    """Tokenizer and token limit of a text encoder: captions beyond the limit are truncated."""

    tokenizer: Any
    max_tokens: int
    """Maximum number of tokens, special tokens included. Text beyond it is truncated."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo(ABC):
    """Base class for what all roles of an opened checkpoint share: path, configs and supported shapes."""

    path: Path
    transformer_config: Mapping[str, Any]
    """The transformer's config from its file, updated by `model.from_scratch`. Some families add defaults."""
    vae_config: Mapping[str, Any]
    from_scratch: Mapping[str, Any] | None = None
    """`model.from_scratch`: config changes of a transformer with random weights. None to load the weights."""
    reference_resolution: int | None = None
    """`data.reference_resolution`: references are scaled to at most this value squared, in pixels. None for no limit.
    """
    part: str = "transformer"
    """The component that is trained. `transformer_2` is the second expert, for the lower noise levels."""
    has_task_override: bool = False
    """True if the recipe selects another task than the checkpoint's pipeline."""

    supported_options: ClassVar[tuple[str, ...]] = ()
    """Options that this checkpoint supports, of those that `refuse_options` rejects by default."""

    @property
    @abstractmethod
    def pipeline_class(self) -> Any:
        """The stock Diffusers pipeline class of a checkpoint."""

    @property
    def expert_names(self) -> Mapping[str, str]:
        """Names of a checkpoint's experts by component, such as `{"transformer": "high_noise"}`.

        Empty with one denoiser.
        """
        return {}

    @property
    def reference_spec(self) -> ReferenceSpec | None:
        """Specification of the reference pictures or clips that the model accepts; None if it accepts none."""
        return None

    @property
    def image_argument_names(self) -> tuple[str, ...]:
        """Images that a video starts or ends with, by pipeline argument (`image`, `last_image`). Empty if none."""
        return ()

    @property
    def class_names(self) -> Sequence[str] | None:
        """Names of the classes in the checkpoint's files; None if it is not class-conditional."""
        return None

    @property
    def text_tokens(self) -> int:
        """Number of tokens that captions are truncated or padded to, by default the pipeline's default."""
        return get_call_default(self.pipeline_class, "max_sequence_length")  # type: ignore[no-any-return]

    @property
    @abstractmethod
    def size_multiple(self) -> int:
        """Number of pixels that height and width of a sample must be a multiple of."""

    @abstractmethod
    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """One error message per problem of a sample's shape (VAE stride, patch size).

        Each names the nearest valid value.
        """

    def unsupported_reason(self, shape: VideoShape) -> str | None:
        """Error message for a shape that the checkpoint cannot process; None if it can."""
        problems = self.find_shape_errors(shape)
        return format_list(f"{self.path.name} cannot take this shape", problems) if problems else None

    def check_shape(self, shape: VideoShape) -> None:
        """Raise `DitLoraError` if the checkpoint cannot process this shape."""
        reason = self.unsupported_reason(shape)
        if reason is not None:
            raise DitLoraError(reason)

    def lora_targets(self, defaults: Sequence[str]) -> tuple[str, ...]:
        """Names of the layers that get a LoRA by default.

        They are the family's `defaults`, plus those that depend on the config.
        """
        return tuple(defaults)

    def training_metadata(self) -> dict[str, Any]:
        """Family-specific training metadata, stored in an adapter's header in addition to the common fields."""
        side = self.reference_resolution
        return {} if side is None else {"reference_resolution": side}

    def copy_with_training_metadata(self, metadata: Mapping[str, Any]) -> Self:
        """Copy of the checkpoint's info with the settings that an adapter's header holds.

        Used to compare outputs or to sample.
        """
        # Adapters that do not record the setting keep the value that the checkpoint was opened with.
        side = metadata.get("reference_resolution", self.reference_resolution)
        return replace(self, reference_resolution=side)

    def copy_with_recipe_settings(self, recipe: Recipe, training_options: Sequence[str] = ()) -> Self:
        """Copy of the checkpoint's info with the recipe's settings.

        Raises `DitLoraError` for an unsupported shape or option.

        Args:
            recipe: The recipe to check and to apply.
            training_options: Options that the denoiser supports, of those that `refuse_options` rejects by default.
        """
        self.check_shape(VideoShape.from_data(recipe.data))
        # With two experts there is no default: an adapter belongs to one of them.
        if self.expert_names and recipe.model.part is None:
            experts = " or ".join(f"{part} ({name})" for part, name in self.expert_names.items())
            raise DitLoraError(f"model.part is missing: {recipe.model.path} has two experts; give {experts}, or both")
        # Sampling with the other expert's adapter only makes sense if there are two experts.
        expert_options = ("validation.other_expert",) if self.expert_names else ()
        refuse_options(recipe, (*self.supported_options, *training_options, *expert_options))
        # References need the checkpoint's facts, so the recipe cannot check them by itself.
        problems = reference_errors(recipe, self.reference_spec)
        if problems:
            raise DitLoraError(format_list(f"{self.path.name} cannot use this recipe", problems))
        return replace(self, reference_resolution=recipe.data.reference_resolution)

    def recipe_notes(self, recipe: Recipe) -> list[str]:
        """Messages about the opened checkpoint that are printed when a run begins."""
        return []

    def pipeline_components(self) -> dict[str, Any]:
        """Components without weights that the stock pipeline must get to be built at all, by name. Mostly none."""
        return {}

    def load_partial_pipeline(self, **components: Any) -> Any:
        """Load the stock pipeline with these components in place of the stored ones; None leaves one out.

        Other keywords are options of `from_pretrained`.
        """
        return load_pretrained(self.pipeline_class, self.path, **self.pipeline_components() | components)

    def model_index_changes(self) -> dict[str, Any]:
        """Changes to model_index.json in a pipeline trained from this checkpoint. Adapter headers store them too.

        By default this is the pipeline's class, if the recipe chose another task than the checkpoint's.
        """
        return {"_class_name": self.pipeline_class.__name__} if self.has_task_override else {}

    def transformer_config_changes(self) -> dict[str, Any]:
        """Changes to the transformer's config that go with the changes to model_index.json."""
        return {}

    def copy_with_model_index_changes(self, index: Mapping[str, Any]) -> Self:
        """Copy of the checkpoint's info with these changes to model_index.json applied."""
        return self


@dataclass(frozen=True, kw_only=True)
class Encoders(ABC):
    """Base class of the role that encodes samples: it computes a sample's cached tensors and their cache keys."""

    info: CheckpointInfo
    transform: ClassVar[str]
    """Version of the pixel encoding. It is part of a sample's cache key, so it must change when the encoding does."""
    vae_class: ClassVar[Any]
    """Diffusers' class of the VAE."""
    has_fp32_vae: ClassVar[bool] = True
    """True if the VAE encodes in fp32 regardless of the requested dtype: bf16 would round what is cached."""
    tokenizer_folder: ClassVar[str] = "tokenizer"
    """Folder of the tokenizer that counts a caption's tokens."""
    text_postprocessors: ClassVar[Mapping[str, Any]] = {}
    """Diffusers classes that process captions after the text encoder, by the name of their folder."""

    @property
    def sound_format(self) -> SoundFormat | None:
        """Format of the audio that is encoded with the video; None if no sound is trained."""
        return None

    def text_cache_key(self) -> Mapping[str, Any]:
        """Cache key of the text embedding: every input other than caption and dtype. Paths are hashed by content."""
        path = self.info.path
        return {"text_encoder": path / "text_encoder", "tokenizer": path / "tokenizer"}

    def latent_cache_key(self) -> Mapping[str, Any]:
        """Cache key of a clip's tensors: every input other than pixels and dtype. Paths are hashed by content."""
        return {"vae": self.info.path / "vae", "transform": self.transform}

    def load_text_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Load the stock pipeline with only its text encoder, so that `encode_prompt` works as in sampling."""
        return self._load_text_pipeline(dtype, device)

    def _load_text_pipeline(self, dtype: torch.dtype, device: torch.device, **components: Any) -> Any:
        """`load_text_pipeline` with these components; None leaves one out, as the transformer and the VAE are."""
        components = {"transformer": None, "vae": None, "dtype": dtype, "use_safetensors": True, **components}
        return self.info.load_partial_pipeline(**components).to(device)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer of `tokenizer_folder`."""
        # Import here: Transformers takes seconds to import.
        from transformers import AutoTokenizer

        return load_pretrained(AutoTokenizer, self.info.path / self.tokenizer_folder)

    def load_text_limit(self) -> TextLimit | None:
        """Load the tokenizer and the caption's token limit, by default `text_tokens`.

        None if samples have classes instead of captions.
        """
        return TextLimit(self.load_tokenizer(), self.info.text_tokens)

    def list_caption_warnings(self, captions: Iterable[str]) -> list[str]:
        """Messages about captions that the pipeline would encode differently, printed when a run begins."""
        return []

    @abstractmethod
    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        """Shapes and dtypes of one encoded caption, read from the configs without loading the text encoder."""

    @abstractmethod
    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Load the encoder that turns captions into conditioning tensors.

        Caption dropout replaces a caption with "".
        """

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        """Encode a clip, uint8 (frames, 3, height, width), or an image of one frame, without gradients.

        The tensors include `latent_mean`, and `latent_logvar` if the VAE gives a posterior. The default suits most
        video VAEs, and `encode_picture` of `families.latents` most VAEs of images.
        """
        return encode_video(vae, pixels)

    def load_vae(self, dtype: torch.dtype, device: torch.device, memory: VaeMemory) -> Any:
        """Load the VAE for `load_video_encoder`, in fp32 with `has_fp32_vae`."""
        return memory.load(self.vae_class, self.info.path, torch.float32 if self.has_fp32_vae else dtype, device)

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Load the VAE as an encoder of samples, by default with the tensors of `encode_pixels`.

        Families that also encode a first image, references or sound override this.

        Args:
            dtype: Requested dtype of the VAE, ignored with `has_fp32_vae`.
            device: Device to encode on.
            memory: Tiling and slicing of the VAE.
        """
        vae = self.load_vae(dtype, device, memory)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            return self.encode_pixels(vae, pixels)

        return encode


class Objective(Protocol):
    """Protocol of a training objective: the quantity that the network predicts, such as noise or velocity."""

    @property
    def num_train_timesteps(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Denoiser(ABC):
    """Base class of the role that is trained: the transformer and its loss."""

    info: CheckpointInfo
    objective: Objective
    mask_floor: float = 0.0
    """Weight of the loss where a loss mask is black (`data.mask_floor`)."""
    conditioning: Conditioning = field(default_factory=Conditioning)
    """Conditioning by more than text, which differs between the tasks of a family."""
    transformer_class: ClassVar[Any]

    @property
    def training_options(self) -> tuple[str, ...]:
        """Recipe options of the loss that the denoiser supports, of those that `refuse_options` rejects by default."""
        return self.conditioning.supported_options

    def apply_training_options(self, recipe: Recipe) -> Self:
        """This denoiser with the recipe's loss settings: conditioning and mask. No weights are copied.

        Raises `DitLoraError` if it cannot train with them.
        """
        conditioning = self.conditioning.copy_with_recipe_settings(recipe)
        return replace(self, mask_floor=recipe.data.mask_floor, conditioning=conditioning)

    @property
    def num_train_timesteps(self) -> int:
        """Number of timesteps of the noise schedule: training samples them from `range(num_train_timesteps)`."""
        return self.objective.num_train_timesteps

    @property
    def timestep_range(self) -> range:
        """The integer timesteps that training samples from."""
        return range(self.num_train_timesteps)

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        """Load the frozen transformer on the CPU, in `dtype` from the start.

        With `model.from_scratch` its weights are random instead, drawn from torch's default generator.
        """
        # `part` names the folder, so each of two experts is loaded without the other one.
        info = self.info
        return load_or_init_transformer(self.transformer_class, info.path, dtype, info.from_scratch, info.part)

    @abstractmethod
    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        """Random tensors (by name) that the loss of a cached batch needs. Only the batch's shapes matter."""

    @abstractmethod
    def losses(self, transformer: nn.Module, batch: TensorMap, streams: RandomStreams) -> LossOutput:
        """Compute the loss of each sample of a cached batch.

        Args:
            transformer: The model that is trained, possibly wrapped.
            batch: Cached tensors by name, each (B, ...).
            streams: Random number streams. Every random tensor is one of `get_random_input_samplers` and is drawn with
                `streams.draw_random_tensors`.

        Returns:
            The losses, fp32 (B,), and the timesteps they were taken at.
        """

    @abstractmethod
    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: TensorMap
    ) -> torch.Tensor:
        """Run the transformer once on noisy latents of a cached batch, exactly as the stock pipeline calls it."""

    def count_tokens(self, shape: VideoShape) -> tuple[int, int]:
        """Number of text and video tokens of a sample in the transformer, for context-parallel ranks that split them.

        Raises `DitLoraError` for families without a rule to split their tokens.
        """
        raise DitLoraError(f"{self.info.path.name}: no rule says which tokens its ranks could share")


@dataclass(frozen=True)
class Sampling:
    """The settings of one generated video or image."""

    shape: VideoShape
    inference_steps: int
    guidance_scale: float
    seed: int
    image: Path | None = None
    """The first frame, for image-to-video families."""
    last_image: Path | None = None
    """The last frame, for families that also accept one."""
    references: tuple[Path, ...] = ()
    """The references, for families that accept them."""
    fps: float | None = None
    """Frames per second, for families that condition on it."""


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """Base class of the role that generates samples: it holds the stock pipeline and computes its arguments."""

    info: CheckpointInfo
    output_field: ClassVar[str] = "frames"
    """The field of the pipeline's output: `frames` for videos, or `images`."""
    frames_argument: ClassVar[str | None] = None
    """The pipeline's argument for the number of frames, such as `num_frames`. None for images."""
    guidance_batch_size: ClassVar[int] = 2
    """Batch size of one transformer call when a single video is sampled with guidance."""
    num_guidance_transformers: ClassVar[int] = 0
    """Number of frozen transformers, as large as the trained one, that guidance needs in memory beside it."""
    guidance_threshold: ClassVar[float] = 1.0
    """Classifier-free guidance runs only if `guidance_scale` is above this value."""

    @property
    def fp32_components(self) -> tuple[str, ...]:
        """Components of the pipeline that stay in fp32 regardless of the pipeline's dtype."""
        return ()

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        """Load the stock pipeline, with `transformer` in it if given.

        Text encoders are left out if `text` is false.
        """
        return self._load_pipeline(dtype, transformer, text)

    def move_to_device(self, pipeline: Any, device: torch.device) -> None:
        """Move a whole pipeline to a device. With two transformers, a GPU holds one of its models at a time."""
        # Each component is copied to the GPU when the pipeline calls it, and off again when the next one runs.
        if (self.info.expert_names or self.num_guidance_transformers) and device.type == "cuda":
            pipeline.enable_model_cpu_offload(device=device)
        else:
            pipeline.to(device)

    def _load_pipeline(self, dtype: torch.dtype, transformer: nn.Module | None, text: bool, **init_kwargs: Any) -> Any:
        """Load the stock pipeline in `dtype`, except `fp32_components`; `init_kwargs` go to its constructor."""
        # Diffusers' from_pretrained accepts one dtype, or a dict of dtypes by component.
        dtypes: Any = dtype
        if self.fp32_components:
            dtypes = {**dict.fromkeys(self.fp32_components, torch.float32), "default": dtype}
        # A component that is passed to from_pretrained is used in place of the stored one; None leaves it out.
        if transformer is not None:
            init_kwargs[self.info.part] = transformer
        if not text:
            # Diffusers warns about a component that the pipeline does not have.
            parameters = inspect.signature(self.info.pipeline_class.__init__).parameters
            init_kwargs |= {name: None for name in TEXT_COMPONENTS if name in parameters}
        return self.info.load_partial_pipeline(dtype=dtypes, use_safetensors=True, **init_kwargs)

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        """Arguments of the stock pipeline for a prompt; by default tensors have the names of its arguments.

        Args:
            prompt: The text, or its tensors from the text encoder.
            empty_prompt: The tensors of "", used as the negative prompt. None without guidance.
        """
        if isinstance(prompt, str):
            return {"prompt": prompt}
        return {**prompt, **{f"negative_{name}": tensor for name, tensor in (empty_prompt or {}).items()}}

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        """Arguments of the stock pipeline for the sample's shape, and those that every call needs."""
        frames = {} if self.frames_argument is None else {self.frames_argument: shape.frames}
        return {**frames, "height": shape.height, "width": shape.width}

    def sampling_kwargs(self, sampling: Sampling) -> dict[str, Any]:
        """Further pipeline arguments for these sampling settings. They override those of `shape_kwargs`."""
        return {}

    def reference_kwargs(self, sampling: Sampling) -> dict[str, Any]:
        """Pipeline arguments for the reference pictures or clips of one sample."""
        # Limit references by `data.reference_resolution` here too, so that samples see them at the sizes of training.
        pictures = read_references(self.info.path.name, self.info.reference_spec, sampling.references)
        scaled_pictures = [scale_image(picture, self.info.reference_resolution) for picture in pictures]
        return {"image": scaled_pictures} if scaled_pictures else {}

    def generate(self, pipeline: Any, prompt_kwargs: Mapping[str, Any], sampling: Sampling) -> torch.Tensor:
        """Generate one video, or an image as one frame, with the stock pipeline: uint8 (frames, height, width, 3)."""
        files = {"image": sampling.image, "last_image": sampling.last_image}
        output = pipeline(
            **prompt_kwargs,
            **read_conditioning_images(self.info.path.name, self.info.image_argument_names, files, sampling.shape),
            **self.reference_kwargs(sampling),
            # Where both have a key, the value of the sampling settings counts.
            **self.shape_kwargs(sampling.shape) | self.sampling_kwargs(sampling),
            num_inference_steps=sampling.inference_steps,
            guidance_scale=sampling.guidance_scale,
            # Noise from a CPU generator does not depend on the device.
            generator=torch.Generator("cpu").manual_seed(sampling.seed),
            output_type="np",
        )
        # (1, height, width, 3) for an image, (frames, height, width, 3) for a video.
        frames = output.images if self.output_field == "images" else output.frames[0]
        # The pipeline returns floats from 0 to 1.
        return torch.from_numpy((np.asarray(frames) * 255).round().clip(0, 255).astype("uint8"))

    def generate_with_sound(
        self, pipeline: Any, prompt_kwargs: Mapping[str, Any], sampling: Sampling
    ) -> tuple[torch.Tensor, Sound | None]:
        """Generate a video and its sound. The sound is None unless the checkpoint was trained with sound."""
        # Families that train sound override this.
        return self.generate(pipeline, prompt_kwargs, sampling), None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened diffusion checkpoint, as stored or with a recipe's settings.

    Its parts are info, encoders, denoiser and sampler.
    """

    info: CheckpointInfo
    encoders: Encoders
    denoiser: Denoiser
    sampler: Sampler

    @classmethod
    def from_denoiser(cls, denoiser: Denoiser, encoders: type[Encoders], sampler: type[Sampler]) -> Self:
        """Checkpoint of a denoiser and of these classes of encoders and sampler, which share the denoiser's info."""
        info = denoiser.info
        return cls(info=info, encoders=encoders(info=info), denoiser=denoiser, sampler=sampler(info=info))

    @property
    def path(self) -> Path:
        return self.info.path

    def get_random_input_samplers(self, batch: TensorMap) -> DrawFunctions:
        """Random tensors (by name) that the loss of a cached batch needs. Chat checkpoints have the same method."""
        return self.denoiser.get_random_input_samplers(batch)

    def losses(self, model: nn.Module, batch: TensorMap, streams: RandomStreams) -> LossOutput:
        """Loss of each sample of a cached batch, computed by the denoiser. Chat checkpoints have the same method."""
        return self.denoiser.losses(model, batch, streams)

    def apply_recipe(self, recipe: Recipe) -> Self:
        """Copy of the opened checkpoint with the recipe's settings.

        Raises `DitLoraError` for an unsupported shape or option.
        """
        # The facts first: their checks refuse recipes that the family cannot train, and the denoiser reads them.
        checkpoint = self.copy_with_info(self.info.copy_with_recipe_settings(recipe, self.denoiser.training_options))
        return replace(checkpoint, denoiser=checkpoint.denoiser.apply_training_options(recipe))

    def copy_with_training_metadata(self, metadata: Mapping[str, Any]) -> Self:
        """Copy of the opened checkpoint with the settings in an adapter's header, to compare outputs or to sample."""
        return self.copy_with_info(self.info.copy_with_training_metadata(metadata))

    def copy_with_model_index_changes(self, index: Mapping[str, Any]) -> Self:
        """Copy of the opened checkpoint with these changes to model_index.json applied."""
        return self.copy_with_info(self.info.copy_with_model_index_changes(index))

    def copy_with_info(self, info: CheckpointInfo) -> Self:
        """Copy of the opened checkpoint in which all roles use this info."""
        # Roles are frozen and hold the facts, so each one is replaced.
        roles = {name: replace(role, info=info) for name, role in vars(self).items() if name != "info"}
        return replace(self, info=info, **roles)

    def describe_expert(self) -> str:
        """Name and timesteps of the expert that is trained; empty for a checkpoint without experts."""
        if not self.info.expert_names:
            return ""
        # Each expert's objective has its own range of noise levels, so its timesteps differ from the other one's.
        name, timesteps = self.info.expert_names[self.info.part], self.denoiser.timestep_range
        return f"{name.replace('_', ' ')}, timesteps {timesteps[0]} to {timesteps[-1]}"
