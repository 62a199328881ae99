"""Samples videos and images with a trained adapter in the stock pipeline."""

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dit_lora.adapters.diffusers_format import (
    ADAPTER_FILE,
    BASE_FILE,
    PROVENANCE_FILE,
    load_adapter,
    read_provenance,
)
from dit_lora.config.recipe import ModelConfig
from dit_lora.data.media.video import write_sample
from dit_lora.environment.hub_files import result_folder
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampler, Sampling, VideoShape
from dit_lora.numerics.precision import choose_precision
from dit_lora.parsing import read_json
from dit_lora.results.origin import base_of, family_of, find_adapter, whole_pipeline
from dit_lora.training.session.session import quiet_libraries


@dataclass(frozen=True)
class SampleRequest:
    """A request to sample; values left None are those that the adapter was trained with."""

    target: Path
    """A run's folder, an adapter's folder or its file, or a repository on the Hub that a run was pushed to."""
    prompts: tuple[str, ...]
    model: str | None = None
    seed: int = 0
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    fps: float | None = None
    inference_steps: int = 50
    guidance_scale: float = 6.0
    image: Path | None = None
    """The first frame, for image-to-video."""
    out: Path | None = None


def sample(request: SampleRequest) -> list[Path]:
    """Write one mp4 (of an image model: png) a prompt, each from the same seed, and return their paths."""
    quiet_libraries()
    request = _from_hub(request)
    whole = whole_pipeline(request.target)
    adapter = None if whole else find_adapter(request.target)
    made = read_provenance(adapter) if adapter else _provenance(whole)
    model = _base_model(request, made, whole, adapter)
    family = get_family(made.get("family") or family_of(model))
    # What was trained may add classes.
    sampler: Sampler = family.open(model, index=made.get("index") if adapter else None)
    video = made.get("video", {})
    shape = VideoShape(
        *(_value(name, getattr(request, name), video) for name in ("frames", "height", "width"))
    )
    sampler.check_shape(shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = sampler.pipeline(choose_precision("auto", device).dtype)
    if adapter:
        load_adapter(pipeline, adapter)
    pipeline.to(device)
    how = Sampling(
        shape, request.inference_steps, request.guidance_scale, request.seed, request.image
    )
    out = request.out or (adapter.parent if adapter else request.target) / "samples"
    paths = []
    if out.exists() and not out.is_dir():
        raise DitLoraError(f"--out {out} is a file; give a folder")
    for prompt in request.prompts:
        frames = sampler.generate(pipeline, sampler.conditions(prompt), how)
        fps = _value("fps", request.fps, video) if len(frames) > 1 else None
        paths.append(write_sample(out / _file_name(prompt, how), frames, fps))
    return paths


def _from_hub(request: SampleRequest) -> SampleRequest:
    """Return the request with a local folder for a repository; samples then go to samples/NAME, not the Hub's cache."""
    folder = result_folder(request.target, (ADAPTER_FILE, BASE_FILE, "model_index.json"))
    if folder == request.target:
        return request
    if (folder / "model_index.json").is_file():
        result_folder(
            request.target, ("*.json", "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt")
        )
    out = request.out or Path("samples") / request.target.name
    return replace(request, target=folder, out=out)


def _file_name(prompt: str, how: Sampling) -> str:
    """Return seed and prompt as one can read them, and a digest that tells apart what they do not."""
    words = re.sub(r"[^a-z0-9]+", "-", prompt.lower())[:40].strip("-")
    digest = hashlib.sha256(f"{prompt} {how}".encode()).hexdigest()[:6]
    return f"seed_{how.seed}_{words}_{digest}"


def _provenance(whole: Path | None) -> dict[str, Any]:
    file = (whole or Path()) / PROVENANCE_FILE
    return read_json(file) if file.is_file() else {}


def _base_model(
    request: SampleRequest, made: dict[str, Any], whole: Path | None, adapter: Path | None
) -> ModelConfig:
    """Return the whole pipeline's own config, or the adapter's base."""
    if adapter is not None:
        return base_of(request.target, adapter, made, request.model)
    if request.model:
        raise DitLoraError(f"--model does not apply: {whole} is a whole model, not an adapter")
    return ModelConfig(family=made.get("family", ""), path=str(whole))


def _value(name: str, asked: Any, trained: dict[str, Any]) -> Any:
    value = asked if asked is not None else trained.get(name)
    if value is None:
        raise DitLoraError(f"the adapter does not say its {name}; give --{name}")
    return value
