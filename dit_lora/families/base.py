"""The family contract: everything that training must know about one model family, and nothing else.

A family holds facts and pure functions. It has no optimizer, no loop and no logging, so that no family can
lose the guard. `Family` is what is known before a checkpoint is opened; `Checkpoint` is bound to one.

Shapes: B batch, T text tokens, D text width, C latent channels, F latent frames, H and W latent size.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dit_lora.config import ModelConfig, Recipe
from dit_lora.data_config import VideoShape
from dit_lora.errors import DitLoraError, listed
from dit_lora.hub_files import model_folder
from dit_lora.models.vae_memory import PLAIN_VAE, VaeMemory
from dit_lora.numerics.streams import Streams
from dit_lora.objectives import LossOutput
from dit_lora.parsing import parse_json
from dit_lora.pretrained import load_pretrained

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


@dataclass(frozen=True)
class Sampling:
    """How to sample one video."""

    shape: VideoShape
    inference_steps: int
    guidance_scale: float
    seed: int
    image: Path | None = None
    """The first frame, for families that start from an image."""


@dataclass(frozen=True)
class TextLimit:
    """What a text encoder reads of a caption."""

    tokenizer: Any
    max_tokens: int
    """With its special tokens; what is beyond is cut off."""


class Checkpoint(Protocol):
    """One opened checkpoint of a family."""

    path: Path
    pipeline_class: Any
    """The stock Diffusers pipeline of this checkpoint."""

    @property
    def train_timesteps(self) -> int:
        """Timesteps are drawn from 0 to this minus one."""

    @property
    def side_step(self) -> int:
        """Height and width come in multiples of this many pixels."""

    def check_shape(self, shape: VideoShape) -> None:
        """Raise with the nearest shapes that work if the VAE or the patches cannot take this one."""

    def for_recipe(self, recipe: Recipe) -> "Checkpoint":
        """The checkpoint as a recipe trains it, with the options and classes that it needs of it.

        Raises if it cannot train what the recipe asks for: shape, options that do not apply.
        """

    def text_facts(self) -> Mapping[str, Any]:
        """What embeddings depend on besides caption and dtype: files (`Path`) and values."""

    def video_facts(self) -> Mapping[str, Any]:
        """What a clip's cached tensors depend on besides pixels and dtype: files (`Path`) and values."""

    def text_limit(self) -> TextLimit | None:
        """Loads the tokenizer; None where samples have classes in place of captions."""

    def text_spec(self, dtype: torch.dtype) -> TensorSpec:
        """One caption's tensors as `load_text_encoder` of that dtype gives them, known from the configs."""

    def load_text_encoder(self, dtype: torch.dtype, device: torch.device) -> TextEncoder: ...

    def load_video_encoder(
        self, dtype: torch.dtype, device: torch.device, memory: VaeMemory = PLAIN_VAE
    ) -> VideoEncoder: ...

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        """The frozen transformer, loaded in `dtype` from the start, on the CPU.

        With `model.from_scratch`, random weights drawn from torch's generator.
        """

    def losses(
        self, transformer: nn.Module, batch: Mapping[str, torch.Tensor], streams: Streams
    ) -> LossOutput:
        """Per-sample losses of a cached batch; every draw comes from `streams`."""

    def predict(
        self,
        transformer: nn.Module,
        noisy: torch.Tensor,
        timesteps: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """The network's prediction for noisy latents of a cached batch, as the pipeline would call it."""

    def pipeline(
        self, dtype: torch.dtype, transformer: nn.Module | None = None, text: bool = True
    ) -> Any:
        """The stock Diffusers pipeline, around `transformer` if given; without encoder unless `text`."""

    def conditions(self, prompt: str | Tensors, empty: Tensors | None = None) -> dict[str, Any]:
        """The pipeline's arguments for a prompt as text, or as its text encoder's tensors with those of ""."""

    def index_changes(self) -> dict[str, Any]:
        """What a pipeline trained from this says otherwise in its model_index.json; an adapter's header has it too."""

    def as_trained(self, index: Mapping[str, Any]) -> "Checkpoint":
        """The checkpoint as one that `index_changes` describes."""

    def generate(self, pipeline: Any, conditions: Mapping[str, Any], how: Sampling) -> torch.Tensor:
        """One video, or an image of one frame: uint8 (frames, height, width, 3)."""


class Family(Protocol):
    """What is known of a family before a checkpoint is opened."""

    name: str
    lora_targets: tuple[str, ...]
    """Default names of the linear layers that get an adapter, as PEFT matches them."""
    group_patterns: Mapping[str, tuple[str, ...]]
    """Patterns of base parameter names for the `connector` and `backbone` groups."""
    tiny_variants: tuple[str, ...]
    """Names that `dit-lora tiny` takes."""
    pipeline_names: tuple[str, ...]
    """The `_class_name` of the pipelines whose checkpoints it trains."""

    def open(self, model: ModelConfig) -> Checkpoint:
        """Read the checkpoint's configs, no weights; refuse one of another family."""

    def build_tiny(self, variant: str, out: Path, seed: int) -> None:
        """Write a complete random pipeline of that variant, small enough for tests."""


def local_checkpoint(model: ModelConfig) -> Path:
    """Return the Diffusers folder of `model.path`, fetched from the Hub if it is not a local one."""
    return model_folder(model, ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"))


def require_whole_weights(path: Path, components: Sequence[str]) -> None:
    """Every component has safetensors weights with all their bytes; all that is wrong is listed.

    Reads headers only, before anything is encoded with one half of a checkpoint.
    """
    wrong = []
    for component in components:
        files = sorted((path / component).glob("*.safetensors"))
        if not files:
            wrong.append(f"{component}: no .safetensors file")
        for file in files:
            try:
                with safe_open(file, framework="pt"):
                    pass
            except (OSError, SafetensorError) as error:
                wrong.append(f"{component}/{file.name}: {error}")
    if wrong:
        raise DitLoraError(listed(f"{path} is not whole; fetch these files again", wrong))


def text_limit(path: Path, max_tokens: int | None = None) -> TextLimit:
    """The tokenizer of a checkpoint; without `max_tokens`, its own limit."""
    from transformers import AutoTokenizer

    tokenizer = load_pretrained(AutoTokenizer, path / "tokenizer")
    return TextLimit(tokenizer, max_tokens or tokenizer.model_max_length)


def to_uint8(frames: np.ndarray) -> torch.Tensor:
    """What a pipeline gives with `output_type="np"`, in [0, 1], as uint8 of the same shape."""
    return torch.from_numpy((frames * 255).round().clip(0, 255).astype("uint8"))


def load_or_init(
    model_class: Any, path: Path, dtype: torch.dtype, scratch: Mapping[str, Any] | None
) -> Any:
    """The frozen transformer of a checkpoint, or random by its config with `scratch` over it; on the CPU.

    Random weights are drawn from torch's generator in fp32 and then rounded; buffers stay as they are.
    """
    if scratch is None:
        # dtype= and not .to(): .to() would round position tables as well.
        return load_pretrained(
            model_class, path, subfolder="transformer", dtype=dtype, use_safetensors=True
        ).requires_grad_(False)
    known = sorted(set(inspect.signature(model_class.__init__).parameters) - {"self"})
    unknown = sorted(set(scratch) - set(known))
    if unknown:
        name = model_class.__name__
        raise DitLoraError(
            listed(f"model.from_scratch: {name} has no {', '.join(unknown)}; it has", known)
        )
    try:
        model = model_class.from_config({**read_component_config(path, "transformer"), **scratch})
    except (TypeError, ValueError) as error:
        raise DitLoraError(f"model.from_scratch: {error}; got {dict(scratch)}") from error
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False)


def refuse_options(recipe: Recipe, takes: Sequence[str] = ()) -> None:
    """Raise if the recipe sets options of other families: all but those in `takes`.

    They are `data.classes`, `data.image_column`, `data.image_dropout`, `data.image_noise`, `validation.images`
    and `train.vlb`; `data.fps` of images; and what is for chat models.
    """
    given = {
        "chat": recipe.chat is not None,
        "data.media": any(source.media is not None for source in recipe.data.all_sources),
        "validation.media": bool(recipe.validation.media),
        "optim.groups.adapter: null": (
            recipe.train.mode == "lora" and recipe.optim.groups.adapter is None
        ),
        "data.classes": recipe.data.classes is not None,
        "data.image_column": recipe.data.image_column is not None,
        "data.image_dropout": recipe.data.image_dropout > 0,
        "data.image_noise": recipe.data.image_noise is not None,
        "data.fps": recipe.data.fps is not None and recipe.data.most_frames == 1,
        "validation.images": bool(recipe.validation.images),
        "train.vlb": recipe.train.vlb is not None,
    }
    wrong = [name for name, is_set in given.items() if is_set and name not in takes]
    if wrong:
        raise DitLoraError(
            f"{', '.join(wrong)}: family {recipe.model.family} has nothing that this applies to; remove it"
        )


def read_component_config(path: Path, component: str = "") -> dict[str, Any]:
    """A component's config.json (`model_index.json` for the pipeline itself), as a dict."""
    if component:
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        file = path / component / name
    else:
        file = path / "model_index.json"
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DitLoraError(
            f"{path} is not a Diffusers checkpoint: it has no {file.relative_to(path)}"
        ) from error
    except (OSError, ValueError) as error:
        raise DitLoraError(f"cannot read {file}: {error}") from error
