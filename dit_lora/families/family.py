"""Descriptions of the families, available before a checkpoint is opened and without importing torch.

A family's package `dit_lora.families.<name>` contains only this description. It names two modules: the one that opens
checkpoints and the one that builds tiny random checkpoints. Each is imported on first use.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from dit_lora.adapters.layer_names import UNKNOWN_NAMES, LayerNames
from dit_lora.errors import DitLoraError

if TYPE_CHECKING:
    from pathlib import Path

    from dit_lora.config.recipe import ModelConfig, Recipe
    from dit_lora.families.base import Checkpoint
    from dit_lora.families.chat_base import ChatCheckpoint


@dataclass(frozen=True)
class License:
    """License in the Hub's form: an identifier from its list, or `other` with a name and a link."""

    # Names of the model card's fields `license`, `license_name` and `license_link`.
    id: str
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Base class that describes one model family: its name, licenses and opening.

    Fields with a default are only set where they differ.
    """

    name: str
    checkpoint_module: str = ""
    """Module with `open_checkpoint`, imported when a checkpoint is opened. Default:
    `dit_lora.families.<name>.checkpoint`."""
    tiny_module: str = ""
    """Module with `build_tiny_checkpoint`, imported when a tiny checkpoint is built. Default:
    `dit_lora.families.<name>.tiny`."""
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    """Default names of the linear layers that get an adapter, matched as in PEFT. The default is Diffusers' attention.
    """
    group_patterns: Mapping[str, tuple[str, ...]]
    """Patterns of base parameter names for the `connector` and `backbone` parameter groups."""
    tiny_variants: tuple[str, ...]
    """Variants of the tiny checkpoint that `dit-lora tiny` can build."""
    default_recipe: str
    """The recipe that the family's name selects: the one of its smallest model."""
    licenses: Mapping[str, License] = field(default_factory=dict)
    """Licences of base models by pattern of Hub id. The first match counts; the source is each model's own page."""
    has_attention_mask: bool = False
    """True if the model may pass a mask to PyTorch's attention."""
    directly_called_modules: tuple[str, ...] = ()
    """Submodules of blocks that the model also calls directly, outside their block."""

    def __post_init__(self) -> None:
        for module in ("checkpoint", "tiny"):
            if not getattr(self, f"{module}_module"):
                # The class is frozen.
                object.__setattr__(self, f"{module}_module", f"dit_lora.families.{self.name}.{module}")

    def build_tiny_checkpoint(self, variant: str, folder: "Path", seed: int) -> None:
        """Write a complete random checkpoint that is small enough for tests. Equal seeds give equal bytes."""
        # Import here: descriptions of families are read without torch, for example by the command line.
        import torch

        if variant not in self.tiny_variants:
            raise DitLoraError(f"unknown variant {variant!r}; choose one of {', '.join(self.tiny_variants)}")
        builder = importlib.import_module(self.tiny_module)
        # Builders draw weights from torch's default generator. Seed it, and restore the caller's state afterwards.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            builder.build_tiny_checkpoint(variant, folder)

    def get_license(self, base_model: str | None) -> License | None:
        """License of a base model, found by its Hub id; None if it is unknown."""
        if base_model is None:
            return None
        # Patterns are tried in the order of the family's table, so a special case must come before its group.
        licence = next((license for ids, license in self.licenses.items() if fnmatchcase(base_model, ids)), None)
        # On the Hub, a licence `other` needs a link. The file in the model's repository is the default.
        if licence is None or licence.id != "other" or licence.link is not None:
            return licence
        return replace(licence, link=f"https://huggingface.co/{base_model}/blob/main/LICENSE.txt")


@dataclass(frozen=True, kw_only=True)
class DiffusionFamily(Family):
    """A family of diffusion models, whose checkpoints implement the contract of `families.base`."""

    pipeline_names: tuple[str, ...]
    """Pipeline classes (`_class_name` of model_index.json) whose checkpoints the family trains."""
    pipeline_packages: tuple[str, ...] = ()
    """Packages that the stock pipeline imports in addition to those that all pipelines need."""
    comfyui: LayerNames = UNKNOWN_NAMES
    """ComfyUI's names of the layers, or the reason why there are none."""
    has_kohya_layout: bool = False
    """True if VideoX-Fun loads LoRA files in kohya's layout for this family."""

    def open(
        self, model: "ModelConfig", recipe: "Recipe | None" = None, *, index: "Mapping[str, Any] | None" = None
    ) -> "Checkpoint":
        """Read a checkpoint's configs, without its weights.

        Args:
            model: The `model` section of a recipe.
            recipe: If given, the checkpoint gets the recipe's settings. Otherwise it is as stored.
            index: `model_index_changes` from an adapter's header: the checkpoint is as it was when that adapter was
                trained.

        Raises:
            DitLoraError: The checkpoint has a pipeline, scheduler, objective or task that the family does not train,
                parts that do not fit together, or missing or damaged files; or it cannot train as the recipe asks.
        """
        stored: Checkpoint = importlib.import_module(self.checkpoint_module).open_checkpoint(self, model)
        # An adapter's changes (added classes, another task) come before the recipe, which is checked against them.
        checkpoint = stored.copy_with_model_index_changes(index) if index else stored
        return checkpoint if recipe is None else checkpoint.apply_recipe(recipe)


@dataclass(frozen=True, kw_only=True)
class ChatFamily(Family):
    """A family of chat models, whose checkpoints implement the contract of `families.chat_base`."""

    lora_parent_modules: tuple[str, ...]
    """Submodules in which `lora_targets` are searched, such as the language model."""
    has_attention_mask: bool = True
    has_default_timestamps: bool = True
    """True if the models are told the frame times even if `chat.timestamps` is not set."""

    def open(self, model: "ModelConfig", recipe: "Recipe | None" = None) -> "ChatCheckpoint":
        """Read a checkpoint's config and tokenizer, without its weights.

        Args:
            model: The `model` section of a recipe.
            recipe: If given, the checkpoint gets the recipe's settings. Otherwise it sees as much as its config says.

        Raises:
            DitLoraError: The checkpoint belongs to another family, or cannot train as the recipe asks.
        """
        stored: ChatCheckpoint = importlib.import_module(self.checkpoint_module).open_checkpoint(model)
        return stored if recipe is None else stored.apply_recipe(recipe)
