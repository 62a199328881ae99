"""The video DiT (OpenDiT's VDiT): noise prediction with a learned variance, conditioned on classes or on text.

Of a model of classes a caption is a class's name; of a model of text it is what CLIP pools. UCF101's class
folders (`BoxingPunchingBag/clip.avi`) serve both: as OpenDiT trains on them, the name is the text.

Shapes: B batch, C latent channels, F latent frames, H and W latent size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
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
    TextLimit,
    VideoEncoder,
    load_or_init,
    local_checkpoint,
    read_component_config,
    refuse_options,
    require_whole_weights,
    text_limit,
    to_uint8,
)
from dit_lora.families.dit_classes import ClassTable, unknown
from dit_lora.families.noise_prediction import (
    VIDEO_TRANSFORM,
    check_patches,
    learns_variance,
    load_frame_encoder,
    noise_losses,
    noise_objective,
    scaling_factor,
    spatial_factor,
    trains_variance,
)
from dit_lora.families.tiny_video_dit import build_video_dit
from dit_lora.models.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.models.video_dit import VideoDiTTransformer3DModel
from dit_lora.models.video_dit_pipeline import VideoDiTPipeline
from dit_lora.numerics.streams import Streams
from dit_lora.objectives import EpsilonPrediction, LossOutput
from dit_lora.pretrained import load_pretrained


@dataclass(frozen=True)
class VideoClasses(ClassTable):
    """Classes of a table whose last row is the null class."""

    @property
    def null(self) -> int:
        return self.count

    def extended(self, names: Sequence[str]) -> "VideoClasses":
        rows = range(self.count, self.count + len(names))
        named = {**self.names, **dict(zip(rows, names, strict=True))}
        return VideoClasses(self.count + len(names), named)


@dataclass(frozen=True)
class VideoDiTCheckpoint:
    """One video DiT checkpoint, with the classes that it is trained on, if it is conditioned on classes."""

    path: Path
    transformer_config: Mapping[str, Any]
    """With `scratch` over it."""
    vae_config: Mapping[str, Any]
    objective: EpsilonPrediction
    stored: VideoClasses | None
    """The classes of the files; None of a model of text."""
    classes: VideoClasses | None
    scratch: Mapping[str, Any] | None = None
    """`model.from_scratch`."""
    vlb: bool = True
    """Train the variance, where the network has one."""
    pipeline_class: ClassVar[Any] = VideoDiTPipeline

    @property
    def train_timesteps(self) -> int:
        return len(self.objective.alpha)

    @property
    def learned(self) -> bool:
        return learns_variance(self.path.name, self.transformer_config)

    @property
    def side_step(self) -> int:
        return spatial_factor(self.vae_config) * self.transformer_config["patch_size"]

    def text_limit(self) -> TextLimit | None:
        return text_limit(self.path) if self.classes is None else None

    def check_shape(self, shape: VideoShape) -> None:
        """Frames in temporal patches; height and width in multiples of VAE factor x patch size (16)."""
        frame_step = self.transformer_config["patch_size_t"]
        check_patches(self.path.name, shape, frame_step, self.side_step)

    def for_recipe(self, recipe: Recipe) -> "VideoDiTCheckpoint":
        """With the classes of the data: from scratch they are all there is, in mode `full` new ones are added."""
        self.check_shape(VideoShape.of(recipe.data))
        takes = ("train.vlb",) if self.stored is None else ("data.classes", "train.vlb")
        refuse_options(recipe, takes)
        vlb = trains_variance(recipe, self.path.name, self.learned)
        if self.stored is None:
            return replace(self, vlb=vlb)
        names = class_names(recipe.data, recipe.cache_dir)
        classes = self._classes_for(recipe, self.stored, names)
        absent = unknown(recipe.validation.prompts, classes.row)
        if absent:
            what = f"validation.prompts: no class {', '.join(absent)}; there are"
            raise DitLoraError(listed(what, [*classes.labels().values()]))
        config = {**self.transformer_config, "num_classes": classes.count}
        return replace(self, transformer_config=config, classes=classes, vlb=vlb)

    def text_facts(self) -> dict[str, Any]:
        if self.classes is not None:
            return {"classes": self.classes.digest()}
        return {
            "text_encoder": self.path / "text_encoder",
            "tokenizer": self.path / "tokenizer",
        }

    def video_facts(self) -> dict[str, Any]:
        return {"vae": self.path / "vae", "transform": VIDEO_TRANSFORM}

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        if self.classes is not None:
            return {"class_labels": (torch.Size(()), torch.int64)}
        return {"pooled_projections": (torch.Size((self.transformer_config["text_dim"],)), dtype)}

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder:
        """Names of classes to rows of the label table, int64 (B,), or texts to what CLIP pools, (B, D)."""
        if self.classes is not None:
            return lambda names: {"class_labels": torch.tensor([self._row(n) for n in names])}
        pipeline = load_pretrained(
            VideoDiTPipeline,
            self.path,
            transformer=None,
            vae=None,
            dtype=dtype,
            use_safetensors=True,
        ).to(device)
        return lambda texts: {"pooled_projections": pipeline.encode_prompt(texts)}

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder:
        return load_frame_encoder(self.path, device, memory)

    def load_transformer(self, dtype: torch.dtype) -> VideoDiTTransformer3DModel:
        scratch, classes = self.scratch, self.classes
        if scratch is not None and classes is not None:
            scratch = {**scratch, "num_classes": classes.count}
        model = load_or_init(VideoDiTTransformer3DModel, self.path, dtype, scratch)
        if scratch is None and classes is not None and classes != self.stored:
            assert self.stored is not None
            weight = classes.grown(model.class_embed.weight.data, self.stored)
            model.class_embed = nn.Embedding.from_pretrained(weight, freeze=True)
            model.register_to_config(num_classes=classes.count)
        return model

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
        noisy_BCFHW: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Noise, and behind it the variance's fraction if learned: (B, C or 2 C, F, H, W)."""
        names = ("class_labels", "pooled_projections")
        return transformer(
            hidden_states=noisy_BCFHW.to(next(transformer.parameters()).dtype),
            timestep=timesteps,
            return_dict=False,
            **{name: batch[name] for name in names if name in batch},
        )[0]

    def pipeline(
        self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True
    ) -> VideoDiTPipeline:
        given: dict[str, Any] = {
            "transformer": self.load_transformer(dtype).eval()
            if transformer is None
            else transformer
        }
        if not text or self.classes is not None:
            given |= {"text_encoder": None, "tokenizer": None}
        if self.classes is not None:
            given["id2label"] = self.classes.labels()
        return load_pretrained(
            VideoDiTPipeline, self.path, dtype=dtype, use_safetensors=True, **given
        )

    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        if isinstance(prompt, str):
            if self.classes is None:
                return {"prompt": prompt}
            return {"class_labels": torch.tensor([self._row(prompt)])}
        if self.classes is not None:  # the pipeline has a null class of its own
            return {"class_labels": prompt["class_labels"]}
        given = {"pooled_projections": prompt["pooled_projections"]}
        if empty:
            given["negative_pooled_projections"] = empty["pooled_projections"]
        return given

    def index_changes(self) -> dict[str, Any]:
        if self.classes is None or self.classes == self.stored:
            return {}
        return {"id2label": self.classes.labels()}

    def as_trained(self, index: Mapping[str, Any]) -> "VideoDiTCheckpoint":
        labels = {int(row): name for row, name in index["id2label"].items()}
        assert self.stored is not None
        added = [labels[row] for row in sorted(set(labels) - set(self.stored.rows()))]
        return replace(self, classes=self.stored.extended(added))

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        frames = pipeline(
            **conditions,
            num_frames=how.shape.frames,
            height=how.shape.height,
            width=how.shape.width,
            num_inference_steps=how.inference_steps,
            guidance_scale=how.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(how.seed),
            output_type="np",
        ).frames[0]
        return to_uint8(frames)

    def _row(self, name: str) -> int:
        assert self.classes is not None
        row = self.classes.row(name)
        if row is None:
            known = [*self.classes.labels().values()]
            raise DitLoraError(listed(f"{self.path.name} has no class {name!r}; it has", known))
        return row

    def _classes_for(
        self, recipe: Recipe, stored: VideoClasses, names: Sequence[str]
    ) -> VideoClasses:
        if self.scratch is not None:
            asked = self.scratch.get("num_classes")
            if asked is not None and asked < len(names):
                raise DitLoraError(
                    f"model.from_scratch.num_classes is {asked}, and the data has {len(names)} classes; "
                    "leave it out to have as many"
                )
            return VideoClasses(asked or len(names), dict(enumerate(names)))
        new = unknown(names, stored.row)
        if new and recipe.train.mode == "lora":
            what = (
                f"{self.path.name} has no class of these names, and a LoRA trains no row of the label table: "
                "correct them, or take train.mode: full or a model of text"
            )
            raise DitLoraError(listed(what, new))
        return stored.extended(new)


class VideoDiT:
    """The video DiT, of classes and of text."""

    name = "video_dit"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    group_patterns: Mapping[str, tuple[str, ...]] = {
        "connector": (
            "patch_embed.*",
            "time_embed.*",
            "class_embed.*",
            "text_embed.*",
            "adaln_out.*",
            "proj_out.*",
        ),
        "backbone": ("transformer_blocks.*",),
    }
    tiny_variants = ("video-dit-class", "video-dit-text")
    pipeline_names = ("VideoDiTPipeline",)

    def open(self, model: ModelConfig) -> VideoDiTCheckpoint:
        path = local_checkpoint(model)
        index = read_component_config(path)
        if index.get("_class_name") not in self.pipeline_names:
            raise DitLoraError(
                f"{model.path} is a {index.get('_class_name')} checkpoint; family video_dit trains "
                "VideoDiTPipeline"
            )
        scratch = model.from_scratch
        config = {**read_component_config(path, "transformer"), **(scratch or {})}
        is_text = config.get("num_classes") is None
        weights = ["vae", *(["text_encoder"] if is_text else [])]
        require_whole_weights(path, weights if scratch is not None else ["transformer", *weights])
        learns_variance(model.path, config)
        names = {int(row): name for row, name in (index.get("id2label") or {}).items()}
        stored = None if is_text else VideoClasses(config["num_classes"], names)
        return VideoDiTCheckpoint(
            path=path,
            transformer_config=config,
            vae_config=read_component_config(path, "vae"),
            objective=noise_objective(model, read_component_config(path, "scheduler")),
            stored=stored,
            classes=stored,
            scratch=scratch,
        )

    def build_tiny(self, variant: str, out: Path, seed: int) -> None:
        build_video_dit(out, seed=seed, text=variant == "video-dit-text")


FAMILY = VideoDiT()
