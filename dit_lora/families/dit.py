"""DiT, class-conditional images: noise prediction with a learned variance on an AutoencoderKL's latents.

A caption is a class's name; the empty caption is the null class. The label tables hold the checkpoint's classes
and, behind them, those that the data adds (`dit_classes`).

Shapes: B batch, C latent channels, H and W latent size.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DiTTransformer2DModel
from diffusers import DiTPipeline as StockPipeline
from torch import nn

from dit_lora.config import ModelConfig, Recipe
from dit_lora.data.sources import class_names
from dit_lora.data_config import VideoShape
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import (
    Sampling,
    Tensors,
    TensorSpec,
    TextEncoder,
    VideoEncoder,
    load_or_init,
    local_checkpoint,
    read_component_config,
    refuse_options,
    require_whole_weights,
    to_uint8,
)
from dit_lora.families.dit_classes import (
    STOCK_NULL,
    TABLE,
    ClassTable,
    DiTPipeline,
    grow,
    initialise,
    keep_labels,
    unknown,
)
from dit_lora.families.noise_prediction import (
    learns_variance,
    noise_losses,
    noise_objective,
    scaling_factor,
    spatial_factor,
    trains_variance,
)
from dit_lora.families.tiny_dit import build_dit
from dit_lora.models.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.streams import Streams
from dit_lora.objectives import EpsilonPrediction, LossOutput
from dit_lora.pretrained import load_pretrained

# Raised when pixels would be encoded otherwise; part of each image's cache key.
IMAGE_TRANSFORM = "dit-1: pixels / 127.5 - 1, posterior mean and logvar, fp32"


@dataclass(frozen=True)
class DiTCheckpoint:
    """One DiT checkpoint, with the classes that it is trained on."""

    path: Path
    transformer_config: Mapping[str, Any]
    """With `scratch` over it."""
    vae_config: Mapping[str, Any]
    objective: EpsilonPrediction
    stored: ClassTable
    """The classes of the files."""
    classes: ClassTable
    scratch: Mapping[str, Any] | None = None
    """`model.from_scratch`."""
    vlb: bool = True
    """Train the variance, where the network has one."""

    @property
    def pipeline_class(self) -> Any:
        """Diffusers' own; of less than 1000 classes, one that knows their null row."""
        return StockPipeline if self.classes.count >= STOCK_NULL else DiTPipeline

    @property
    def learned(self) -> bool:
        """Whether the network has a variance to train."""
        return learns_variance(self.path.name, self.transformer_config)

    @property
    def train_timesteps(self) -> int:
        return len(self.objective.alpha)

    @property
    def side_step(self) -> int:
        """The one size that the position table is for."""
        return self.transformer_config["sample_size"] * spatial_factor(self.vae_config)

    def text_limit(self) -> None:
        return None

    def check_shape(self, shape: VideoShape) -> None:
        """One frame, square, of the size that the position table is for."""
        size = self.side_step
        wrong = [
            f"data.{name} must be {size}; got {value}"
            for name, value in (("height", shape.height), ("width", shape.width))
            if value != size
        ]
        if shape.frames != 1:
            wrong.append(f"data.frames must be 1, for images; got {shape.frames}")
        if wrong:
            raise DitLoraError(listed(f"{self.path.name} cannot take this shape", wrong))

    def for_recipe(self, recipe: Recipe) -> "DiTCheckpoint":
        """With the classes of the data: new ones are added, from scratch they are all there is."""
        self.check_shape(VideoShape.of(recipe.data))
        refuse_options(recipe, takes=("data.classes", "train.vlb"))
        vlb = trains_variance(recipe, self.path.name, self.learned)
        classes = self._classes_for(recipe, class_names(recipe.data, recipe.cache_dir))
        for name in unknown(recipe.validation.prompts, classes.row):
            known = classes.near(name)
            raise DitLoraError(listed(f"validation.prompts: no class {name!r}; there are", known))
        config = {**self.transformer_config, "num_embeds_ada_norm": classes.count}
        return replace(self, transformer_config=config, classes=classes, vlb=vlb)

    def text_facts(self) -> dict[str, Any]:
        return {"classes": self.classes.digest()}

    def video_facts(self) -> dict[str, Any]:
        return {"vae": self.path / "vae", "transform": IMAGE_TRANSFORM}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        return {"class_labels": (torch.Size(()), torch.int64)}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Names of classes to rows of the label tables, int64 (B,); "" is the null class."""

        def encode(captions: Sequence[str]) -> Tensors:
            return {"class_labels": torch.tensor([self._row(name) for name in captions])}

        return encode

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        """Keeps the posterior's mean and logvar, (C, H, W), so that each epoch draws afresh; the VAE is fp32."""
        vae: Any = load_pretrained(
            AutoencoderKL, self.path, subfolder="vae", dtype=torch.float32, use_safetensors=True
        ).to(device)
        memory.set(vae)

        @torch.no_grad()
        def encode(pixels: torch.Tensor, image: torch.Tensor | None = None) -> Tensors:
            posterior = vae.encode(pixels.to(device).float() / 127.5 - 1).latent_dist
            return {"latent_mean": posterior.mean[0], "latent_logvar": posterior.logvar[0]}

        return encode

    def load_transformer(self, dtype: torch.dtype) -> Any:
        scratch = self.scratch
        if scratch is not None:
            scratch = {**scratch, "num_embeds_ada_norm": self.classes.count}
        transformer = load_or_init(DiTTransformer2DModel, self.path, dtype, scratch)
        if scratch is not None:
            initialise(transformer)
        elif self.classes.count > self.stored.count:
            grow(transformer, self.classes, self.stored)
        keep_labels(transformer)
        return transformer

    def losses(
        self, transformer: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput:
        return noise_losses(
            self.objective,
            lambda noisy, timesteps: self.predict(transformer, noisy, timesteps, batch),
            batch,
            streams,
            scale=scaling_factor(self.vae_config),
            vlb=self.vlb and self.learned,
        )

    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Noise, and behind it the variance's fraction if learned: (B, C or 2 C, H, W)."""
        return transformer(
            noisy.to(next(transformer.parameters()).dtype),
            timestep=timesteps,
            class_labels=batch["class_labels"],
            return_dict=False,
        )[0]

    def pipeline(
        self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True
    ) -> Any:
        if transformer is None:
            transformer = self.load_transformer(dtype).eval()
        return load_pretrained(
            self.pipeline_class,
            self.path,
            dtype=dtype,
            use_safetensors=True,
            transformer=transformer,
            id2label=dict(self.classes.names),
        )

    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        """Rows of the label tables; the pipeline has a null class of its own."""
        if isinstance(prompt, str):
            return {"class_labels": [self._row(prompt)]}
        return {"class_labels": prompt["class_labels"].tolist()}

    def index_changes(self) -> dict[str, Any]:
        if self.classes == self.stored:
            return {}
        return {"id2label": self.classes.labels()}

    def as_trained(self, index: Mapping[str, Any]) -> "DiTCheckpoint":
        labels = {int(row): name for row, name in index["id2label"].items()}
        added = [labels[row] for row in sorted(set(labels) - set(self.stored.rows()))]
        classes = self.stored.extended(added)
        config = {**self.transformer_config, "num_embeds_ada_norm": classes.count}
        return replace(self, transformer_config=config, classes=classes)

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        images = pipeline(
            **conditions,
            num_inference_steps=how.inference_steps,
            guidance_scale=how.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(how.seed),
            output_type="np",
        ).images
        return to_uint8(images)

    def _row(self, name: str) -> int:
        row = self.classes.row(name)
        if row is None:
            known = self.classes.near(name)
            raise DitLoraError(listed(f"{self.path.name} has no class {name!r}; it has", known))
        return row

    def _classes_for(self, recipe: Recipe, names: Sequence[str]) -> ClassTable:
        if self.scratch is not None:
            asked = self.scratch.get("num_embeds_ada_norm")
            if asked is not None and asked < len(names):
                raise DitLoraError(
                    f"model.from_scratch.num_embeds_ada_norm is {asked}, and the data has {len(names)} "
                    "classes; leave it out to have as many"
                )
            return ClassTable.of_names(names, asked)
        new = unknown(names, self.stored.row)
        if new and recipe.train.mode == "lora":
            _require_rows_train(recipe, new)
        return self.stored.extended(new)


def _require_rows_train(recipe: Recipe, new: Sequence[str]) -> None:
    """The rows of new classes are base weights: a LoRA has none of them."""
    group = recipe.optim.groups.connector
    patterns = (group.modules or FAMILY.group_patterns["connector"]) if group else ()
    what = f"the data has {len(new)} classes that {Path(recipe.model.path).name} has not"
    if group is None or not any(fnmatch.fnmatchcase(TABLE.format(0), p) for p in patterns):
        remedy = (
            "their rows of the label tables must train: give optim.groups.connector with modules: "
            f"['{TABLE.format('*').removesuffix('.embedding_table.weight')}.*'], or correct their names"
        )
        raise DitLoraError(listed(f"{what}; {remedy}; they are", new))
    decay = group.weight_decay if group.weight_decay is not None else recipe.optim.weight_decay
    if decay > 0:
        raise DitLoraError(
            f"{what}, and optim.groups.connector has a weight decay of {decay:g}, which would wear off the "
            "rows of all the classes that are not in the data; set its weight_decay to 0"
        )


class DiT:
    """DiT, every checkpoint in Diffusers' format."""

    name = "dit"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    group_patterns: Mapping[str, tuple[str, ...]] = {
        "connector": (
            "pos_embed.*",
            "transformer_blocks.*.norm1.emb.timestep_embedder.*",
            "transformer_blocks.*.norm1.emb.class_embedder.*",
            "proj_out_1.*",
            "proj_out_2.*",
        ),
        "backbone": ("transformer_blocks.*",),
    }
    tiny_variants = ("dit-tiny",)
    pipeline_names = ("DiTPipeline",)

    def open(self, model: ModelConfig) -> DiTCheckpoint:
        path = local_checkpoint(model)
        index = read_component_config(path)
        if index.get("_class_name") not in self.pipeline_names:
            raise DitLoraError(
                f"{model.path} is a {index.get('_class_name')} checkpoint; family dit trains DiTPipeline"
            )
        scratch = model.from_scratch
        stored = read_component_config(path, "transformer")
        names = {int(row): name for row, name in (index.get("id2label") or {}).items()}
        table = ClassTable(stored["num_embeds_ada_norm"], names)
        require_whole_weights(path, ("vae",) if scratch is not None else ("transformer", "vae"))
        config = {**stored, **(scratch or {})}
        config["out_channels"] = config.get("out_channels") or config["in_channels"]
        learns_variance(model.path, config)
        return DiTCheckpoint(
            path=path,
            transformer_config=config,
            vae_config=read_component_config(path, "vae"),
            objective=noise_objective(model, read_component_config(path, "scheduler")),
            stored=table,
            classes=table,
            scratch=scratch,
        )

    def build_tiny(self, variant: str, out: Path, seed: int) -> None:
        build_dit(out, seed=seed)


FAMILY = DiT()
