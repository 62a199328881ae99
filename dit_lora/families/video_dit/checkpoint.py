"""The video DiT (OpenDiT's VDiT): noise prediction with a learned variance, conditioned on classes or on text.

With classes, a caption is the name of a class; with text, it is encoded to CLIP's pooled output. UCF101's class
folders (`BoxingPunchingBag/clip.avi`) work for both: OpenDiT also trains with the class name as text.

Shapes: B batch, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import (
    Checkpoint,
    CheckpointInfo,
    Encoders,
    Sampler,
    Tensors,
    TensorSpec,
    TextEncoder,
    TextLimit,
)
from dit_lora.families.dit.classes import ClassEncoders, ClassInfo, ClassTable, read_class_names
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.noise_prediction import (
    FRAMES_TRANSFORM,
    NoiseDenoiser,
    compute_spatial_factor,
    encode_frames,
    has_variance_channels,
    read_noise_objective,
)
from dit_lora.families.opening import load_or_init_transformer, read_checkpoint, require_complete_weights
from dit_lora.families.refusals import size_multiple_errors
from dit_lora.models.video_dit import VideoDiTTransformer3DModel
from dit_lora.models.video_dit_pipeline import VideoDiTPipeline


@dataclass(frozen=True)
class VideoClassTable(ClassTable):
    """Class table of a video DiT, whose last row is the null class."""

    @property
    def null_label_row(self) -> int:
        return self.count


def compute_size_multiple(info: CheckpointInfo) -> int:
    """Number of pixels that height and width must be a multiple of: VAE factor times patch size."""
    return compute_spatial_factor(info.vae_config) * info.transformer_config["patch_size"]


def find_patch_size_errors(info: CheckpointInfo, shape: VideoShape) -> list[str]:
    """Error messages for a video DiT's shape.

    Frames must be whole temporal patches; height and width multiples of VAE factor x patch size (16).
    """
    # Positions are computed for any size, so only whole patches matter.
    frame_step, step = info.transformer_config["patch_size_t"], info.size_multiple
    return size_multiple_errors(
        {"frames": (shape.frames, frame_step), "height": (shape.height, step), "width": (shape.width, step)}
    )


@dataclass(frozen=True, kw_only=True)
class TextVideoDiTInfo(CheckpointInfo):
    """Info (configs, supported shapes) of a video DiT that is conditioned on text."""

    pipeline_class: ClassVar[Any] = VideoDiTPipeline

    @property
    def size_multiple(self) -> int:
        return compute_size_multiple(self)

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        return find_patch_size_errors(self, shape)


@dataclass(frozen=True, kw_only=True)
class ClassVideoDiTInfo(ClassInfo):
    """Info of a video DiT that is conditioned on classes, with the classes it is trained on."""

    pipeline_class: ClassVar[Any] = VideoDiTPipeline
    num_classes_key = "num_classes"

    @property
    def size_multiple(self) -> int:
        return compute_size_multiple(self)

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        return find_patch_size_errors(self, shape)

    def require_trainable_rows(self, recipe: Recipe, new_classes: Sequence[str]) -> None:
        """Always raise `DitLoraError` for new classes: a LoRA cannot train rows of this label table."""
        problem = (
            f"{self.path.name} has no classes with these names, and a LoRA cannot add them; correct the "
            "names, use train.mode: full, or a model that is conditioned on text"
        )
        raise DitLoraError(format_list(problem, new_classes))


@dataclass(frozen=True, kw_only=True)
class TextVideoDiTEncoders(Encoders):
    vae_class = AutoencoderKL
    transform = FRAMES_TRANSFORM

    def load_text_limit(self) -> TextLimit:
        tokenizer = self.load_tokenizer()
        return TextLimit(tokenizer, tokenizer.model_max_length)

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return {"pooled_projections": (torch.Size((self.info.transformer_config["text_dim"],)), dtype)}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Text encoder that maps captions to CLIP's pooled output, (B, D)."""
        pipeline = self.load_text_pipeline(dtype, device)
        # encode_prompt disables gradients itself.
        return lambda texts: {"pooled_projections": pipeline.encode_prompt(texts)}

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        return encode_frames(vae, pixels)


@dataclass(frozen=True, kw_only=True)
class ClassVideoDiTEncoders(ClassEncoders):
    vae_class = AutoencoderKL
    transform = FRAMES_TRANSFORM

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        return encode_frames(vae, pixels)


@dataclass(frozen=True, kw_only=True)
class VideoDiTDenoiser(NoiseDenoiser):
    transformer_class: ClassVar[Any] = VideoDiTTransformer3DModel

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        return load_transformer(self.info, dtype)

    def predict(
        self,
        transformer: nn.Module,
        noisy_BCFHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Predict the noise, followed by the variance's fraction if it is learned: (B, C or 2 C, F, H, W)."""
        # A batch has only the one that this model is conditioned on.
        names = ("class_labels", "pooled_projections")
        return transformer(
            hidden_states=noisy_BCFHW.to(next(transformer.parameters()).dtype),
            timestep=timesteps,
            return_dict=False,
            **{name: batch[name] for name in names if name in batch},
        )[0]


@dataclass(frozen=True, kw_only=True)
class TextVideoDiTSampler(Sampler):
    frames_argument = "num_frames"

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        # Load with our own code, so that weights are frozen and may be random (`model.from_scratch`).
        if transformer is None:
            transformer = load_transformer(self.info, dtype).eval()
        return super().pipeline(dtype, transformer, text)

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt}
        arguments = {"pooled_projections": prompt["pooled_projections"]}
        if empty_prompt:
            arguments["negative_pooled_projections"] = empty_prompt["pooled_projections"]
        return arguments


@dataclass(frozen=True, kw_only=True)
class ClassVideoDiTSampler(Sampler):
    info: ClassVideoDiTInfo
    frames_argument = "num_frames"

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        # The stored transformer has no rows for new classes.
        if transformer is None:
            transformer = load_transformer(self.info, dtype).eval()
        # Classes need no text encoder. The pipeline maps names to rows with `id2label`.
        return self._load_pipeline(dtype, transformer, False, id2label=self.info.trained_classes.labels())

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        """Pipeline arguments for a prompt: its rows of the label table. The pipeline adds the null class itself."""
        if isinstance(prompt, str):
            return {"class_labels": torch.tensor([self.info.get_label_row(prompt)])}
        return {"class_labels": prompt["class_labels"]}


def load_transformer(info: CheckpointInfo, dtype: torch.dtype) -> nn.Module:
    """Load a video DiT, with rows for the classes that are trained if it is conditioned on classes."""
    if isinstance(info, ClassVideoDiTInfo):
        return info.load_transformer(VideoDiTTransformer3DModel, dtype, grow_label_table)
    return load_or_init_transformer(VideoDiTTransformer3DModel, info.path, dtype, info.from_scratch, info.part)


def grow_label_table(transformer: Any, classes: ClassTable, old_classes: ClassTable) -> None:
    """Extend the label table, (classes + 1, width), and the config to these classes."""
    # Old classes keep their rows; new ones start as copies of the null class.
    weight = classes.expand_label_weight(transformer.class_embed.weight.data, old_classes)
    transformer.class_embed = nn.Embedding.from_pretrained(weight, freeze=True)
    transformer.register_to_config(num_classes=classes.count)


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a video DiT. Raises `DitLoraError` for another pipeline or broken weight files."""
    index, fields = read_checkpoint(model, family.pipeline_names, weights=None, vae_class=AutoencoderKL)
    path, config = fields["path"], fields["transformer_config"]
    # The model has either a label table or a text projection.
    is_text = config.get("num_classes") is None
    require_complete_weights(model, path, "vae", *(("text_encoder",) if is_text else ()))
    # Called for its check of the channel counts; the denoiser asks again whether there is a variance.
    has_variance_channels(model.path, config)
    # Both kinds have the same objective and latents.
    objective = read_noise_objective(model, path)
    if is_text:
        text_info = TextVideoDiTInfo(**fields)
        denoiser = VideoDiTDenoiser(info=text_info, objective=objective)
        return Checkpoint.from_denoiser(denoiser, TextVideoDiTEncoders, TextVideoDiTSampler)
    # Until a recipe adds classes, those of the files are trained.
    table = VideoClassTable(config["num_classes"], read_class_names(index))
    info = ClassVideoDiTInfo(**fields, stored_classes=table, trained_classes=table)
    denoiser = VideoDiTDenoiser(info=info, objective=objective)
    return Checkpoint.from_denoiser(denoiser, ClassVideoDiTEncoders, ClassVideoDiTSampler)
