"""The section `lora` of a recipe: the adapter that trains, and what it starts from."""

from typing import Any

from pydantic import field_validator, model_validator

from dit_lora.config.section import Count, Decay, Section

INITS = ("kaiming", "gaussian")
RANK = 64


class UnderConfig(Section):
    """A frozen adapter under the one that trains."""

    path: str
    """A LoRA as `lora.init` takes it."""
    scale: float = 1.0
    """Factor of its update, beside its own alpha over rank."""
    in_samples: bool = False
    """True if it is on in samples too, as where it is used together with the result; else it is on in training alone."""

    @field_validator("scale")
    @classmethod
    def _does_something(cls, scale: float) -> float:
        if scale == 0:
            raise ValueError("at scale 0 it does nothing; leave it out")
        return scale


class LoraConfig(Section):
    rank: Count | None = None
    """Rows of A; 64 by default, or the rank of the file in `init`."""
    alpha: Count | None = None
    """The update is scaled by alpha / rank; by default alpha = rank, or that of the file in `init`."""
    dropout: Decay = 0.0
    targets: tuple[str, ...] | None = None
    """Names of linear layers and 2D convolutions, as PEFT matches them; by default the family's, or the layers that
    the file in `init` has."""
    init: str = "kaiming"
    """Start of A, `kaiming` (PEFT's default) or `gaussian`, with B at zero. Or a LoRA to continue from: a run's or an
    adapter's folder, a safetensors file in Diffusers', PEFT's, ComfyUI's or kohya's form, or a Hub id."""

    under: tuple[UnderConfig, ...] = ()
    """Frozen adapters that are on while this one trains, such as one that takes a distillation back; each a path, or
    `{path, scale, in_samples}`. They are no part of the result."""

    @field_validator("under", mode="before")
    @classmethod
    def _paths(cls, values: Any) -> Any:
        if not isinstance(values, list | tuple):
            return values
        return [{"path": one} if isinstance(one, str) else one for one in values]

    @model_validator(mode="before")
    @classmethod
    def _usual_rank(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("init", INITS[0]) not in INITS:
            return values
        return {**values, "rank": RANK} if values.get("rank") is None else values

    @property
    def from_file(self) -> bool:
        """Return true if training continues from a LoRA's file."""
        return self.init not in INITS

    @property
    def own_rank(self) -> int:
        """The rank of an adapter that starts anew."""
        assert self.rank is not None, "of a file, the rank is the file's"
        return self.rank
