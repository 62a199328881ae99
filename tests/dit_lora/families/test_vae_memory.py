"""Tiling and slicing of VAEs: what they save, what they change, and what their tiles do not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_steps import CPU, VARIANTS

from dit_lora.config.recipe import ModelConfig
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Tensors
from dit_lora.families.latents import PLAIN_VAE, VaeMemory
from dit_lora.families.opening import read_component_config
from dit_lora.training.execution.fake_step import AllocationTracker

TILED, SLICED = VaeMemory(tiling=True), VaeMemory(slicing=True)


@pytest.fixture
def in_tiles(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A CogVideoX whose VAE has tiles of 48x40, in steps of 40x32."""
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoints["cogvideox-5b"], path)
    config = read_component_config(path, "vae") | {"sample_height": 96, "sample_width": 80}
    (path / "vae" / "config.json").write_text(json.dumps(config))
    return path


def encoded(path: Path, family: str, pixels: torch.Tensor, memory: VaeMemory) -> tuple[Tensors, int]:
    """A clip's tensors, and the bytes that making them took."""
    checkpoint = get_family(family).open(ModelConfig(family=family, path=str(path)))
    encode = checkpoint.encoders.load_video_encoder(torch.float32, CPU, memory)
    with AllocationTracker([pixels]) as live:
        return encode(pixels), live.max_bytes


@pytest.mark.parametrize(
    ("variant", "frames", "height", "width"),
    [
        ("cogvideox-5b", 9, 64, 96),
        ("latte", 2, 64, 96),
        pytest.param("video-dit-class", 2, 64, 96, marks=pytest.mark.thorough),
        pytest.param("dit-tiny", 1, 64, 96, marks=pytest.mark.thorough),
        pytest.param("sana-600m", 1, 768, 768, marks=pytest.mark.thorough),
        pytest.param("sana-video", 5, 256, 384, marks=pytest.mark.thorough),
    ],
)
def test_tiles_take_less_memory_and_slices_change_no_bit(
    tiny_checkpoints: dict[str, Path],
    in_tiles: Path,
    variant: str,
    frames: int,
    height: int,
    width: int,
) -> None:
    path = in_tiles if variant == "cogvideox-5b" else tiny_checkpoints[variant]
    family = VARIANTS[variant].family
    draws = torch.Generator().manual_seed(3)
    pixels = torch.randint(0, 256, (frames, 3, height, width), generator=draws).to(torch.uint8)
    plain, plain_peak = encoded(path, family, pixels, PLAIN_VAE)
    tiled, tiled_peak = encoded(path, family, pixels, TILED)
    assert tiled_peak < 0.8 * plain_peak
    # In the corner that only the first tile covers, and whose surroundings are the same, nothing changes much.
    for name, latent in plain.items():
        assert tiled[name].shape == latent.shape
        assert not torch.equal(tiled[name], latent)
    sliced, _ = encoded(path, family, pixels, SLICED)
    assert all(torch.equal(sliced[name], latent) for name, latent in plain.items())


def test_only_tiling_is_a_fact_of_latents() -> None:
    assert PLAIN_VAE.cache_key() == SLICED.cache_key() == {}
    assert TILED.cache_key() == {"tiling": True}


def test_tiles_that_do_not_fit_are_refused_with_the_sizes(tiny_checkpoints: dict[str, Path], in_tiles: Path) -> None:
    """Of 32x48 in steps of 26x38 pixels, where a latent has 8: latents of other places, and one row more."""
    sizes = [(32, 48), (64, 96), (64, 80)]
    config = read_component_config(tiny_checkpoints["cogvideox-5b"], "vae")
    with pytest.raises(DitLoraError, match="tiles of AutoencoderKLCogVideoX") as error:
        TILED.require_tiling_support("tiny", config, sizes)
    assert str(error.value).splitlines()[1:] == ["  - 64x96", "  - 64x80"]
    SLICED.require_tiling_support("tiny", config, sizes)
    PLAIN_VAE.require_tiling_support("tiny", config, sizes)
    TILED.require_tiling_support("tiny", read_component_config(in_tiles, "vae"), sizes)


def test_a_vae_without_them_is_refused() -> None:
    config: dict[str, Any] = {"_class_name": "VQModel"}
    both = r"data.vae_tiling, data.vae_slicing: VQModel, the VAE of old, cannot"
    with pytest.raises(DitLoraError, match=both):
        VaeMemory(tiling=True, slicing=True).require_tiling_support("old", config, [(64, 64)])
    with pytest.raises(DitLoraError, match=r"^data.vae_slicing: VQModel"):
        SLICED.require_tiling_support("old", config, [(64, 64)])
