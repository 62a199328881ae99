"""Tiny Sana and SanaVideo pipelines with random weights; see `tiny` for what they promise."""

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKLWan,
    DPMSolverMultistepScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
)
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

_TEXT_WIDTH = 32
_LATENT_CHANNELS = 4


def build_sana(out: Path, *, seed: int, qk_norm: bool = False, half: bool = False) -> None:
    """A Sana-like pipeline, 1.5-like with `qk_norm`, its transformer stored in fp16 with `half`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = gemma_tokenizer()
        transformer: Any = SanaTransformer2DModel(
            in_channels=_LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
            num_attention_heads=4,
            attention_head_dim=8,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=_TEXT_WIDTH,
            mlp_ratio=2.5,
            sample_size=32,
            qk_norm="rms_norm_across_heads" if qk_norm else None,
        )
        pipeline: Any = SanaPipeline(
            tokenizer=tokenizer,
            text_encoder=gemma_encoder(len(tokenizer)),
            vae=_autoencoder(),
            transformer=transformer.half() if half else transformer,
            scheduler=_scheduler(flow_shift=3.0),
        )
        pipeline.save_pretrained(out, safe_serialization=True)


def build_sana_video(out: Path, *, seed: int) -> None:
    """A SANA-Video-like pipeline with Wan's autoencoder, whose latents have a mean and a deviation each."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = gemma_tokenizer()
        pipeline: Any = SanaVideoPipeline(
            tokenizer=tokenizer,
            text_encoder=gemma_encoder(len(tokenizer)),
            vae=_wan_vae(),
            transformer=SanaVideoTransformer3DModel(
                in_channels=_LATENT_CHANNELS,
                out_channels=_LATENT_CHANNELS,
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=2,
                num_cross_attention_heads=2,
                cross_attention_head_dim=16,
                cross_attention_dim=32,
                caption_channels=_TEXT_WIDTH,
                sample_size=30,
                rope_max_seq_len=64,
            ),
            scheduler=_scheduler(flow_shift=8.0),
        )
        pipeline.save_pretrained(out, safe_serialization=True)


def gemma_tokenizer() -> GemmaTokenizer:
    """Every printable ASCII character, the space and the new line; nothing is trained."""
    characters = [c for c in string.printable if not c.isspace()]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces = [*special, "\n", "▁", *characters]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return GemmaTokenizer(vocab=vocab, merges=[], add_bos_token=True)


def gemma_encoder(vocab_size: int) -> Gemma2Model:
    config = Gemma2Config(
        vocab_size=vocab_size,
        hidden_size=_TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    return Gemma2Model(config).eval()


def _autoencoder() -> AutoencoderDC:
    """Four halvings where DC-AE has five, with its two kinds of block."""
    blocks = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock", "EfficientViTBlock")
    channels, layers = (8, 8, 16, 16, 16), (1, 1, 1, 1, 1)
    scales: Any = ((), (), (), (5,), (5,))
    vae: Any = AutoencoderDC(
        latent_channels=_LATENT_CHANNELS,
        attention_head_dim=8,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        encoder_layers_per_block=layers,
        decoder_layers_per_block=layers,
        encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales,
        upsample_block_type="interpolate",
        downsample_block_type="Conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,  # of mit-han-lab/dc-ae-f32c32-sana-1.1-diffusers
    )
    return vae.eval()


def _wan_vae() -> AutoencoderKLWan:
    vae: Any = AutoencoderKLWan(
        base_dim=4,
        z_dim=_LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.2, 0.3, 0.1, -0.4],
        latents_std=[0.8, 1.3, 0.6, 1.1],
    )
    # A trained VAE's posterior is narrow and its latents are as wide as `latents_std` says.
    head = vae.quant_conv
    with torch.no_grad():
        head.weight[:_LATENT_CHANNELS] *= 5
        head.weight[_LATENT_CHANNELS:] *= 0.1
        head.bias[_LATENT_CHANNELS:] = -6.0
    return vae.eval()


def _scheduler(flow_shift: float) -> DPMSolverMultistepScheduler:
    # As the published checkpoints were converted (diffusers: scripts/convert_sana_to_diffusers.py).
    return DPMSolverMultistepScheduler(
        flow_shift=flow_shift, use_flow_sigmas=True, prediction_type="flow_prediction"
    )
