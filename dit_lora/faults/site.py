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


def write_images(folder: Path) -> None:
    write_shapes(folder, clips=CLIPS, frames=1, height=64, width=64, fps=8)


def write_classes(folder: Path) -> None:
    """Two folders of images, of discs and of squares, named by their labels."""
    _sort_into_classes(folder, frames=1)


def write_class_clips(folder: Path) -> None:
    _sort_into_classes(folder, frames=9)


def _sort_into_classes(folder: Path, frames: int) -> None:
    for path in write_shapes(folder, clips=CLIPS, frames=frames, height=32, width=48, fps=8):
        label = folder / ("0" if "disc" in path.name else "1")
        label.mkdir(exist_ok=True)
        path.rename(label / path.name)
        path.with_suffix(".txt").unlink(missing_ok=True)
    (folder / "metadata.jsonl").unlink(missing_ok=True)


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

    def named(self, template: str) -> str:
        """`{attention}.to_out.0` with this site's names."""
        return template.format(**asdict(self))


def _sana(variant: str, **changes: Any) -> Site:
    given: dict[str, Any] = {
        "family": "sana",
        "variant": variant,
        "data": {"height": 64, "width": 64},
        "write_data": write_images,
        "ff_out": "transformer_blocks.0.ff.conv_point",
        "modulation": "time_embed.linear",
        "time_proj": "time_embed.emb.time_proj",
        "posterior": False,
    }
    return Site(**{**given, **changes})


def _video_dit(variant: str, **changes: Any) -> Site:
    given: dict[str, Any] = {
        "family": "video_dit",
        "variant": variant,
        "data": _VIDEO,
        "attention": "transformer_blocks.1.attn",
        "modulation": "transformer_blocks.1.adaln.linear",
    }
    return Site(**{**given, **changes})


_VIDEO = {"frames": 9, "height": 32, "width": 48, "fps": 8}
_EVERY = (
    *(
        Site("cogvideox", variant, _VIDEO)
        for variant in ("cogvideox-2b", "cogvideox-5b", "cogvideox-1.5", "cogvideox-1.5-i2v")
    ),
    Site("cogvideox", "cogvideox-5b-i2v", {**_VIDEO, "height": 64, "width": 96}),
    *(_sana(variant) for variant in ("sana-600m", "sana-1.5", "sana-fp16")),
    _sana(
        "sana-video",
        family="sana_video",
        data={**_VIDEO, "width": 64},
        write_data=write_clips,
        ff_out="transformer_blocks.0.ff.conv_temp",
        posterior=True,
    ),
    Site(
        "dit",
        "dit-tiny",
        {"height": 32, "width": 32},
        write_classes,
        last="proj_out_2",
        time_proj="transformer_blocks.1.norm1.emb.time_proj",
        text=None,
    ),
    _video_dit("video-dit-class", write_data=write_class_clips, text=None),
    _video_dit("video-dit-text", text="pooled_projections"),
    Site(
        "latte",
        "latte",
        {**_VIDEO, "frames": 4, "width": 32},
        attention="transformer_blocks.0.attn1",
        modulation="adaln_single.linear",
        time_proj="adaln_single.emb.time_proj",
    ),
)
SITES: dict[str, Site] = {site.variant: site for site in _EVERY}
DEFAULT = "cogvideox-5b"


def site_of(variant: str) -> Site:
    if variant not in SITES:
        raise DitLoraError(
            f"no tiny checkpoint {variant!r} has faults; there are: {', '.join(SITES)}"
        )
    return SITES[variant]
