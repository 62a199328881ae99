"""Complete pipelines with random weights, small enough for tests and demos on a CPU.

The tokenizer's vocabulary is fixed and weights come from one generator, so one seed gives the same bytes
everywhere. (A trained tokenizer would not: its vocabulary differs from process to process.)
"""

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from transformers import T5Config, T5EncoderModel, T5Tokenizer

_TEXT_WIDTH = 32
_LATENT_CHANNELS = 4


def build_cogvideox(out: Path, *, seed: int, rotary: bool) -> None:
    """A CogVideoX 2B-like pipeline (sincos), or 5B-like with `rotary`, native at 9x64x96."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = t5_tokenizer()
        pipeline: Any = CogVideoXPipeline(
            tokenizer=tokenizer,
            text_encoder=t5_encoder(len(tokenizer)),
            vae=_cogvideox_vae(scaling_factor=0.7 if rotary else 1.15258426),
            transformer=CogVideoXTransformer3DModel(
                num_attention_heads=4,
                attention_head_dim=16,
                in_channels=_LATENT_CHANNELS,
                out_channels=_LATENT_CHANNELS,
                time_embed_dim=32,
                text_embed_dim=_TEXT_WIDTH,
                num_layers=2,
                sample_width=12,
                sample_height=8,
                sample_frames=9,
                use_rotary_positional_embeddings=rotary,
            ),
            scheduler=_cogvideox_scheduler(rotary),
        )
        pipeline.save_pretrained(out, safe_serialization=True)


def t5_tokenizer() -> T5Tokenizer:
    """Every printable ASCII character on its own and at a word's start; nothing is trained."""
    characters = [c for c in string.printable if not c.isspace()]
    special = ["<pad>", "</s>", "<unk>"]
    pieces = ["▁", *characters, *(f"▁{c}" for c in characters)]
    vocab = [(token, 0.0) for token in special] + [(piece, -2.0) for piece in pieces]
    return T5Tokenizer(vocab=vocab, extra_ids=0)


def t5_encoder(vocab_size: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocab_size,
        d_model=_TEXT_WIDTH,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config).eval()


def _cogvideox_vae(scaling_factor: float) -> AutoencoderKLCogVideoX:
    vae: Any = AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=_LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=4,
        temporal_compression_ratio=4,
        sample_height=64,
        sample_width=96,
        scaling_factor=scaling_factor,
    )
    vae.eval()
    # A trained VAE's posterior is narrow and its latents have unit variance after scaling; a random one's
    # is as wide as its latents, which would leave nothing to learn.
    head = vae.encoder.conv_out.conv
    with torch.no_grad():
        head.weight[:_LATENT_CHANNELS] *= 2.5 / scaling_factor
        head.weight[_LATENT_CHANNELS:] *= 0.1
        head.bias[_LATENT_CHANNELS:] = -6.0
    return vae


def _cogvideox_scheduler(rotary: bool) -> CogVideoXDDIMScheduler | CogVideoXDPMScheduler:
    # The published checkpoints' values: snr_shift_scale is 3.0 in 2B and 1.0 in 5B.
    kind = CogVideoXDPMScheduler if rotary else CogVideoXDDIMScheduler
    return kind(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0 if rotary else 3.0,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
    )
