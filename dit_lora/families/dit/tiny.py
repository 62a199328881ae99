"""A complete random DiT pipeline, small enough for tests and demos on a CPU."""

import json
from pathlib import Path
from typing import Any

from diffusers import DiTPipeline, DiTTransformer2DModel

from dit_lora.families.tiny.vae import build_sd_vae
from dit_lora.files import read_json
from dit_lora.models.video_dit_base import build_iddpm_scheduler

# A few of ImageNet's classes, at their indices; the others are named by number.
_CLASS_NAMES = {1: "goldfish, Carassius auratus", 281: "tabby, tabby cat", 285: "Egyptian cat"}


def build_tiny_checkpoint(_variant: str, folder: Path, num_classes: int = 1000) -> None:
    """Write a tiny pipeline like DiT-XL for 32x32 pixels, with a learned variance and a name for every class."""
    transformer = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=num_classes,
    )
    pipeline: Any = DiTPipeline(transformer=transformer, vae=build_sd_vae(), scheduler=build_iddpm_scheduler())
    pipeline.save_pretrained(folder, safe_serialization=True)
    # save_pretrained does not save the names that were passed to the pipeline.
    index = read_json(folder / "model_index.json")
    index["id2label"] = {str(row): _CLASS_NAMES.get(row, f"class {row}") for row in range(num_classes)}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
