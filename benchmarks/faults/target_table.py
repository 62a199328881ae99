"""The fault targets of every tiny variant of every family."""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.faults.targets import FaultTargets
from dit_lora.config.lora import ADAPTER_KINDS, AdapterKind
from dit_lora.errors import DitLoraError
from dit_lora.families import DIFFUSION_FAMILIES
from dit_lora.families.z_image.checkpoint import TRAINING_SHIFT
from dit_lora.numerics.noise_levels import NoiseLevelDistribution

_CLIPS = {"frames": 9, "height": 32, "width": 48, "fps": 8}
_LARGE_CLIPS = {**_CLIPS, "height": 64, "width": 96}
_IMAGES = {"height": 64, "width": 64}


def _find_quantile(share: float, shift: float, std: float = 1.0) -> float:
    """The timestep below which this share of the sampled ones lies, of 1000, at a logit-normal density."""
    gaussian = torch.special.ndtri(torch.tensor(share, dtype=torch.float64))
    return 1000 * NoiseLevelDistribution(std=std).compute_levels(gaussian, shift).item()


_ANIMA = FaultTargets(
    family="anima",
    variant="anima",
    data=_IMAGES,
    samples="images",
    modulation="transformer_blocks.1.norm1.linear_2",
    time_proj="time_embed.time_proj",
    # Trained without a shift; the module receives t / 1000.
    late=_find_quantile(0.85, 1.0) / 1000,
    upper=round(_find_quantile(0.65, 1.0)),
)
_CHROMA = FaultTargets(
    family="chroma",
    variant="chroma",
    data=_IMAGES,
    samples="images",
    sections={"lora": {"targets": ("to_q", "to_k", "to_v", "to_out.0")}},
    attention="transformer_blocks.1.attn",
    modulation="distilled_guidance_layer.out_proj",
    time_proj="time_text_embed.time_proj",
    batched=False,
    has_buffers=True,
)
_COGVIDEOX = FaultTargets(family="cogvideox", variant="cogvideox-5b", data=_CLIPS)
_ERNIE_IMAGE = FaultTargets(
    family="ernie_image",
    variant="ernie-image",
    data=_IMAGES,
    samples="images",
    attention="layers.1.self_attention",
    ff="layers.0.mlp",
    ff_out="layers.0.mlp.linear_fc2",
    modulation="adaLN_modulation.1",
    final_proj="final_linear",
    # The scheduler's shift is 4, as ERNIE-Image's.
    late=_find_quantile(0.85, 4.0),
    upper=round(_find_quantile(0.65, 4.0)),
)
_FLUX = FaultTargets(
    family="flux",
    variant="flux-dev",
    data=_IMAGES,
    samples="images",
    # The timestep module also embeds the guidance; 500 (0.5 * 1000) is below `late`.
    sections={
        "lora": {"targets": ("to_q", "to_k", "to_v", "to_out.0")},
        "train": {"guidance_scale": 0.5},
    },
    attention="transformer_blocks.1.attn",
    time_proj="time_text_embed.time_proj",
)
# At the pipeline's shift, a third of the timesteps would lie above `late`.
_FLUX2_TRAIN: Mapping[str, Any] = {"timesteps": {"shift": 1.0}}
_FLUX2 = FaultTargets(
    family="flux2",
    variant="flux2-klein",
    data=_IMAGES,
    samples="images",
    sections={"train": _FLUX2_TRAIN},
    attention="transformer_blocks.1.attn",
    ff_out="transformer_blocks.0.ff.linear_out",
    modulation="double_stream_modulation_txt.linear",
    time_proj="time_guidance_embed.time_proj",
    posterior=False,
)
_HUNYUAN_VIDEO15 = FaultTargets(
    family="hunyuan_video15",
    variant="hunyuan-video-1.5",
    data=_CLIPS,
    sections={"lora": {"targets": ("to_q", "to_k", "to_v", "to_out.0")}},
    attention="transformer_blocks.1.attn",
    ff="transformer_blocks.0.ff",
    ff_out="transformer_blocks.0.ff.net.2",
    modulation="transformer_blocks.1.norm1.linear",
    time_proj="time_embed.time_proj",
    late=_find_quantile(0.85, 3.0),  # the shift of training
    upper=round(_find_quantile(0.65, 3.0)),
)
_KANDINSKY5 = FaultTargets(
    family="kandinsky5",
    variant="kandinsky-5-t2v",
    data=_CLIPS,
    sections={
        "lora": {
            "targets": ("to_query", "to_key", "to_value", "self_attention.out_layer", "cross_attention.out_layer")
        }
    },
    attention="visual_transformer_blocks.1.self_attention",
    key="to_key",
    out_proj="out_layer",
    ff="visual_transformer_blocks.0.feed_forward",
    ff_out="visual_transformer_blocks.0.feed_forward.out_layer",
    modulation="visual_transformer_blocks.1.visual_modulation.out_layer",
    final_proj="out_layer.out_layer",
    time_proj="time_embeddings",
    late=_find_quantile(0.85, 5.0),  # the published shift
    upper=round(_find_quantile(0.65, 5.0)),
    batched=False,
    has_buffers=True,
)
_QWEN_IMAGE = FaultTargets(
    family="qwen_image",
    variant="qwen-image",
    data=_IMAGES,
    samples="images",
    attention="transformer_blocks.1.attn",
    ff="transformer_blocks.0.img_mlp",
    ff_out="transformer_blocks.0.img_mlp.net.2",
    modulation="transformer_blocks.1.img_mod.1",
    time_proj="time_text_embed.time_proj",
    # The pipeline's shift for these 16 tokens is 1.6.
    late=0.84,  # the module receives t / 1000
    upper=780,
)
_QWEN_IMAGE21 = replace(
    _QWEN_IMAGE,
    family="qwen_image21",
    variant="qwen-image-2.1",
    ff_out="transformer_blocks.0.img_mlp.out",
    modulation="modulation.1",
    batched=False,
    has_buffers=True,
)
_QWEN_IMAGE_EDIT = replace(
    _QWEN_IMAGE,
    variant="qwen-image-edit",
    data={**_IMAGES, "mask_column": "masks"},
    samples="pairs",
)
_LTX_VIDEO = FaultTargets(
    family="ltx_video",
    variant="ltx-video",
    data=_LARGE_CLIPS,
    modulation="time_embed.linear",
    time_proj="time_embed.emb.time_proj",
    late=853,  # the shift is small for so few tokens
    upper=750,
)
_LTX2 = FaultTargets(
    family="ltx2",
    variant="ltx-2",
    data={**_LARGE_CLIPS, "sound": False},
    modulation="time_embed.linear",
    time_proj="time_embed.emb.time_proj",
    posterior=False,
)
_SANA = FaultTargets(
    family="sana",
    variant="sana-600m",
    data=_IMAGES,
    samples="images",
    ff_out="transformer_blocks.0.ff.conv_point",
    modulation="time_embed.linear",
    time_proj="time_embed.emb.time_proj",
    posterior=False,
)
_SD3 = FaultTargets(
    family="sd3",
    variant="sd3.5-medium",
    data=_IMAGES,
    samples="images",
    attention="transformer_blocks.1.attn",
    time_proj="time_text_embed.time_proj",
)
_VIDEO_DIT = FaultTargets(
    family="video_dit",
    variant="video-dit-class",
    data=_CLIPS,
    samples="class_clips",
    attention="transformer_blocks.1.attn",
    modulation="transformer_blocks.1.adaln.linear",
    text=None,
    class_table="class_embed.weight",
)
_WAN = FaultTargets(
    family="wan",
    variant="wan-2.1-t2v",
    data=_CLIPS,
    attention="blocks.1.attn1",
    ff="blocks.0.ffn",
    ff_out="blocks.0.ffn.net.2",
    modulation="condition_embedder.time_proj",
    time_proj="condition_embedder.timesteps_proj",
    has_buffers=True,
)
_Z_IMAGE = FaultTargets(
    family="z_image",
    variant="z-image",
    data=_IMAGES,
    samples="images",
    attention="layers.1.attention",
    ff="layers.0.feed_forward",
    ff_out="layers.0.feed_forward.w2",
    modulation="layers.1.adaLN_modulation.0",
    final_proj="all_final_layer.2-1.linear",
    time_proj="t_embedder",
    # The network's time runs backwards: `t_embedder` receives 1000 - t, whose shift is the reciprocal.
    late=_find_quantile(0.85, 1 / TRAINING_SHIFT),
    upper=round(_find_quantile(0.65, TRAINING_SHIFT)),
)


def _chat_targets(family: str, variant: str, vision: str, language: str, **changes: Any) -> FaultTargets:
    """Targets of a chat model: `vision` is a layer of the vision encoder, `language` the language model."""
    defaults: dict[str, Any] = {
        "samples": "conversations",
        "sections": {"chat": {"max_tokens": 448, "length_step": 64, "shuffle_turns": False}},
        "attention": f"{language}.layers.1.self_attn",
        "key": "k_proj",
        "out_proj": "o_proj",
        "ff": f"{vision}.mlp",
        "ff_out": f"{vision}.mlp.fc2",
        "modulation": None,
        "final_proj": f"{language}.norm",
        "time_proj": None,
        "text": None,
        "posterior": False,
        "has_buffers": True,
    }
    return FaultTargets(family=family, variant=variant, **{**defaults, **changes})


def _chat_experts(vision: str, projection: str, language: str) -> dict[str, str]:
    return {
        "vision": vision,
        "projection": projection,
        "attention": f"{language}.layers.0.self_attn.o_proj",
        "mlp": f"{language}.layers.0.mlp.down_proj",
        "head": "lm_head",
    }


def _videochat2_targets(variant: str, **changes: Any) -> FaultTargets:
    vision, language = "model.vision_encoder.encoder.blocks.1", "model.language_model"
    defaults: dict[str, Any] = {
        "data": {"frames": 4, "height": 32, "width": 32},
        "groups": {"adapter": {"lr": 1e-3}, "connector": {"lr": 1e-4}},
        "experts": {
            **_chat_experts(f"{vision}.attn.proj", "model.projection", language),
            "qformer": "model.qformer.encoder.layer.0.crossattention.self.value",
        },
        "vision_attention": f"{vision}.attn",
        "queries": "model.extra_query_tokens",
    }
    return _chat_targets("videochat2", variant, vision, language, **{**defaults, **changes})


def _transformers_chat_targets(
    variant: str, size: int, vision: str, output_layer: str, projection: str, expert: str | None = None
) -> FaultTargets:
    """Targets of one of Transformers' chat models.

    Args:
        variant: The tiny variant.
        size: Height and width of frames, in pixels.
        vision: A layer of the vision encoder.
        output_layer: The last linear layer in `vision`.
        projection: The projection from the vision encoder to the language model.
        expert: The layer in `vision` for faults of the vision encoder; `output_layer` if None. Where a class token
            comes first and is dropped at the end, this must be a layer whose output reaches every token.
    """
    language = "model.text_model" if variant == "smolvlm2" else "model.language_model"
    return _chat_targets(
        "chat",
        variant,
        vision,
        language,
        data={"frames": 4, "height": size, "width": size},
        ff_out=f"{vision}.{output_layer}",
        experts=_chat_experts(f"{vision}.{expert or output_layer}", projection, language),
    )


_TARGETS = (
    _ANIMA,
    _CHROMA,
    replace(_COGVIDEOX, variant="cogvideox-2b", has_buffers=True),
    _COGVIDEOX,
    replace(_COGVIDEOX, variant="cogvideox-5b-i2v", data=_LARGE_CLIPS, has_buffers=True),
    replace(_COGVIDEOX, variant="cogvideox-1.5"),
    replace(_COGVIDEOX, variant="cogvideox-1.5-i2v"),
    FaultTargets(
        family="dit",
        variant="dit-tiny",
        data={"height": 32, "width": 32},
        samples="classes",
        final_proj="proj_out_2",
        time_proj="transformer_blocks.1.norm1.emb.time_proj",
        text=None,
        has_buffers=True,
        class_table="transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight",
    ),
    _ERNIE_IMAGE,
    _FLUX,
    replace(_FLUX, variant="flux-schnell", sections={**_FLUX.sections, "train": {}}),
    replace(
        _FLUX,
        variant="flux-kontext",
        data={**_IMAGES, "reference_resolution": 64, "mask_column": "masks"},
        samples="pairs",
    ),
    _FLUX2,
    # The timestep module also embeds the guidance; 500 (0.5 * 1000) is below `late`.
    replace(_FLUX2, variant="flux2-dev", sections={"train": {**_FLUX2_TRAIN, "guidance_scale": 0.5}}),
    FaultTargets(
        family="ideogram4",
        variant="ideogram-4",
        data=_IMAGES,
        samples="images",
        sections={"lora": {"targets": ("to_q", "to_k", "to_v", "to_out.0")}},
        attention="layers.1.attention",
        ff="layers.0.feed_forward",
        ff_out="layers.0.feed_forward.w2",
        modulation="layers.1.adaln_modulation",
        final_proj="final_layer.linear",
        time_proj="t_embedding",
        # The pipeline's shift is half the logarithm of the pixels over 512 x 512, e^mu = 1/8 here. The module receives
        # 1 - t / 1000, whose shift is the reciprocal.
        late=_find_quantile(0.85, 8.0, 1.5) / 1000,
        upper=round(_find_quantile(0.65, 1 / 8, 1.5)),
        posterior=False,
    ),
    FaultTargets(
        family="krea2",
        variant="krea2-raw",
        data=_IMAGES,
        samples="images",
        attention="transformer_blocks.1.attn",
        ff_out="transformer_blocks.0.ff.down",
        modulation="time_mod_proj",
        final_proj="final_layer.linear",
        time_proj="time_embed",
        late=0.83,  # the module receives t / 1000
        upper=700,
    ),
    _HUNYUAN_VIDEO15,
    _KANDINSKY5,
    _QWEN_IMAGE,
    _QWEN_IMAGE_EDIT,
    replace(_QWEN_IMAGE_EDIT, variant="qwen-image-edit-plus"),
    _QWEN_IMAGE21,
    _LTX_VIDEO,
    replace(_LTX_VIDEO, variant="ltx-video-0.9.1"),
    _LTX2,
    replace(_LTX2, variant="ltx-2.3", data={**_LARGE_CLIPS, "sound": True}),
    replace(_LTX2, variant="ltx-2.5"),
    _SANA,
    replace(_SANA, variant="sana-1.5"),
    replace(_SANA, variant="sana-fp16"),
    FaultTargets(
        family="sana_video",
        variant="sana-video",
        data={"frames": 9, "height": 32, "width": 64, "fps": 8},
        ff_out="transformer_blocks.0.ff.conv_temp",
        modulation="time_embed.linear",
        time_proj="time_embed.emb.time_proj",
        has_buffers=True,
    ),
    _SD3,
    replace(_SD3, variant="sd3.5-large"),
    _VIDEO_DIT,
    replace(
        _VIDEO_DIT,
        variant="video-dit-text",
        samples="clips",
        text="pooled_projections",
        class_table=None,
    ),
    FaultTargets(
        family="latte",
        variant="latte",
        data={"frames": 4, "height": 32, "width": 32, "fps": 8},
        attention="transformer_blocks.0.attn1",
        modulation="adaln_single.linear",
        time_proj="adaln_single.emb.time_proj",
        has_buffers=True,
    ),
    _WAN,
    replace(_WAN, variant="wan-2.1-i2v"),
    replace(_WAN, variant="wan-2.1-flf2v", late=980, upper=950),
    replace(_WAN, variant="wan-2.2-t2v-a14b", model={"part": "transformer"}, late=954, upper=925),
    replace(_WAN, variant="wan-2.2-i2v-a14b", model={"part": "transformer_2"}, late=853),
    replace(_WAN, variant="wan-2.2-ti2v-5b", data=_LARGE_CLIPS, late=937),
    _Z_IMAGE,
    replace(_Z_IMAGE, variant="z-image-turbo"),
    _videochat2_targets("videochat2-mistral"),
    _videochat2_targets("videochat2-vicuna"),
    _videochat2_targets("videochat2-phi3", key="o_proj"),
    _videochat2_targets(
        "videochat2-hd",
        sections={"chat": {"max_tokens": 448, "length_step": 64, "shuffle_turns": False, "tiles": 2}},
    ),
    _transformers_chat_targets(
        "llava-next-video",
        56,
        "model.vision_tower.encoder.layers.0",
        "mlp.fc2",
        "model.multi_modal_projector.linear_2",
        "self_attn.v_proj",
    ),
    _transformers_chat_targets(
        "qwen2.5-vl", 56, "model.visual.blocks.1", "mlp.down_proj", "model.visual.merger.mlp.2"
    ),
    _transformers_chat_targets(
        "qwen3-vl", 64, "model.visual.blocks.1", "mlp.linear_fc2", "model.visual.merger.linear_fc2"
    ),
    _transformers_chat_targets(
        "smolvlm2",
        32,
        "model.vision_model.encoder.layers.1",
        "mlp.fc2",
        "model.connector.modality_projection.proj",
    ),
    _transformers_chat_targets(
        "internvl",
        56,
        "model.vision_tower.encoder.layer.1",
        "mlp.fc2",
        "model.multi_modal_projector.linear_2",
        "attention.v_proj",
    ),
)


def _load_other_targets() -> Iterator[FaultTargets]:
    """Fault targets of other packages' families: `FAULT_TARGETS` of `<family>_faults`, if the path has this module."""
    for family in DIFFUSION_FAMILIES:
        if importlib.util.find_spec(f"{family}_faults"):
            yield from importlib.import_module(f"{family}_faults").FAULT_TARGETS


FAULT_TARGETS = {targets.variant: targets for targets in (*_TARGETS, *_load_other_targets())}
"""By tiny variant."""
DEFAULT = "cogvideox-5b"

# By kind of adapter, as PEFT names them: a layer's first parameter, and the parameter that starts at zero.
_FACTORS: Mapping[AdapterKind, tuple[str, str]] = {
    "lora": ("lora_A.default.weight", "lora_B.default.weight"),
    "dora": ("lora_A.default.weight", "lora_B.default.weight"),
    "lokr": ("lokr_w2.default", "lokr_w1.default"),
    "loha": ("hada_w1_a.default", "hada_w2_b.default"),
    "oft": ("oft_R.default.weight", "oft_R.default.weight"),
}


def targets_for(variant: str, kind: str = "lora") -> FaultTargets:
    """Look up a tiny variant and set the kind of adapter. Raises `DitLoraError` for an unknown name."""
    if variant not in FAULT_TARGETS:
        raise DitLoraError(f"no tiny checkpoint {variant!r} has faults; there are: {', '.join(FAULT_TARGETS)}")
    adapter_kind = next((name for name in ADAPTER_KINDS if name == kind), None)
    if adapter_kind is None:
        raise DitLoraError(f"no adapter is of kind {kind!r}; there are: {', '.join(ADAPTER_KINDS)}")
    return replace(FAULT_TARGETS[variant], kind=adapter_kind, factors=_FACTORS[adapter_kind])
