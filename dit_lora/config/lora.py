"""The section `lora` of a recipe: the adapter that trains, and what it starts from."""

from typing import Any

from pydantic import model_validator

from dit_lora.config.section import Count, Decay, Section

INITS = ("kaiming", "gaussian")
RANK = 64


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
