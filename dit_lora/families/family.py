"""The facts about a family, known before a checkpoint is opened and read without importing torch.

A family's package `dit_lora.families.<name>` is its facts and nothing more. They name two modules: one for what its checkpoints
do, imported when one is opened, and one that builds its tiny twins, imported when one is built.
"""

import importlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from dit_lora.adapters.layer_names import UNKNOWN, LayerNames
from dit_lora.config.lora import Kind
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
class Site:
    """The data of a tiny variant and the names of its modules, so that faults can be put into them.

    A name is None where the model has no such module.
    """

    family: str
    variant: str
    data: Mapping[str, Any]
    """The recipe's `data` section, without its path."""
    samples: Literal["clips", "images", "pairs", "classes", "class_clips", "conversations"] = (
        "clips"
    )
    """The kind of samples that are written to train on."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Other sections of the recipe that this family needs."""
    model: Mapping[str, str] = field(default_factory=dict)
    """Other values of the recipe's `model` section than family and path."""
    groups: Mapping[str, Any] = field(default_factory=lambda: {"adapter": {"lr": 1e-3}})
    """`optim.groups`."""
    attention: str = "transformer_blocks.1.attn1"
    """A self-attention; `key` and `out` are layers of it with an adapter."""
    key: str = "to_k"
    out: str = "to_out.0"
    ff: str = "transformer_blocks.0.ff"
    ff_out: str = "transformer_blocks.0.ff.net.2"
    """The last linear layer in `ff`."""
    modulation: str | None = "transformer_blocks.1.norm1.linear"
    """The layer that makes each sample's shift, scale and gate."""
    last: str = "proj_out"
    time_proj: str | None = "time_proj"
    late: float = 900
    """A timestep, as the module `time_proj` is given it, that a tenth or two of its draws lie beyond."""
    upper: int = 800
    """A timestep that a fifth to a half of its draws lie beyond."""
    text: str | None = "prompt_embeds"
    """The cached tensor of the caption, where it is floating point."""
    posterior: bool = True
    """True if the VAE gives a distribution."""
    has_buffers: bool = False
    """True if the model holds tables in floating point that are no weights, such as positions."""
    class_table: str | None = None
    """The weight that has a row for each class."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Modules of a chat model by what they are."""
    vision_attention: str | None = None
    """A self-attention of a chat model's vision encoder."""
    queries: str | None = None
    """The parameter of a Q-Former's queries that older trainers began at zero."""
    kind: Kind = "lora"
    """The kind of adapter that is trained."""
    factors: tuple[str, str] = ("lora_A.default.weight", "lora_B.default.weight")
    """An adapted layer's first parameter and the one that is zero at the start, by their ends."""

    @property
    def encoded(self) -> bool:
        """Return true if samples are encoded before training, and noise is drawn for them."""
        return self.samples != "conversations"

    @property
    def trains_lora(self) -> bool:
        """Return true if the adapter is a LoRA, which has fused layers."""
        return self.kind == "lora"

    @property
    def sound(self) -> bool:
        """Return true if sound is trained beside clips."""
        return bool(self.data.get("sound"))

    @property
    def pairs(self) -> bool:
        """Return true if samples have a reference and a mask."""
        return self.samples == "pairs"

    @property
    def mark(self) -> str:
        """The tensor of a batch that tells samples apart."""
        return "latent_mean" if self.encoded else "labels"

    @property
    def bad(self) -> float:
        """Return the value that makes the loss NaN where a sample's `mark` is full of it."""
        return float("nan") if self.encoded else -100.0

    def named(self, template: str) -> str:
        """Fill `{attention}.to_out.0` with this site's names."""
        first, idle = self.factors
        # The module of a parameter, as verdicts name it.
        names = {"first": first, "idle": idle, "idle_module": idle.rpartition(".")[0]}
        return template.format(**asdict(self), **names)


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
    sites: tuple[Site, ...]
    """The tiny variants that `dit-lora tiny` builds."""
    default_recipe: str
    """The recipe that the family's name stands for: its smallest."""
    licenses: Mapping[str, License] = field(default_factory=dict)
    """Licences of bases by patterns of Hub ids, of which the first that fits counts; each base's own page is the source."""
    masked_attention: bool = False
    """True if its model may give PyTorch's attention a mask."""
    called_alone: tuple[str, ...] = ()
    """Parts of blocks that the model calls by themselves too, outside of their block."""

    @property
    def tiny_variants(self) -> tuple[str, ...]:
        """The names that `dit-lora tiny` takes."""
        return tuple(site.variant for site in self.sites)

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
