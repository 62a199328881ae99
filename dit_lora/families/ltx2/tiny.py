"""Tiny random LTX-2 pipelines: 2.0, 2.3 with gates, modulated text and unprojected captions, and 2.5 with Gemma 4."""

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    GemmaTokenizer,
)

LATENT_CHANNELS = 8
_TEXT_WIDTH, _TEXT_LAYERS = 16, 2
_MEL_BINS, _AUDIO_CHANNELS = 16, 4
# A sound token holds all channels of a column with a quarter of the mel bins. This is also the audio VAE's base width.
AUDIO_WIDTH = _AUDIO_CHANNELS * _MEL_BINS // 4
# Widths of the transformer's two streams.
_WIDTH, _AUDIO_INNER = 32, 16
# Options of 2.3 that exist for both modalities.
_NEW_CONFIG = {"gated_attn": True, "cross_attn_mod": True}
# The options for 2.3 in Diffusers' scripts/convert_ltx2_to_diffusers.py.
_LTX_2_3 = {
    **_NEW_CONFIG,
    **{f"audio_{name}": value for name, value in _NEW_CONFIG.items()},
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "ltx-2": {"caption_channels": _TEXT_WIDTH},
    "ltx-2.3": _LTX_2_3,
    "ltx-2.5": {**_LTX_2_3, "ff_bias": False, "use_keyframes_abs_pos_embedding": True},
}
"""Changes of each variant to the transformer's config."""


def build_tiny_checkpoint(variant: str, folder: Path) -> None:
    """Write a tiny LTX-2 pipeline with weights from torch's default generator."""
    is_new, tokenizer = variant != "ltx-2", _build_tokenizer()
    build_text_encoder = _build_gemma4 if variant == "ltx-2.5" else _build_gemma
    pipeline: Any = LTX2Pipeline(
        tokenizer=tokenizer,
        text_encoder=build_text_encoder(tokenizer),
        connectors=_build_connectors(is_new),
        transformer=_build_transformer(VARIANTS[variant]),
        vae=_build_vae(),
        audio_vae=_build_audio_vae(),
        vocoder=_build_vocoder(is_new),
        # The options of the published scheduler (scheduler/scheduler_config.json of LTX-2.3's Diffusers files).
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=0.1,
            use_dynamic_shifting=True,
        ),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def _build_tokenizer() -> GemmaTokenizer:
    """Build a tokenizer of the printable ASCII characters. Nothing is trained."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    characters = [c for c in string.printable if not c.isspace()]
    # "▁" stands for a space.
    vocab = {piece: index for index, piece in enumerate([*special, "▁", *characters])}
    return GemmaTokenizer(vocab=vocab, merges=[], model_max_length=2048)


def _build_text_config(tokenizer: GemmaTokenizer) -> dict[str, Any]:
    """Options that the language models of Gemma 3 and Gemma 4 share."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": _TEXT_WIDTH,
        "intermediate_size": 24,
        "num_hidden_layers": _TEXT_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "initializer_range": 0.2,
        "sliding_window": 64,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _build_gemma(tokenizer: GemmaTokenizer) -> Gemma3ForConditionalGeneration:
    config = Gemma3Config(
        text_config={
            **_build_text_config(tokenizer),
            "model_type": "gemma3_text",
        },
        # Gemma 3 is multimodal, so the config must describe a vision encoder, which captions never use.
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        # The vocabulary has no image tokens, and captions contain none.
        boi_token_index=len(tokenizer),
        eoi_token_index=len(tokenizer) + 1,
        image_token_index=len(tokenizer) + 2,
    )
    return Gemma3ForConditionalGeneration(config).eval()


def _build_gemma4(tokenizer: GemmaTokenizer) -> Gemma4UnifiedForConditionalGeneration:
    """Build LTX-2.5's text encoder, without the embedders of pictures and sound, which captions never use.

    Its last layer attends to all tokens with one shared projection for keys and values, like the published ones.
    """
    config = Gemma4UnifiedConfig(
        text_config={
            **_build_text_config(tokenizer),
            "model_type": "gemma4_unified_text",
            "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
    )
    return Gemma4UnifiedForConditionalGeneration(config).eval()


def _build_connectors(is_new: bool) -> LTX2TextConnectors:
    """Build tiny text connectors, in which registers replace padding, as in the published ones.

    LTX-2.3's and LTX-2.5's have gates and one width per modality.
    """
    connectors: Any = LTX2TextConnectors(
        caption_channels=_TEXT_WIDTH,
        # The embedding's output counts as a layer.
        text_proj_in_factor=_TEXT_LAYERS + 1,
        video_connector_num_attention_heads=2,
        # In 2.0 the connectors keep the text's width, and the transformer projects it.
        video_connector_attention_head_dim=(_WIDTH if is_new else _TEXT_WIDTH) // 2,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=128,
        video_gated_attn=is_new,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=_TEXT_WIDTH // 2,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=128,
        audio_gated_attn=is_new,
        rope_type="split",
        per_modality_projections=is_new,
        video_hidden_dim=_WIDTH,
        audio_hidden_dim=_AUDIO_INNER,
        proj_bias=is_new,
    )
    return connectors.eval()


def _build_transformer(changes: dict[str, Any]) -> LTX2VideoTransformer3DModel:
    """Build a tiny LTX-2 transformer.

    Heads have 16 and 8 elements, not a multiple of 6, so the first rotation angles are 0.
    """
    return LTX2VideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=_WIDTH // 2,
        cross_attention_dim=_WIDTH,
        audio_in_channels=AUDIO_WIDTH,
        audio_out_channels=AUDIO_WIDTH,
        audio_num_attention_heads=2,
        audio_attention_head_dim=_AUDIO_INNER // 2,
        audio_cross_attention_dim=_AUDIO_INNER,
        num_layers=2,
        rope_type="split",
        **changes,
    )


def _build_vae() -> AutoencoderKLLTX2Video:
    """Build a tiny video VAE.

    It downscales time and sides by 8, and sides by 4 more, like the published VAE, at its smallest width.
    """
    vae: Any = AutoencoderKLLTX2Video(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_causal=False,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    # A trained VAE's statistics are not zeros and ones.
    with torch.no_grad():
        vae.latents_mean.normal_(std=0.3)
        vae.latents_std.uniform_(0.5, 2.0)
    return vae.eval()


def _build_audio_vae() -> AutoencoderKLLTX2Audio:
    vae: Any = AutoencoderKLLTX2Audio(
        base_channels=AUDIO_WIDTH,
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        latent_channels=_AUDIO_CHANNELS,
        mel_bins=_MEL_BINS,
    )
    # A trained VAE's statistics are not zeros and ones.
    with torch.no_grad():
        vae.latents_mean.normal_(std=0.3)
        vae.latents_std.uniform_(0.5, 2.0)
    return vae.eval()


def _build_vocoder(is_new: bool) -> LTX2Vocoder | LTX2VocoderWithBWE:
    common: dict[str, Any] = {
        "in_channels": 2 * _MEL_BINS,
        "hidden_channels": 32,
        "resnet_kernel_sizes": [3],
        "resnet_dilations": [[1]],
    }
    # 2.0 upsamples by 240 in two steps; 2.3 by 160, then extends the bandwidth.
    if not is_new:
        return LTX2Vocoder(**common, upsample_kernel_sizes=[15, 16], upsample_factors=[15, 16]).eval()
    common |= {f"bwe_{name}": value for name, value in common.items()}
    return LTX2VocoderWithBWE(
        **common,
        upsample_kernel_sizes=[11, 32],
        upsample_factors=[5, 32],
        bwe_upsample_kernel_sizes=[15, 16],
        bwe_upsample_factors=[15, 16],
        num_mel_channels=_MEL_BINS,
    ).eval()
