"""The video DiT (OpenDiT's VDiT): noise prediction with a learned variance, conditioned on classes or on text.

With classes, a caption is the name of a class; with text, it is encoded to CLIP's pooled output. UCF101's class
folders (`BoxingPunchingBag/clip.avi`) work for both: OpenDiT also trains with the class name as text.

Shapes: B batch, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import Tensors, TensorSpec, TextEncoder, TextLimit
from dit_lora.families.dit.classes import ClassCheckpoint, ClassTable, read_class_names
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.noise_prediction import NoisePredictionCheckpoint, has_variance_channels, read_noise_objective
from dit_lora.families.opening import (
    get_checkpoint_folder,
    read_checkpoint_fields,
    read_index,
    require_complete_weights,
)
from dit_lora.families.refusals import multiple_errors
from dit_lora.families.text.limit import load_text_limit
from dit_lora.models.video_dit import VideoDiTTransformer3DModel
from dit_lora.models.video_dit_pipeline import VideoDiTPipeline


@dataclass(frozen=True)
class VideoClassTable(ClassTable):
    """A table of classes whose last row is the null class."""

    @property
    def null_row(self) -> int:
        return self.count


@dataclass(frozen=True, kw_only=True)
class VideoDiTCheckpoint(NoisePredictionCheckpoint):
    """Base of the class-conditional and the text-conditional checkpoints."""

    pipeline_class: ClassVar[Any] = VideoDiTPipeline
    transformer_class: ClassVar[Any] = VideoDiTTransformer3DModel

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """Frames must be whole temporal patches; height and width multiples of VAE factor x patch size (16)."""
        # Positions are computed for any size, so only whole patches matter.
        frame_step, step = self.transformer_config["patch_size_t"], self.size_multiple
        return multiple_errors(
            {"frames": (shape.frames, frame_step), "height": (shape.height, step), "width": (shape.width, step)}
        )

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

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        return {"num_frames": shape.frames, "height": shape.height, "width": shape.width}


@dataclass(frozen=True, kw_only=True)
class TextVideoDiTCheckpoint(VideoDiTCheckpoint):
    """A video DiT that is conditioned on text."""

    def load_text_limit(self) -> TextLimit:
        return load_text_limit(self.path)

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return {"pooled_projections": (torch.Size((self.transformer_config["text_dim"],)), dtype)}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Maps texts to CLIP's pooled output, (B, D)."""
        pipeline = self.load_text_pipeline(dtype, device)
        # encode_prompt disables gradients itself.
        return lambda texts: {"pooled_projections": pipeline.encode_prompt(texts)}

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        # Load with our own code, so that weights are frozen and may be random (`model.from_scratch`).
        if transformer is None:
            transformer = self.load_transformer(dtype).eval()
        return super().pipeline(dtype, transformer, text)

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt}
        arguments = {"pooled_projections": prompt["pooled_projections"]}
        if empty_prompt:
            arguments["negative_pooled_projections"] = empty_prompt["pooled_projections"]
        return arguments


@dataclass(frozen=True, kw_only=True)
class ClassVideoDiTCheckpoint(VideoDiTCheckpoint, ClassCheckpoint):
    """A video DiT that is conditioned on classes, with the classes it is trained on."""

    num_classes_key = "num_classes"
    supported_options: ClassVar[tuple[str, ...]] = ClassCheckpoint.supported_options

    def grow_label_tables(self, transformer: Any) -> None:
        # (classes + 1, width)
        weight = self.trained_classes.grow_weight(transformer.class_embed.weight.data, self.stored_classes)
        transformer.class_embed = nn.Embedding.from_pretrained(weight, freeze=True)
        transformer.register_to_config(num_classes=self.trained_classes.count)

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        # The stored transformer has no rows for new classes.
        if transformer is None:
            transformer = self.load_transformer(dtype).eval()
        return self._load_pipeline(dtype, transformer, False, id2label=self.trained_classes.labels())

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        """Rows of the label table. The pipeline adds the null class itself."""
        if isinstance(prompt, str):
            return {"class_labels": torch.tensor([self.get_row(prompt)])}
        return {"class_labels": prompt["class_labels"]}

    def require_trainable_rows(self, recipe: Recipe, new_classes: Sequence[str]) -> None:
        """Always raise `DitLoraError`: a LoRA cannot train rows of this label table."""
        problem = (
            f"{self.path.name} has no classes with these names, and a LoRA cannot add them; correct the "
            "names, use train.mode: full, or a model that is conditioned on text"
        )
        raise DitLoraError(format_list(problem, new_classes))


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> VideoDiTCheckpoint:
    """Read the configs. Raises `DitLoraError` for another pipeline or broken weight files."""
    path = get_checkpoint_folder(model)
    index = read_index(model, path, family.pipeline_names)
    fields = read_checkpoint_fields(model, path)
    config = fields["transformer_config"]
    # The model has either a label table or a text projection.
    is_text = config.get("num_classes") is None
    require_complete_weights(model, path, "vae", *(("text_encoder",) if is_text else ()))
    # Called for its check of the channel counts.
    has_variance_channels(model.path, config)
    fields["objective"] = read_noise_objective(model, path)
    if is_text:
        return TextVideoDiTCheckpoint(**fields)
    # Until a recipe adds classes, those of the files are trained.
    table = VideoClassTable(config["num_classes"], read_class_names(index))
    return ClassVideoDiTCheckpoint(**fields, stored_classes=table, trained_classes=table)
