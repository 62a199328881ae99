"""Wan's LoRA files in ComfyUI's names: stock Diffusers, which reads them too, finds every layer by them."""

from pathlib import Path

import pytest
import torch
from exported import assert_same, deltas, trained
from safetensors.torch import load_file, save_file

from dit_lora.export.export import ExportRequest, export

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "add_v_proj")
BLOCKS = (*ATTENTION, "ffn.net.0.proj", "ffn.net.2")
OUTSIDE = ("linear_1", "linear_2", "time_proj", "ff.net.0.proj", "ff.net.2", "proj_out")


@pytest.mark.parametrize("alpha", [7, 4])
def test_stock_diffusers_reads_what_comfyui_does(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, alpha: int
) -> None:
    """With the factor of alpha in the blocks; of the layers around them, Diffusers takes no alpha."""
    targets = BLOCKS if alpha == 7 else (*BLOCKS, *OUTSIDE)
    adapter = trained("wan", tiny_checkpoints["wan-2.1-i2v"], tmp_path / "run", alpha=alpha, targets=targets)
    output_dir = export(ExportRequest((adapter.folder,), "comfyui", tmp_path / "out", model=str(adapter.base)))
    (file,) = output_dir.glob("*.safetensors")
    tensors = load_file(file)
    if alpha == 4:  # the rank
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".alpha")}
    assert all(name.startswith("diffusion_model.") for name in tensors)
    assert any("img_emb.proj.1" in name for name in tensors) == (alpha == 4)
    save_file(tensors, tmp_path / "bare.safetensors")  # no header that would say more
    pipeline = adapter.checkpoint.sampler.pipeline(torch.float32, text=False)
    pipeline.load_lora_weights(tmp_path, weight_name="bare.safetensors")
    expected = deltas(adapter.model)
    assert len(expected) == 2 * (8 + 2 + 2) + (8 if alpha == 4 else 0)
    assert_same(deltas(pipeline.transformer), expected)
