"""Samples videos and images with a trained adapter in the stock pipeline."""

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.adapters.layer_names import LayerNames
from dit_lora.adapters.load import PEFT_FILES, load_adapter
from dit_lora.adapters.strength import scale_adapters, set_adapter_weights
from dit_lora.data.media.sound import find_sound_fault
from dit_lora.data.media.video import write_sample
from dit_lora.environment.hub_files import resolve_result_folder
from dit_lora.environment.pipeline_index import INDEX_FILES, find_index_file
from dit_lora.environment.progress_bar import ProgressBar, hide_progress_bars
from dit_lora.errors import DitLoraError, make_write_error
from dit_lora.families import get_family
from dit_lora.families.base import Sampler, Sampling, VideoShape
from dit_lora.numerics.precision import choose_precision
from dit_lora.terminal import echo
from dit_lora.verify.expert_pair import EXPERT_FILE_PATTERNS, find_expert_results
from dit_lora.verify.locate import TrainedResultLocation, find_result_source


@dataclass(frozen=True)
class SampleRequest:
    """Request for samples: adapters, prompts and settings.

    Values that are None are taken from the adapter's training.
    """

    target: Path
    """A run's folder, an adapter's folder or file, or a repository on the Hub that a run was pushed to."""
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
    """The last frame, for models that take one."""
    references: tuple[Path, ...] = ()
    """Reference images, for models that take some; the same for every prompt."""
    output_folder: Path | None = None
    count: int = 1
    """Samples per prompt, with seeds `seed`, `seed` + 1, ..."""
    strengths: tuple[float, ...] = ()
    """LoRA scales relative to training, each sampled with the same seeds. Empty: as trained."""
    other_adapters: tuple[tuple[Path, float], ...] = ()
    """Further adapters, each with its weight."""
    weight: float = 1.0
    """Weight of the target's adapter when it is combined with `other_adapters`."""


@dataclass(frozen=True)
class WrittenSample:
    """One sample that was written to a file, with its settings."""

    prompt: str
    seed: int
    strength: float | None
    """None if the request has no strengths."""
    path: Path


@dataclass(frozen=True)
class WrittenSamples:
    """All samples of a request, and its settings as text by name."""

    cells: list[WrittenSample]
    settings: Mapping[str, str]


def write_samples(request: SampleRequest) -> list[Path]:
    """Write a video or image for each prompt, seed and strength, and return the files."""
    return [cell.path for cell in write_sample_cells(request).cells]


def write_sample_cells(request: SampleRequest) -> WrittenSamples:
    """Write an mp4 (png for image models) for each prompt, seed and strength, in this order.

    Each sample is bit-identical to the one that a request with only its prompt, seed and strength gives.

    Raises:
        DitLoraError: The request is not possible. Raised before anything is sampled.
    """
    hide_progress_bars()
    options = {"--image": [request.image], "--last-image": [request.last_image], "--reference": request.references}
    missing = [
        f"{option} {file}"
        for option, files in options.items()
        for file in files
        if file is not None and not file.is_file()
    ]
    if missing:
        raise DitLoraError(f"no such file: {', '.join(missing)}")
    # From here on the target is local.
    request = _download_hub_target(request)
    # With a two-expert checkpoint, one or both experts were trained.
    sources = [find_result_source(target) for target in find_expert_results(request.target)]
    source = sources[0]
    model = source.resolve_base(request.model)
    # Training may have added classes to the model's index.
    index = None if source.is_pipeline else source.metadata.get("index")
    family = get_family(model.family)
    sampler: Sampler = family.open(model, index=index).copy_with_training_metadata(source.metadata).sampler
    video = source.metadata.get("video", {})
    shape = VideoShape(
        *(_get_sampling_setting(name, getattr(request, name), video) for name in ("frames", "height", "width"))
    )
    # Before the pipeline is loaded.
    sampler.info.check_shape(shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = sampler.pipeline(choose_precision("auto", device).dtype)
    # Its bar over denoising steps would leave carriage returns in a pipe or a file.
    pipeline.set_progress_bar_config(disable=not sys.stderr.isatty())
    _load_adapters(request, pipeline, sources, family.comfyui)
    # After the adapters: they move with the models that they are attached to.
    sampler.move_to_device(pipeline, device)
    fps = None if shape.frames == 1 else _get_sampling_setting("fps", request.fps, video)
    sampling = Sampling(
        shape,
        request.inference_steps,
        request.guidance_scale,
        request.seed,
        request.image,
        request.last_image,
        request.references,
        fps,
    )
    # Samples of two experts together go beside both adapters.
    folder = source.file.parent if len(sources) == 1 else request.target
    folder = request.target if source.is_pipeline else folder
    output_folder = request.output_folder or folder / "samples"
    # Now, and not after the first sample.
    try:
        output_folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise DitLoraError(f"--out {output_folder} is a file; give a folder") from error
    except OSError as error:
        raise make_write_error(error) from error
    cells = list(_iterate_samples(request, sampler, pipeline, sampling, output_folder))
    return WrittenSamples(cells, _describe_settings(request, source, model.path))


def _describe_settings(request: SampleRequest, source: TrainedResultLocation, model: str) -> dict[str, str]:
    # A checkpoint's or an export's folder has the step in its name; a run's result is of its last step.
    match = re.fullmatch(r"step_(\d+)", source.file.parent.name)
    step = int(match[1]) if match else source.metadata.get("steps")
    last_seed = request.seed + request.count - 1
    settings = {
        "Model": model,
        "Trained for": f"{step:,} steps" if isinstance(step, int) else "",
        "Denoising steps": f"{request.inference_steps:,}",
        "Guidance": f"{request.guidance_scale:g}",
        "Seed": str(request.seed) if request.count == 1 else f"{request.seed} to {last_seed}",
    }
    return {name: text for name, text in settings.items() if text}


def _iterate_samples(
    request: SampleRequest, sampler: Sampler, pipeline: Any, sampling: Sampling, output_folder: Path
) -> Iterator[WrittenSample]:
    """Sample every prompt, seed and strength; yield each after it is written."""
    seeds = range(request.seed, request.seed + request.count)
    cells = [(p, s, w) for p in request.prompts for s in seeds for w in request.strengths or (None,)]
    bar = ProgressBar(cells, desc="samples", unit="sample", leave=False, disable=len(cells) == 1)
    for prompt, seed, strength in bar:
        # Every sample starts from its own seed, so it does not depend on the others.
        settings = replace(sampling, seed=seed)
        conditions = sampler.prompt_kwargs(prompt)
        with scale_adapters(pipeline, 1.0 if strength is None else strength):
            frames, sound = sampler.generate_with_sound(pipeline, conditions, settings)
        problem = find_sound_fault(sound)
        if problem:
            echo(f"wrote {prompt!r} without sound: {problem}", err=True)
            # The file is written without it.
            sound = None
        # Readable, with only characters that are safe in file names of every system.
        slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower())[:40].strip("-")
        # Unique for these settings.
        digest = hashlib.sha256(f"{prompt} {settings}".encode()).hexdigest()[:6]
        name = f"seed_{seed}_{slug}_{digest}"
        name += "" if strength is None else f"_strength_{strength:g}"
        yield WrittenSample(prompt, seed, strength, write_sample(output_folder / name, frames, settings.fps, sound))


def _load_adapters(
    request: SampleRequest, pipeline: Any, sources: Sequence[TrainedResultLocation], comfyui: LayerNames
) -> None:
    """Load the target's adapters and the others.

    Raises:
        DitLoraError: Strengths or weights for a full model or for trained base weights, which cannot be scaled.
    """
    option = "--strengths" if request.strengths else "--adapter" if request.other_adapters else ""
    pipelines = [source.file for source in sources if source.is_pipeline]
    if pipelines and option:
        raise DitLoraError(f"{option} needs an adapter, and {pipelines[0]} is a whole model")
    other_sources = [find_result_source(path) for path, _ in request.other_adapters]
    trained = [source.file for source in (*sources, *other_sources) if source.file.with_name(BASE_FILE).is_file()]
    if trained and option:
        raise DitLoraError(
            f"{option} cannot be used: {trained[0]} also has trained base weights ({BASE_FILE}), which have "
            "no strength"
        )
    # A single adapter gets the loader's default name.
    names = [f"adapter_{number}" for number in range(1 + len(other_sources))] if other_sources else [None]
    for source in sources:
        if not source.is_pipeline:
            load_adapter(pipeline, source.file, comfyui, name=names[0])
    for name, source in zip(names[1:], other_sources, strict=True):
        load_adapter(pipeline, source.file, comfyui, name=name)
    if other_sources:
        weights = [request.weight, *(weight for _, weight in request.other_adapters)]
        # With several adapters, all of them must be activated explicitly.
        set_adapter_weights(pipeline, [name for name in names if name], weights)


def _download_hub_target(request: SampleRequest) -> SampleRequest:
    """Download a Hub repository and return the request with its local folder. Samples then go to samples/NAME."""
    files = (ADAPTER_FILE, BASE_FILE, *INDEX_FILES, *EXPERT_FILE_PATTERNS, *PEFT_FILES)
    folder = resolve_result_folder(request.target, files)
    if folder == request.target:
        return request
    # A full pipeline needs the files of all its components, which the first download left out.
    if find_index_file(folder):
        resolve_result_folder(request.target, ("*.json", "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt"))
    output_folder = request.output_folder or Path("samples") / request.target.name
    return replace(request, target=folder, output_folder=output_folder)


def _get_sampling_setting(name: str, requested: Any, metadata: Mapping[str, Any]) -> Any:
    """A requested setting for samples, or the one from training if it is None.

    Raises `DitLoraError` if there is neither.
    """
    value = requested if requested is not None else metadata.get(name)
    if value is None:
        raise DitLoraError(f"the adapter's header has no {name}; give --{name}")
    return value
