"""The section `lora` of a recipe: the adapter that trains, and what it starts from."""

from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from dit_lora.config.section import Count, Decay, Section

WEIGHT_INITS = ("pissa", "olora")
"""Initializations from the weight that is adapted."""
DATA_INIT = "eva"
"""The initialization from the inputs of layers on training data."""
INITS = ("kaiming", "gaussian", DATA_INIT, *WEIGHT_INITS)
DEFAULT_RANK = 64
AdapterKind = Literal["lora", "dora", "lokr", "loha", "oft"]
ADAPTER_KINDS: tuple[AdapterKind, ...] = get_args(AdapterKind)
ADAPTER_KIND_NAMES = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr", "loha": "LoHa", "oft": "OFT"}
"""Names of the kinds in their papers."""
PEFT_ONLY_KINDS: tuple[AdapterKind, ...] = ("loha", "oft")
"""Kinds that Diffusers cannot load. They are saved in PEFT's format, for diffusion models too."""
# Options of each kind, besides kind, targets and init: those that PEFT's config for it has.
_KIND_OPTIONS: dict[AdapterKind, set[str]] = {
    "lora": {"rank", "alpha", "rslora", "rank_pattern", "alpha_pattern", "dropout", "under"},
    "dora": {"rank", "alpha", "rslora", "rank_pattern", "alpha_pattern", "dropout"},
    "lokr": {"rank", "alpha", "rank_pattern", "alpha_pattern", "factor"},
    "loha": {"rank", "alpha", "rank_pattern", "alpha_pattern"},
    "oft": {"block_size"},
}
NEWER_OPTIONS = ("kind", "rslora", "rank_pattern", "alpha_pattern", "factor", "block_size", "under")
"""Options that version 0.1 did not have. At their defaults they are left out when checkpoints compare settings."""
LayerPatterns = dict[str, Count]


class UnderConfig(Section):
    """Options of a frozen adapter that stays active under the adapter being trained."""

    path: str
    """A LoRA as `lora.init` takes it."""
    scale: float = 1.0
    """Factor of its update, beside its own alpha over rank."""
    in_samples: bool = False
    """True to use it in samples too, as when the result is used together with it; false to use it in training only."""

    @field_validator("scale")
    @classmethod
    def _require_nonzero_scale(cls, scale: float) -> float:
        # The adapter would be loaded and computed without an effect.
        if scale == 0:
            raise ValueError("scale 0 has no effect; remove it")
        return scale


class LoraConfig(Section):
    kind: AdapterKind = "lora"
    """The adapter, by PEFT: `lora` (arXiv 2106.09685); `dora`, LoRA with a magnitude a row (2402.09353); `lokr`, a
    Kronecker product, and `loha`, an elementwise product of two LoRAs (both 2309.14859); `oft`, a rotation of each
    layer's inputs (2306.07280)."""
    rank: Count | None = None
    """Rows of A; 64 by default, or the rank of the file in `init`. Of `lokr`, that of its second factor, which is
    trained whole if the rank is at least half its side."""
    alpha: Count | None = None
    """The update is scaled by alpha / rank; by default alpha = rank, or that of the file in `init`."""
    rslora: bool = False
    """True to scale by alpha / sqrt(rank), so that high ranks learn too (rank-stabilised LoRA, arXiv 2312.03732)."""
    rank_pattern: LayerPatterns = Field(default_factory=dict)
    """Ranks of layers that differ from `rank`, by the end of their names or a regular expression. The first that PEFT
    matches counts."""
    alpha_pattern: LayerPatterns = Field(default_factory=dict)
    """Likewise alphas. A layer with a rank of its own keeps `alpha` if it has none here."""
    factor: Count | None = None
    """Size of LoKr's first factor, for sides that it divides; by default both factors are about as large."""
    block_size: Count | None = None
    """Side of OFT's rotations; PEFT's 32 by default, and the nearest that divides a layer's inputs."""
    dropout: Decay = 0.0
    targets: tuple[str, ...] | None = None
    """Names of linear layers and 2D convolutions, as PEFT matches them; by default the family's, or the layers that
    the file in `init` has."""
    init: str = "kaiming"
    """Start of A, with B at zero: `kaiming` (PEFT's default), `gaussian`, or `eva`, the directions in which a layer's
    inputs vary most (arXiv 2410.07170). Or start of both from the weight itself: `pissa`, its largest singular values
    (2404.02948), or `olora`, its QR decomposition (2406.01775); their product is subtracted, and the result has twice
    the rank. Or a LoRA to continue from: the folder of a run or an adapter, a safetensors file in Diffusers', PEFT's,
    ComfyUI's or kohya's form, or a Hub id."""

    under: tuple[UnderConfig, ...] = ()
    """Frozen adapters that are on while this one trains, such as one that takes a distillation back; each a path, or
    `{path, scale, in_samples}`. They are no part of the result."""

    @field_validator("under", mode="before")
    @classmethod
    def _expand_paths(cls, values: Any) -> Any:
        # Anything else is left to pydantic, whose message names the expected type.
        if not isinstance(values, list | tuple):
            return values
        return [{"path": value} if isinstance(value, str) else value for value in values]

    @field_validator("init")
    @classmethod
    def _check_init(cls, init: str) -> str:
        if init == "loftq":
            raise ValueError(
                "loftq is not supported, because its adapter fits only one quantised base; use pissa, or another "
                f"of {', '.join(INITS)}"
            )
        return init

    @model_validator(mode="before")
    @classmethod
    def _set_default_rank(cls, values: Any) -> Any:
        # With a file in `init`, rank stays None: the file's rank is used.
        if not isinstance(values, dict) or values.get("init", INITS[0]) not in INITS:
            return values
        # An unknown kind gets a rank too; its own error is reported afterwards.
        if "rank" not in _KIND_OPTIONS.get(values.get("kind", "lora"), {"rank"}):
            return values
        # A copy: the caller's dictionary stays unchanged.
        return {**values, "rank": DEFAULT_RANK} if values.get("rank") is None else values

    @model_validator(mode="after")
    def _check_kind_options(self) -> Self:
        # All options that some kind has; those of other kinds must be at their defaults.
        options = set.union(*_KIND_OPTIONS.values())
        unsupported = sorted(
            name
            for name in options - _KIND_OPTIONS[self.kind]
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
        )
        if unsupported:
            raise ValueError(
                f"kind {self.kind} has no {', '.join(unsupported)}; it has "
                f"{', '.join(sorted(_KIND_OPTIONS[self.kind]))}"
            )
        if self.kind not in ("lora", "dora") and self.init != INITS[0]:
            raise ValueError(f"kind {self.kind} has its own initialization; remove init")
        # Reached for DoRA only: the check above has refused the other kinds.
        if self.kind != "lora" and self.init in (DATA_INIT, *WEIGHT_INITS):
            raise ValueError(f"init: {self.init} needs kind lora; got {self.kind}")
        if self.kind != "lora" and self.has_file_init:
            raise ValueError(
                f"init takes only the file of a LoRA, and kind is {self.kind}; to continue a run, use train.resume"
            )
        if self.has_file_init and (self.rslora or self.rank_pattern or self.alpha_pattern):
            raise ValueError("rslora, rank_pattern and alpha_pattern come from the file in init; remove them")
        return self

    @property
    def supported_options(self) -> set[str]:
        """Names of the options that this kind of adapter has, in addition to kind, targets and init."""
        return _KIND_OPTIONS[self.kind]

    @property
    def has_file_init(self) -> bool:
        """True if training continues from a LoRA file, because `init` is a path and not a known initialization."""
        return self.init not in INITS

    @property
    def new_adapter_rank(self) -> int:
        """Rank of a new adapter; not for one that continues from a file."""
        assert self.rank is not None, "the rank comes from the file in init"
        return self.rank
