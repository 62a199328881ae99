"""The facts about a family, known before a checkpoint is opened and read without importing torch.

A family's package `dit_lora.families.<name>` is its facts and nothing more. They name two modules: one for what its checkpoints
do, imported when one is opened, and one that builds its tiny twins, imported when one is built.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from dit_lora.adapters.layer_names import UNKNOWN, LayerNames
from dit_lora.errors import DitLoraError

if TYPE_CHECKING:
    from pathlib import Path

    from dit_lora.config.recipe import ModelConfig, Recipe
    from dit_lora.families.base import Checkpoint
    from dit_lora.families.chat_base import ChatCheckpoint


@dataclass(frozen=True)
class License:
    """A licence in the Hub's terms: an identifier of its list, or `other` with a name and a link."""

    id: str
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """The facts of one family. What has a default here is left out where the default is true."""

    name: str
    checkpoint_module: str
    """The module with `open_checkpoint`, imported when a checkpoint is opened."""
    tiny_module: str
    """The module with `build_tiny`, imported when a tiny twin is built."""
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    """Default names of the linear layers that get an adapter, as PEFT matches them; as Diffusers names attention's."""
    group_patterns: Mapping[str, tuple[str, ...]]
    """Patterns of base parameter names for the `connector` and `backbone` groups."""
    tiny_variants: tuple[str, ...]
    """The tiny variants that `dit-lora tiny` builds."""
    default_recipe: str
    """The recipe that the family's name stands for: its smallest."""
    licenses: Mapping[str, License] = field(default_factory=dict)
    """Licences of bases by patterns of Hub ids, of which the first that fits counts; each base's own page is the source."""
    masked_attention: bool = False
    """True if its model may give PyTorch's attention a mask."""
    called_alone: tuple[str, ...] = ()
    """Parts of blocks that the model calls by themselves too, outside of their block."""

    def build_tiny(self, variant: str, folder: "Path", seed: int) -> None:
        """Write a complete random checkpoint, small enough for tests; equal bytes for equal seeds."""
        import torch

        if variant not in self.tiny_variants:
            raise DitLoraError(f"no variant {variant!r}; one of {', '.join(self.tiny_variants)}")
        builder = importlib.import_module(self.tiny_module)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            builder.build_tiny(variant, folder)

    def license_of(self, base: str | None) -> License | None:
        """Return the licence of a base by its Hub id; None where it is not known here."""
        if base is None:
            return None
        licence = next((one for ids, one in self.licenses.items() if fnmatchcase(base, ids)), None)
        if licence is None or licence.id != "other" or licence.link is not None:
            return licence
        return replace(licence, link=f"https://huggingface.co/{base}/blob/main/LICENSE.txt")


@dataclass(frozen=True, kw_only=True)
class DiffusionFamily(Family):
    """A family whose checkpoints have the contract of `families.base`."""

    pipeline_names: tuple[str, ...]
    """The `_class_name` of the pipelines whose checkpoints it trains."""
    pipeline_packages: tuple[str, ...] = ()
    """Packages that its stock pipeline imports beside those that every one needs."""
    comfyui: LayerNames = UNKNOWN
    """ComfyUI's names of the layers, or why it has none."""
    kohya: bool = False
    """True if VideoX-Fun reads LoRA files in kohya's layout for it."""

    def open(
        self,
        model: "ModelConfig",
        recipe: "Recipe | None" = None,
        *,
        index: "Mapping[str, Any] | None" = None,
    ) -> "Checkpoint":
        """Read a checkpoint's configs, no weights; refuse one of another family.

        It is as `recipe` trains it; without one as it is stored, or as it was trained where an adapter's header
        has `index` changes. Raises `DitLoraError` if it cannot train what the recipe asks for.
        """
        stored: Checkpoint = importlib.import_module(self.checkpoint_module).open_checkpoint(
            self, model
        )
        checkpoint = stored.as_trained(index) if index else stored
        return checkpoint if recipe is None else checkpoint.for_recipe(recipe)


@dataclass(frozen=True, kw_only=True)
class ChatFamily(Family):
    """A family whose checkpoints have the contract of `families.chat_base`."""

    lora_within: tuple[str, ...]
    """The submodules in which `lora_targets` are looked for, such as the language model."""
    masked_attention: bool = True
    tells_times: bool = True
    """True if its models are told when frames are, whatever `chat.timestamps` is left at."""

    def open(self, model: "ModelConfig", recipe: "Recipe | None" = None) -> "ChatCheckpoint":
        """Read a checkpoint's configs and tokenizer, no weights; refuse one of another family.

        It is as `recipe` trains it, else with as much shown to it as its config says.
        """
        stored: ChatCheckpoint = importlib.import_module(self.checkpoint_module).open_checkpoint(
            model
        )
        return stored if recipe is None else stored.for_recipe(recipe)
