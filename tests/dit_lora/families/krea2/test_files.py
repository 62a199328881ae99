"""Krea 2's LoRA files in the published model's names: what ComfyUI and stock Diffusers find by them."""

import re
from pathlib import Path

import pytest
import torch
from exported import assert_same, deltas, trained
from safetensors.torch import load_file, save_file

from dit_lora.export.export import ExportRequest, export
from dit_lora.families import get_family

# Krea's names (diffusers: loaders/single_file_utils.py, convert_krea2_transformer_checkpoint_to_diffusers).
_PARTS = "wq|wk|wv|wo|gate"
PUBLISHED = re.compile(
    rf"(blocks\.\d+|txtfusion\.(layerwise|refiner)_blocks\.\d+)\.(attn\.({_PARTS})|mlp\.(gate|up|down))"
    r"|first|last\.linear|tmlp\.[02]|tproj\.1|txtmlp\.[13]|txtfusion\.projector"
)
EVERY = (
    *("to_q", "to_k", "to_v", "to_out.0", "to_gate", "ff.gate", "ff.up", "ff.down", "img_in"),
    *("final_layer.linear", "linear_1", "linear_2", "time_mod_proj", "text_fusion.projector"),
)


def test_stock_diffusers_reads_what_comfyui_does(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Every linear layer, with alpha's factor in B: both read no `.alpha`."""
    path = tiny_checkpoints["krea2-raw"]
    adapter = trained("krea2", path, tmp_path / "run", alpha=7, targets=EVERY)
    output_dir = export(ExportRequest((adapter.folder,), "comfyui", tmp_path / "out", model=str(adapter.base)))
    (file,) = output_dir.glob("*.safetensors")
    tensors = load_file(file)
    for name in tensors:
        match = re.fullmatch(r"diffusion_model\.(.+)\.lora_[AB]\.weight", name)
        assert match, name
        assert PUBLISHED.fullmatch(match[1]), name
    save_file(tensors, tmp_path / "bare.safetensors")  # no header that would say more
    pipeline = adapter.checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.load_lora_weights(tmp_path, weight_name="bare.safetensors")
    expected = deltas(adapter.model)
    assert len(expected) == 4 * 8 + 8
    assert_same(deltas(pipeline.transformer), expected)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("transformer_blocks.27.attn.to_out.0", "blocks.27.attn.wo"),
        ("transformer_blocks.3.ff.gate", "blocks.3.mlp.gate"),
        ("text_fusion.layerwise_blocks.1.attn.to_gate", "txtfusion.layerwise_blocks.1.attn.gate"),
        # Not by ComfyUI's map of Diffusers' names, which has two blocks of each kind.
        ("text_fusion.refiner_blocks.12.ff.up", "txtfusion.refiner_blocks.12.mlp.up"),
        ("time_embed.linear_2", "tmlp.2"),
        ("transformer_blocks.3.norm1", None),
        ("text_fusion.refiner_blocks.0.attn.norm_q", None),
    ],
)
def test_names_are_the_published_models(name: str, theirs: str | None) -> None:
    key = get_family("krea2").comfyui.translate_layer_name(name)
    assert key == (None if theirs is None else f"diffusion_model.{theirs}")
