"""Where in each family's tiny checkpoint the faults are put."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dit_lora.data.chat.shapes import write_conversations
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


def drop_clip(folder: Path, clip: str) -> None:
    """Remove a clip and its caption."""
    for path in folder.rglob(f"{Path(clip).stem}.*"):
        path.unlink()
    for listing in folder.glob("metadata.*"):
        lines = listing.read_text().splitlines()
        listing.write_text("".join(f"{line}\n" for line in lines if clip not in line))


CONVERSATIONS = "conversations.json"


def write_chat(folder: Path) -> None:
    """Three questions about each of the clips."""
    write_conversations(folder, clips=CLIPS, images=0, frames=9, height=32, width=48, fps=8)


def drop_conversation(folder: Path, clip: str) -> None:
    """Remove a clip and what is asked of it."""
    (folder / clip).unlink()
    listing = folder / CONVERSATIONS
    records = json.loads(listing.read_text("utf-8"))
    left = [record for record in records if record["video"] != clip]
    listing.write_text(json.dumps(left), "utf-8")


@dataclass(frozen=True)
class Site:
    """One tiny checkpoint, the data that it trains on, and its modules by name; None where it has none."""

    family: str
    variant: str
    data: Mapping[str, Any]
    """The recipe's `data` section, without its path."""
    write_data: Callable[[Path], None] = write_clips
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Other sections of the recipe that this family needs."""
    groups: Mapping[str, Any] = field(default_factory=lambda: {"adapter": {"lr": 1e-3}})
    """`optim.groups`."""
    drop: Callable[[Path, str], None] = drop_clip
    """Removes a sample from the data."""
    listing: str = ""
    """The file in the folder of data that `data.path` names; empty for the folder."""
    encoded: bool = True
    """Whether samples are encoded before training, and noise is drawn for them."""
    mark: str = "latent_mean"
    """The tensor of a batch that tells samples apart."""
    bad: float = math.nan
    """What makes the loss NaN where a sample's `mark` is full of it."""
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
    text: str | None = "prompt_embeds"
    """The cached tensor of the caption, where it is floating point."""
    posterior: bool = True
    """Whether the VAE gives a distribution."""
    has_buffers: bool = False
    """Whether the model holds tables in floating point that are no weights, such as positions."""
    class_table: str | None = None
    """The weight that has a row for each class."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Of a chat model: modules by what they are."""
    vision_attention: str | None = None
    """Of a chat model: a self-attention of its vision encoder."""
    queries: str | None = None
    """The parameter of a Q-Former's queries that older trainers began at zero."""

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


def _chat(family: str, variant: str, vision: str, language: str, **changes: Any) -> Site:
    """`vision` is a layer of the vision encoder, `language` the language model."""
    given: dict[str, Any] = {
        "family": family,
        "variant": variant,
        "sections": {"chat": {"max_tokens": 448, "length_step": 64, "shuffle_turns": False}},
        "write_data": write_chat,
        "drop": drop_conversation,
        "listing": CONVERSATIONS,
        "encoded": False,
        "mark": "labels",
        "bad": -100.0,
        "attention": f"{language}.layers.1.self_attn",
        "key": "k_proj",
        "out": "o_proj",
        "ff": f"{vision}.mlp",
        "ff_out": f"{vision}.mlp.fc2",
        "modulation": None,
        "last": f"{language}.norm",
        "time_proj": None,
        "text": None,
        "posterior": False,
        "has_buffers": True,
    }
    return Site(**{**given, **changes})


def _experts(vision: str, projection: str, language: str, **others: str) -> dict[str, str]:
    return {
        "vision": vision,
        "projection": projection,
        "attention": f"{language}.layers.0.self_attn.o_proj",
        "mlp": f"{language}.layers.0.mlp.down_proj",
        "head": "lm_head",
        **others,
    }


def _videochat2(variant: str, **changes: Any) -> Site:
    vision, language = "model.vision_encoder.encoder.blocks.1", "model.language_model"
    given: dict[str, Any] = {
        "data": {"frames": 4, "height": 32, "width": 32},
        "groups": {"adapter": {"lr": 1e-3}, "connector": {"lr": 1e-4}},
        "experts": _experts(
            f"{vision}.attn.proj",
            "model.projection",
            language,
            qformer="model.qformer.encoder.layer.0.crossattention.self.value",
        ),
        "vision_attention": f"{vision}.attn",
        "queries": "model.extra_query_tokens",
    }
    return _chat("videochat2", variant, vision, language, **{**given, **changes})


def _hugging_face(
    variant: str, size: int, vision: str, out: str, projection: str, mixed: str | None = None
) -> Site:
    """A model of Transformers; `out` is the last layer of the vision encoder's layer `vision`.

    `mixed` is one that all tokens go through, where the first token is of the class and dropped at the end.
    """
    language = "model.text_model" if variant == "smolvlm2" else "model.language_model"
    given: dict[str, Any] = {
        "data": {"frames": 4, "height": size, "width": size},
        "ff_out": f"{vision}.{out}",
        "experts": _experts(f"{vision}.{mixed or out}", projection, language),
    }
    return _chat("chat", variant, vision, language, **given)


_VIDEO = {"frames": 9, "height": 32, "width": 48, "fps": 8}
_EVERY = (
    Site("cogvideox", "cogvideox-2b", _VIDEO, has_buffers=True),
    *(
        Site("cogvideox", variant, _VIDEO)
        for variant in ("cogvideox-5b", "cogvideox-1.5", "cogvideox-1.5-i2v")
    ),
    Site("cogvideox", "cogvideox-5b-i2v", {**_VIDEO, "height": 64, "width": 96}, has_buffers=True),
    *(_sana(variant) for variant in ("sana-600m", "sana-1.5", "sana-fp16")),
    _sana(
        "sana-video",
        family="sana_video",
        data={**_VIDEO, "width": 64},
        write_data=write_clips,
        ff_out="transformer_blocks.0.ff.conv_temp",
        posterior=True,
        has_buffers=True,
    ),
    Site(
        "dit",
        "dit-tiny",
        {"height": 32, "width": 32},
        write_classes,
        last="proj_out_2",
        time_proj="transformer_blocks.1.norm1.emb.time_proj",
        text=None,
        has_buffers=True,
        class_table="transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight",
    ),
    _video_dit(
        "video-dit-class",
        write_data=write_class_clips,
        text=None,
        class_table="class_embed.weight",
    ),
    _video_dit("video-dit-text", text="pooled_projections"),
    Site(
        "latte",
        "latte",
        {**_VIDEO, "frames": 4, "width": 32},
        attention="transformer_blocks.0.attn1",
        modulation="adaln_single.linear",
        time_proj="adaln_single.emb.time_proj",
        has_buffers=True,
    ),
    _videochat2("videochat2-mistral"),
    _videochat2("videochat2-vicuna"),
    _videochat2("videochat2-phi3", key="o_proj"),
    _videochat2(
        "videochat2-hd",
        sections={
            "chat": {"max_tokens": 448, "length_step": 64, "shuffle_turns": False, "tiles": 2}
        },
    ),
    _hugging_face(
        "llava-next-video",
        56,
        "model.vision_tower.encoder.layers.0",
        "mlp.fc2",
        "model.multi_modal_projector.linear_2",
        "self_attn.v_proj",
    ),
    _hugging_face(
        "qwen2.5-vl", 56, "model.visual.blocks.1", "mlp.down_proj", "model.visual.merger.mlp.2"
    ),
    _hugging_face(
        "qwen3-vl", 64, "model.visual.blocks.1", "mlp.linear_fc2", "model.visual.merger.linear_fc2"
    ),
    _hugging_face(
        "smolvlm2",
        32,
        "model.vision_model.encoder.layers.1",
        "mlp.fc2",
        "model.connector.modality_projection.proj",
    ),
    _hugging_face(
        "internvl",
        56,
        "model.vision_tower.encoder.layer.1",
        "mlp.fc2",
        "model.multi_modal_projector.linear_2",
        "attention.v_proj",
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
