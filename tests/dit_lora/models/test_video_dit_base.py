"""A base folder put together from local parts: what opens, what trains, what OpenDiT's weights become."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

from dit_lora.config import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.tiny_dit import tiny_vae
from dit_lora.families.tiny_video_dit import clip_encoder, clip_tokenizer
from dit_lora.models.video_dit_base import write_base

CONFIG = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_frames": 2}


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, str]:
    """A VAE, and CLIP with its tokenizer, each in a folder as the Hub has them."""
    vae: Any = tiny_vae()
    vae.save_pretrained(tmp_path / "vae")
    tokenizer = clip_tokenizer()
    tokenizer.save_pretrained(tmp_path / "clip")
    clip_encoder(tokenizer).save_pretrained(tmp_path / "clip")
    return {"vae": str(tmp_path / "vae"), "text_encoder": str(tmp_path / "clip")}


def opened(path: Path, **model: Any) -> Any:
    return get_family("video_dit").open(ModelConfig(family="video_dit", path=str(path), **model))


def test_a_base_without_weights_opens_from_scratch_alone(
    parts: dict[str, str], tmp_path: Path
) -> None:
    path = write_base(tmp_path / "base", config=CONFIG, **parts)
    with pytest.raises(DitLoraError, match=r"transformer: no \.safetensors file"):
        opened(path)
    checkpoint = opened(path, from_scratch={"num_layers": 2})
    model = checkpoint.load_transformer(torch.float32)
    assert len(model.transformer_blocks) == 2
    assert model.config.text_dim == 16
    pipeline = checkpoint.pipeline(torch.float32, model)
    assert pipeline("a horse", num_frames=3, height=16, width=32, num_inference_steps=1).frames.shape == (
        1, 3, 16, 32, 3,
    )  # fmt: skip
    loaded: Any = AutoencoderKL.from_pretrained(path, subfolder="vae")
    assert loaded.config.scaling_factor == 0.18215
    with pytest.raises(DitLoraError, match="exists; choose another folder"):
        write_base(path, **parts)


def test_a_base_of_classes_takes_as_many_as_the_data_has(
    parts: dict[str, str], tmp_path: Path
) -> None:
    path = write_base(tmp_path / "base", config=CONFIG, **{**parts, "text_encoder": None})
    assert not (path / "text_encoder").exists()
    assert opened(path, from_scratch={"num_classes": 7}).classes.count == 7


def test_opendits_weights_make_a_whole_pipeline(parts: dict[str, str], tmp_path: Path) -> None:
    """The tensors of the file are the state dict's, in its dtype."""
    width = 16
    linear = {
        "t_embedder.mlp.0": (width, 256),
        "t_embedder.mlp.2": (width, width),
        "y_embedder.output_projection": (width, 16),
        "blocks.0.attn.qkv": (3 * width, width),
        "blocks.0.attn.proj": (width, width),
        "blocks.0.mlp.fc1": (4 * width, width),
        "blocks.0.mlp.fc2": (width, 4 * width),
        "blocks.0.adaLN_modulation.1": (6 * width, width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
        "final_layer.linear": (32, width),
    }
    generator = torch.Generator().manual_seed(0)
    state = {"x_embedder.proj.weight": (width, 4, 1, 2, 2), "x_embedder.proj.bias": (width,)}
    for name, shape in linear.items():
        state |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    drawn = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in state.items()
    }
    save_file(drawn, tmp_path / "opendit.safetensors")
    path = write_base(
        tmp_path / "base",
        config=CONFIG,
        state_dict=load_file(tmp_path / "opendit.safetensors"),
        **parts,
    )
    (file,) = (path / "transformer").glob("*.safetensors")
    kept = load_file(file)
    assert torch.equal(
        kept["transformer_blocks.0.attn.to_k.weight"], drawn["blocks.0.attn.qkv.weight"][16:32]
    )
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    assert sum(t.numel() for t in kept.values()) == sum(t.numel() for t in drawn.values())
    pipeline = opened(path).pipeline(torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline("a horse", num_frames=2, height=16, width=32, num_inference_steps=2).frames
    assert frames.shape == (1, 2, 16, 32, 3)
