"""DiT, class-conditional images: noise prediction with a learned variance on latents of an AutoencoderKL.

A caption is the name of a class; the empty caption is the null class. The label tables hold the checkpoint's classes,
followed by new ones from the data (`dit_classes`).

Shapes: B batch, C latent channels, H and W latent size.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, DiTTransformer2DModel
from diffusers import DiTPipeline as StockPipeline
from torch import nn

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError, format_list
from dit_lora.families.base import Checkpoint, Sampler, Tensors
from dit_lora.families.dit.classes import (
    LABEL_TABLE_NAME,
    STOCK_NULL_ROW,
    ClassEncoders,
    ClassInfo,
    ClassTable,
    DiTPipeline,
    disable_label_dropout,
    grow_label_tables,
    initialize_weights,
    read_class_names,
)
from dit_lora.families.family import DiffusionFamily
from dit_lora.families.noise_prediction import (
    NoiseDenoiser,
    compute_spatial_factor,
    encode_frames,
    has_variance_channels,
    read_noise_objective,
)
from dit_lora.families.opening import read_checkpoint, read_component_config


@dataclass(frozen=True, kw_only=True)
class DiTInfo(ClassInfo):
    """Info (configs, supported shapes) of a DiT checkpoint, with the classes it is trained on."""

    connector_patterns: Sequence[str]
    """Patterns of the `connector_patterns` group if the recipe sets none."""
    num_classes_key = "num_embeds_ada_norm"

    @property
    def pipeline_class(self) -> Any:
        """Pipeline class for a DiT: Diffusers', or for fewer than 1000 classes a subclass that uses their null row."""
        # Diffusers guides with label 1000, which is only the null class of a table with 1000 classes or more.
        return StockPipeline if self.trained_classes.count >= STOCK_NULL_ROW else DiTPipeline

    @property
    def size_multiple(self) -> int:
        """The only side length in pixels that a DiT's position table supports."""
        return self.transformer_config["sample_size"] * compute_spatial_factor(self.vae_config)

    def find_shape_errors(self, shape: VideoShape) -> list[str]:
        """Error messages for shapes other than one square frame of the size that the position table supports."""
        # The position table is not interpolated, so no other size works.
        size = self.size_multiple
        problems = [
            f"data.{name} must be {size}; got {value}"
            for name, value in (("height", shape.height), ("width", shape.width))
            if value != size
        ]
        if shape.frames != 1:
            problems.append(f"data.frames must be 1, for images; got {shape.frames}")
        return problems

    def require_trainable_rows(self, recipe: Recipe, new_classes: Sequence[str]) -> None:
        """Raise `DitLoraError` unless new classes can be learned: the group `connector` must train the label tables,
        and without weight decay.
        """
        group = recipe.optim.groups.connector
        # Without patterns in the recipe, the family's connector patterns apply, which include the label tables.
        patterns = (group.modules or self.connector_patterns) if group else ()
        problem = f"the data has {len(new_classes)} classes that {Path(recipe.model.path).name} does not have"
        # The table of block 0 stands for all blocks.
        if group is None or not any(fnmatch.fnmatchcase(LABEL_TABLE_NAME.format(0), p) for p in patterns):
            remedy = (
                "their rows of the label tables must train: give optim.groups.connector with modules: "
                f"['{LABEL_TABLE_NAME.format('*').removesuffix('.embedding_table.weight')}.*'], or correct their names"
            )
            raise DitLoraError(format_list(f"{problem}; {remedy}; they are", new_classes))
        # A group without its own weight decay inherits that of the optimizer.
        decay = group.weight_decay if group.weight_decay is not None else recipe.optim.weight_decay
        # Weight decay also shrinks rows that get no gradient.
        if decay > 0:
            raise DitLoraError(
                f"{problem}, and optim.groups.connector has a weight decay of {decay:g}, which would wear off the "
                "rows of all the classes that are not in the data; set its weight_decay to 0"
            )


@dataclass(frozen=True, kw_only=True)
class DiTEncoders(ClassEncoders):
    vae_class = AutoencoderKL
    transform = "dit-1: pixels / 127.5 - 1, posterior mean and logvar, fp32"

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> Tensors:
        # (C, 1, H, W) -> (C, H, W): images have no frame axis.
        return {name: latent[:, 0] for name, latent in encode_frames(vae, pixels).items()}


@dataclass(frozen=True, kw_only=True)
class DiTDenoiser(NoiseDenoiser):
    info: DiTInfo
    transformer_class: ClassVar[Any] = DiTTransformer2DModel

    def load_transformer(self, dtype: torch.dtype) -> Any:
        return load_transformer(self.info, dtype)

    def predict(
        self, transformer: nn.Module, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Predict the noise, followed by the variance's fraction if it is learned: (B, C or 2 C, H, W)."""
        # The transformer takes latents in the dtype of its weights.
        return transformer(
            noisy.to(next(transformer.parameters()).dtype),
            timestep=timesteps,
            class_labels=batch["class_labels"],
            return_dict=False,
        )[0]


@dataclass(frozen=True, kw_only=True)
class DiTSampler(Sampler):
    info: DiTInfo
    output_field = "images"

    def pipeline(self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True) -> Any:
        # The stored transformer has no rows for new classes, so always pass the one that was extended.
        if transformer is None:
            transformer = load_transformer(self.info, dtype).eval()
        return self._load_pipeline(dtype, transformer, True, id2label=dict(self.info.trained_classes.names))

    def prompt_kwargs(self, prompt: str | Tensors, empty_prompt: Tensors | None = None) -> dict[str, Any]:
        """Pipeline arguments for a prompt: the rows of its class in the label tables.

        The pipeline adds the null class itself.
        """
        # The pipeline takes a list of ints.
        if isinstance(prompt, str):
            return {"class_labels": [self.info.get_label_row(prompt)]}
        return {"class_labels": prompt["class_labels"].tolist()}

    def shape_kwargs(self, shape: VideoShape) -> dict[str, Any]:
        return {}


def load_transformer(info: DiTInfo, dtype: torch.dtype) -> Any:
    """Load the transformer with rows for the classes that are trained, and without label dropout in its blocks."""
    transformer = info.load_transformer(DiTTransformer2DModel, dtype, grow_label_tables)
    # Diffusers' own initialisation is not DiT's: its gates are not zero.
    if info.from_scratch is not None:
        initialize_weights(transformer)
    disable_label_dropout(transformer)
    return transformer


def open_checkpoint(family: DiffusionFamily, model: ModelConfig) -> Checkpoint:
    """Read the configs of a DiT in Diffusers' format. Raises `DitLoraError` for another pipeline or broken weights."""
    index, fields = read_checkpoint(model, family.pipeline_names, weights=("vae",), vae_class=AutoencoderKL)
    path = fields["path"]
    # The number of classes in the files, before `model.from_scratch` changes it.
    stored_config = read_component_config(path, "transformer")
    table = ClassTable(stored_config["num_embeds_ada_norm"], read_class_names(index))
    config = fields["transformer_config"]
    # null means as many as in_channels.
    config["out_channels"] = config.get("out_channels") or config["in_channels"]
    has_variance_channels(model.path, config)
    patterns = family.group_patterns["connector"]
    info = DiTInfo(**fields, stored_classes=table, trained_classes=table, connector_patterns=patterns)
    denoiser = DiTDenoiser(info=info, objective=read_noise_objective(model, path))
    return Checkpoint.from_denoiser(denoiser, DiTEncoders, DiTSampler)
