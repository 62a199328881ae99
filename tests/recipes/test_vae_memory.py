"""`data.vae_tiling` and `data.vae_slicing` in a run, and which models are in memory beside which."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import AutoencoderKLCogVideoX, DiffusionPipeline
from transformers import T5EncoderModel

from dit_lora.data.cache.cache import TensorCache
from dit_lora.families.cogvideox.text_to_video import CogVideoXDenoiser, CogVideoXEncoders, CogVideoXSampler

Main = Callable[[list[str]], None]


def encoders() -> list[Any]:
    """All that are in memory, collected or not."""
    return [instance for instance in gc.get_objects() if type(instance) in (AutoencoderKLCogVideoX, T5EncoderModel)]


def alive(known: list[Any]) -> list[str]:
    """Encoders in memory, but for those that other tests hold."""
    instances = [instance for instance in encoders() if all(instance is not known_encoder for known_encoder in known)]
    return sorted(type(instance).__name__ for instance in instances)


@pytest.mark.usefixtures("nothing_encoded")
def test_encoders_go_before_the_transformer_comes_and_the_vae_alone_comes_back(
    lora_main: Main, smoke: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    existing_encoders = encoders()  # held, so that none of a later one's has its place in memory
    loaded_encoders: dict[str, list[str]] = {}
    settings: list[tuple[bool, bool]] = []
    load, generate = CogVideoXDenoiser.load_transformer, CogVideoXSampler.generate
    load_vae = CogVideoXEncoders.load_video_encoder

    def loading(self: Any, dtype: Any) -> Any:
        loaded_encoders["training"] = alive(existing_encoders)
        return load(self, dtype)

    def generating(self: Any, pipeline: Any, *args: Any) -> Any:
        if isinstance(pipeline, DiffusionPipeline):  # and not what notes its arguments
            loaded_encoders["sampling"] = alive(existing_encoders)
            settings.append((pipeline.vae.use_tiling, pipeline.vae.use_slicing))
        return generate(self, pipeline, *args)

    def encoding(self: Any, *args: Any, **given: Any) -> Any:
        loaded_encoders["encoding"] = alive(existing_encoders)
        return load_vae(self, *args, **given)

    monkeypatch.setattr(CogVideoXDenoiser, "load_transformer", loading)
    monkeypatch.setattr(CogVideoXSampler, "generate", generating)
    monkeypatch.setattr(CogVideoXEncoders, "load_video_encoder", encoding)
    args = [*smoke, "train.steps=1", "validation.prompts=[a]", "validation.inference_steps=2"]
    lora_main([*args, f"run.dir={tmp_path / 'plain'}"])
    assert loaded_encoders == {
        "encoding": [],
        "training": [],
        "sampling": ["AutoencoderKLCogVideoX"],
    }
    assert alive(existing_encoders) == []
    videos = TensorCache(tmp_path / "cache" / "videos")
    entries = len(list(videos.iter_entries()))
    both = ["data.vae_tiling=true", "data.vae_slicing=true"]
    lora_main([*args, *both, f"run.dir={tmp_path / 'tiled'}"])
    assert len(list(videos.iter_entries())) == 2 * entries
    assert settings == 2 * [(False, False)] + 2 * [(True, True)]
