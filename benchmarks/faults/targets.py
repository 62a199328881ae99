"""The modules and tensors of a tiny checkpoint that faults are injected into."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dit_lora.config.lora import AdapterKind


@dataclass(frozen=True, kw_only=True)
class FaultTargets:
    """Training data of a tiny variant and the names of its modules, for fault injection.

    A name is None where the model has no such module.
    """

    family: str
    variant: str
    data: Mapping[str, Any]
    """The recipe's `data` section, without its path."""
    samples: Literal["clips", "images", "pairs", "classes", "class_clips", "conversations"] = "clips"
    """The kind of samples that the variant is trained on."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Other sections of the recipe that this family needs."""
    model: Mapping[str, str] = field(default_factory=dict)
    """Values of the recipe's `model` section other than family and path."""
    groups: Mapping[str, Any] = field(default_factory=lambda: {"adapter": {"lr": 1e-3}})
    """`optim.groups`."""
    attention: str = "transformer_blocks.1.attn1"
    """A self-attention; `key` and `out_proj` are layers of it with an adapter."""
    key: str = "to_k"
    out_proj: str = "to_out.0"
    ff: str = "transformer_blocks.0.ff"
    ff_out: str = "transformer_blocks.0.ff.net.2"
    """The last linear layer in `ff`."""
    modulation: str | None = "transformer_blocks.1.norm1.linear"
    """The layer that computes each sample's shift, scale and gate."""
    final_proj: str = "proj_out"
    time_proj: str | None = "time_proj"
    late: float = 900
    """A timestep, in the units that `time_proj` receives; 10 to 20 % of the sampled ones lie above it.

    If a run draws none above it, its fault never strikes: lower it in target_table.py.
    """
    upper: int = 800
    """A timestep; 20 to 50 % of the sampled ones lie above it."""
    text: str | None = "prompt_embeds"
    """The cached floating-point tensor of the caption."""
    posterior: bool = True
    """True if the VAE returns a distribution."""
    batched: bool = True
    """True if one call of the model has all samples of a micro-batch; False if each has a call of its own."""
    has_buffers: bool = False
    """True if the model has floating-point buffers, such as position tables."""
    class_table: str | None = None
    """The weight that has a row for each class."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Modules of a chat model by role: `vision`, `projection`, `attention`, `mlp`, `head`, `qformer`."""
    vision_attention: str | None = None
    """A self-attention of a chat model's vision encoder."""
    queries: str | None = None
    """The Q-Former's query parameter, which older trainers initialized to zero."""
    kind: AdapterKind = "lora"
    """The kind of adapter that is trained."""
    factors: tuple[str, str] = ("lora_A.default.weight", "lora_B.default.weight")
    """Name endings of an adapted layer's first parameter and of the one that starts at zero."""

    @property
    def encoded(self) -> bool:
        """True if samples are encoded before training and noise is added to them."""
        return self.samples != "conversations"

    @property
    def trains_lora(self) -> bool:
        """True if the adapter is a LoRA, the only kind with fused layers."""
        return self.kind == "lora"

    @property
    def sound(self) -> bool:
        """True if the clips are trained with their sound."""
        return bool(self.data.get("sound"))

    @property
    def pairs(self) -> bool:
        """True if samples have a reference and a mask."""
        return self.samples == "pairs"

    @property
    def id_tensor(self) -> str:
        """The batch tensor that identifies a sample."""
        return "latent_mean" if self.encoded else "labels"

    @property
    def bad(self) -> float:
        """The fill value for a sample's `mark` tensor that makes its loss NaN."""
        return float("nan") if self.encoded else -100.0

    def named(self, template: str) -> str:
        """Fill a template such as `{attention}.to_out.0` with the names of this variant."""
        first_factor, idle = self.factors
        # Diagnoses name the module of a parameter.
        names = {"first": first_factor, "idle": idle, "idle_module": idle.rpartition(".")[0]}
        return template.format(**asdict(self), **names)
