"""The base's checkpoint: a CogVideoX pipeline for the words of the world, and its copy in fp16."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
from transformers import T5Config, T5EncoderModel, T5Tokenizer

from benchmarks.world.vae import LATENT_CHANNELS
from dit_lora.data.synthetic.scenes import BACKGROUNDS, COLOURS, MOTIONS, SHAPES

TEXT_WIDTH = 64
# The longest caption has 12 words and the end.
TEXT_TOKENS = 16


def write_untrained(folder: Path, vae: AutoencoderKLCogVideoX, seed: int = 0) -> None:
    """Write a pipeline whose VAE is trained. The text encoder stays random; it only has to tell words apart."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    pipeline: Any = CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=T5EncoderModel(
            T5Config(
                vocab_size=len(tokenizer),
                d_model=TEXT_WIDTH,
                d_kv=16,
                d_ff=128,
                num_layers=1,
                num_heads=4,
                feed_forward_proj="gated-gelu",
            )
        ).eval(),
        vae=vae,
        transformer=CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            time_embed_dim=128,
            text_embed_dim=TEXT_WIDTH,
            max_text_seq_length=TEXT_TOKENS,
            num_layers=6,
            patch_size=4,
            sample_width=32,
            sample_height=32,
            sample_frames=9,
            temporal_compression_ratio=2,
            use_rotary_positional_embeddings=True,
        ),
        scheduler=CogVideoXDDIMScheduler(
            beta_schedule="scaled_linear",
            beta_start=0.00085,
            beta_end=0.012,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            snr_shift_scale=3.0,
            timestep_spacing="trailing",
            clip_sample=False,
            set_alpha_to_one=True,
        ),
    )
    pipeline.save_pretrained(folder, safe_serialization=True)


def build_tokenizer() -> T5Tokenizer:
    """Build a tokenizer that has each word of the captions, and single characters for all others."""
    phrases = [*SHAPES, *COLOURS, *MOTIONS, *BACKGROUNDS, "a over background"]
    vocabulary = dict.fromkeys(word for phrase in phrases for word in phrase.split())
    characters = [c for c in string.printable if not c.isspace()]
    pieces = {"▁": -8.0}
    pieces |= dict.fromkeys((*characters, *(f"▁{c}" for c in characters)), -8.0)
    # Log probabilities: a word is likelier than its characters.
    pieces |= {f"▁{word}": -2.0 for word in vocabulary}
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces.items()]
    return T5Tokenizer(vocab=vocab, extra_ids=0)


def write_fp16(source: Path, folder: Path) -> None:
    """Write a pipeline's weights in fp16, which is how it is shipped, without the path that it was loaded from."""
    CogVideoXPipeline.from_pretrained(source, torch_dtype=torch.float16, local_files_only=True).save_pretrained(folder)
    for path in folder.rglob("*.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
