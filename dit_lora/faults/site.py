"""Where in each family's tiny checkpoint the faults are put."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dit_lora.data.shapes import write_shapes
from dit_lora.errors import DitLoraError

CLIPS = 6


def write_clips(folder: Path) -> None:
    write_shapes(folder, clips=CLIPS, frames=9, height=32, width=48, fps=8)


@dataclass(frozen=True)
class Site:
    """One tiny checkpoint, the data that it trains on, and its modules by name; None where it has none."""

    family: str
    variant: str
    data: Mapping[str, Any]
    """The recipe's `data` section, without its path."""
    write_data: Callable[[Path], None] = write_clips
    attention: str = "transformer_blocks.1.attn1"
    """A self-attention with `to_k` and `to_out.0`."""
    ff: str = "transformer_blocks.0.ff"
    ff_out: str = "transformer_blocks.0.ff.net.2"
    """The last linear layer in `ff`."""
    modulation: str | None = "transformer_blocks.1.norm1.linear"
    """The layer that makes each sample's shift, scale and gate."""
    last: str = "proj_out"
    time_proj: str | None = "time_proj"
    text: str | None = "prompt_embeds"
    """The cached tensor of the caption, where it is floating point."""
    posterior: bool = True
    """Whether the VAE gives a distribution."""
    normal_in: str = "dit_lora.families.cogvideox"
    """The module whose `normal` draws noise and posterior."""

    @property
    def lora_b(self) -> str:
        return f"{self.attention}.to_k.lora_B.default.weight"

    def named(self, template: str) -> str:
        """`{attention}.to_out.0` with this site's names."""
        return template.format(**asdict(self))


_VIDEO = {"frames": 9, "height": 32, "width": 48, "fps": 8}
SITES: dict[str, Site] = {
    "cogvideox-5b": Site("cogvideox", "cogvideox-5b", _VIDEO),
    "cogvideox-2b": Site("cogvideox", "cogvideox-2b", _VIDEO),
}
DEFAULT = "cogvideox-5b"


def site_of(variant: str) -> Site:
    if variant not in SITES:
        raise DitLoraError(
            f"no tiny checkpoint {variant!r} has faults; there are: {', '.join(SITES)}"
        )
    return SITES[variant]
