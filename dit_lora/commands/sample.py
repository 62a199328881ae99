"""Samples videos and images with a trained adapter in the stock pipeline."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.adapters.layer_names import LayerNames
from dit_lora.adapters.load import PEFT_FILES, load_adapter
from dit_lora.adapters.strength import at_strength, weigh
from dit_lora.data.media.sound import unplayable
from dit_lora.data.media.video import write_sample
from dit_lora.environment.hub_files import result_folder
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.base import Sampler, Sampling, VideoShape
from dit_lora.numerics.precision import choose_precision
from dit_lora.results.experts import PAIR_PATTERNS, targets_of
from dit_lora.results.source import Source, find_source
from dit_lora.terminal import echo
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
    last_image: Path | None = None
    """The last frame, where the model is given that too."""
    references: tuple[Path, ...] = ()
    """The references, for models that take some; the same for every prompt."""
    out: Path | None = None
    count: int = 1
    """Samples of each prompt, from `seed` and the seeds after it."""
    strengths: tuple[float, ...] = ()
    """Strengths of the adapters, each sampled from the same seeds; as trained where there are none."""
    others: tuple[tuple[Path, float], ...] = ()
    """Further adapters, each with its weight."""
    weight: float = 1.0
    """The weight of the target's own beside others."""


@dataclass(frozen=True)
class SampleCell:
    """One sample that was written, and what it was made with."""

    prompt: str
    seed: int
    strength: float | None
    """None where the request names no strengths."""
    path: Path


def sample(request: SampleRequest) -> list[Path]:
    """Write the samples of `sample_cells`, and return their files."""
    return [cell.path for cell in sample_cells(request)]


def sample_cells(request: SampleRequest) -> list[SampleCell]:
    """Write an mp4 (of an image model: png) for each prompt, seed and strength, in this order, and return them.

    Each is what its prompt, seed and strength alone would give, bit for bit. Raises `DitLoraError` for what cannot be
    sampled so, before anything is.
    """
    quiet_libraries()
    _require_files(request)
    request = _from_hub(request)
    # Of a checkpoint with two experts, one or both were trained.
    sources = [find_source(target) for target in targets_of(request.target)]
    source = sources[0]
    model = source.base(request.model)
    # What was trained may add classes.
    index = None if source.is_pipeline else source.made.get("index")
    family = get_family(model.family)
    sampler: Sampler = family.open(model, index=index).with_header(source.made)
    video = source.made.get("video", {})
    shape = VideoShape(
        *(_value(name, getattr(request, name), video) for name in ("frames", "height", "width"))
    )
    sampler.check_shape(shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = sampler.pipeline(choose_precision("auto", device).dtype)
    _load(request, pipeline, sources, family.comfyui)
    sampler.place(pipeline, device)
    fps = None if shape.frames == 1 else _value("fps", request.fps, video)
    how = Sampling(
        shape,
        request.inference_steps,
        request.guidance_scale,
        request.seed,
        request.image,
        request.last_image,
        request.references,
        fps,
    )
    folder = source.file.parent if len(sources) == 1 else request.target
    folder = request.target if source.is_pipeline else folder
    out = request.out or folder / "samples"
    if out.exists() and not out.is_dir():
        raise DitLoraError(f"--out {out} is a file; give a folder")
    return list(_cells(request, sampler, pipeline, how, out))


def _cells(
    request: SampleRequest, sampler: Sampler, pipeline: Any, how: Sampling, out: Path
) -> Iterator[SampleCell]:
    """Sample every cell, and yield each once it is written."""
    seeds = range(request.seed, request.seed + request.count)
    cells = [
        (p, s, w) for p in request.prompts for s in seeds for w in request.strengths or (None,)
    ]
    bar = tqdm(cells, desc="samples", unit="sample", leave=False, disable=len(cells) == 1)
    for prompt, seed, strength in bar:
        own = replace(how, seed=seed)
        conditions = sampler.conditions(prompt)
        with at_strength(pipeline, 1.0 if strength is None else strength):
            frames, sound = sampler.generate_with_sound(pipeline, conditions, own)
        wrong = unplayable(sound)
        if wrong:
            echo(f"{prompt!r} is written without sound: {wrong}", err=True)
            sound = None
        name = _file_name(prompt, own)
        name += "" if strength is None else f"_strength_{strength:g}"
        yield SampleCell(prompt, seed, strength, write_sample(out / name, frames, own.fps, sound))


def _load(
    request: SampleRequest, pipeline: Any, sources: Sequence[Source], comfyui: LayerNames
) -> None:
    """Load the target's adapters and the others; raises `DitLoraError` for strengths and weights of what has none."""
    asked = "--strengths" if request.strengths else "--adapter" if request.others else ""
    whole = [one.file for one in sources if one.is_pipeline]
    if whole and asked:
        raise DitLoraError(f"{asked}: {whole[0]} is a whole model, with no adapter apart from it")
    others = [find_source(path) for path, _ in request.others]
    trained = [one.file for one in (*sources, *others) if one.file.with_name(BASE_FILE).is_file()]
    if trained and asked:
        raise DitLoraError(
            f"{asked}: base weights trained beside {trained[0]} ({BASE_FILE}), which are there or not at any strength"
        )
    # With one adapter the loader names it, as ever.
    names = [f"adapter_{number}" for number in range(1 + len(others))] if others else [None]
    for one in sources:
        if not one.is_pipeline:
            load_adapter(pipeline, one.file, comfyui, name=names[0])
    for name, one in zip(names[1:], others, strict=True):
        load_adapter(pipeline, one.file, comfyui, name=name)
    if others:
        weights = [request.weight, *(weight for _, weight in request.others)]
        weigh(pipeline, [name for name in names if name], weights)


def _require_files(request: SampleRequest) -> None:
    given = {
        "--image": [request.image],
        "--last-image": [request.last_image],
        "--reference": request.references,
    }
    missing = [
        f"{option} {file}"
        for option, files in given.items()
        for file in files
        if file is not None and not file.is_file()
    ]
    if missing:
        raise DitLoraError(f"no such file: {', '.join(missing)}")


def _from_hub(request: SampleRequest) -> SampleRequest:
    """Return the request with a local folder for a repository; samples then go to samples/NAME, not the Hub's cache."""
    files = (ADAPTER_FILE, BASE_FILE, "model_index.json", *PAIR_PATTERNS, *PEFT_FILES)
    folder = result_folder(request.target, files)
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


def _value(name: str, asked: Any, trained: Mapping[str, Any]) -> Any:
    value = asked if asked is not None else trained.get(name)
    if value is None:
        raise DitLoraError(f"the adapter does not say its {name}; give --{name}")
    return value
