"""Writes facts.json: details of a run's data and pipeline that the model card needs and only the run knows.

It holds counts and lengths, but no file names, and of captions only the words that all of them begin with.
"""

import inspect
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ModularPipeline
from PIL import Image

from dit_lora.config.data import VideoShape
from dit_lora.data.media.video import write_sample
from dit_lora.data.media.video_header import VideoHeader
from dit_lora.data.sources.clips import Clip
from dit_lora.data.sources.held_out import scan_recipe
from dit_lora.data.sources.hf_datasets import get_dataset_hub_name
from dit_lora.families import CHAT_FAMILIES
from dit_lora.families.base import Sampling
from dit_lora.files import write_atomically
from dit_lora.numerics.dtensors import get_original_class
from dit_lora.training.session.session import raise_errors_on_all_ranks
from dit_lora.training.task import Setup
from dit_lora.training.tasks.diffusion.samples import read_headers

FACTS_FILE = "facts.json"
# Words that captions begin with whatever their subject: not a trigger.
_COMMON_WORDS = (
    "a an the this that there is are it its in on of at to with from and for by video clip image photo picture shot "
    "scene footage one two we i you he she they his her my our"
)


def write_facts(setup: Setup[Any, Any]) -> None:
    """Write RUN/facts.json on the main process; a `DitLoraError` there is raised on all ranks. Collective."""
    with raise_errors_on_all_ranks(setup.accelerator):
        if setup.session.is_main:
            text = json.dumps(_collect_facts(setup), indent=2, ensure_ascii=False)
            write_atomically(setup.session.dir / FACTS_FILE, text + "\n")


def find_common_prefix(captions: Sequence[str]) -> str | None:
    """The words that all captions begin with, if they include a meaningful one.

    None for fewer than two captions, or if they share only words such as `a video of a`.
    """
    split_captions = [caption.split() for caption in captions]
    if len(split_captions) < 2:
        return None
    shared = []
    for column in zip(*split_captions, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    # A trigger is a word that only these captions have: trailing words such as "a" and "of" are not part of it.
    while shared and shared[-1].strip(".,:;!?\"'()[]").lower() in _COMMON_WORDS.split():
        shared.pop()
    return " ".join(shared) or None


def _collect_facts(setup: Setup[Any, Any]) -> dict[str, Any]:
    recipe, data = setup.recipe, setup.recipe.data
    # Only names on the Hub; local paths are private.
    hub_names = {name for source in data.all_sources if (name := get_dataset_hub_name(source)) is not None}
    common = {"datasets": sorted(hub_names), "left_out": len(setup.data.rejected)}
    if recipe.model.family in CHAT_FAMILIES:
        model, entries = get_original_class(setup.transformer), setup.data.training_set.entries
        library = model.__module__.partition(".")[0]
        conversations = {
            "kind": "conversations",
            "samples": len(entries),
            "by_media": dict(Counter(entry.conversation.kind for entry in entries).most_common()),
            "seconds": _summarize_durations([entry.header for entry in entries]),
            "answer_tokens": _summarize([entry.answers for entry in entries]),
        }
        return {
            "model": {"class": model.__name__, "module": model.__module__, "library": library},
            "data": {**conversations, **common},
        }
    # A clip that is cut into windows counts once.
    scanned = scan_recipe(recipe).clips
    clips = [clip for clip in scanned if not clip.is_held_out and clip.id not in setup.data.rejected]
    return {"pipeline": _describe_pipeline(setup, clips), "data": {**_describe_clips(setup, clips), **common}}


def _describe_clips(setup: Setup[Any, Any], clips: Sequence[Clip]) -> dict[str, Any]:
    recipe = setup.recipe
    entries = setup.data.training_set.entries
    default_shape = VideoShape.from_data(recipe.data)
    shapes = Counter(str(entry.shape or default_shape) for entry in entries)
    captions = [clip.caption for clip in clips]
    headers = read_headers([clip.media for clip in clips], recipe, quiet=True)
    by_class = "class_labels" in setup.checkpoint.sampler.prompt_kwargs(clips[0].caption)
    facts: dict[str, Any] = {
        "kind": "images" if recipe.data.max_frames == 1 else "clips",
        "clips": len(clips),
        "samples": len(entries),
        "shapes": dict(shapes.most_common()),
        "seconds": _summarize_durations(headers),
        "references": _count_references(clips),
        "masked": sum(clip.mask is not None for clip in clips),
    }
    if by_class:
        return facts | {"classes": len(set(captions))}
    return facts | {
        "caption_words": _summarize([len(caption.split()) for caption in captions]),
        "distinct_captions": len(set(captions)),
        "caption_prefix": find_common_prefix(captions),
    }


def _count_references(clips: Sequence[Clip]) -> dict[str, int]:
    """Number of clips by number of references, most frequent first; empty if no clip has any."""
    counted = Counter(len(clip.references) for clip in clips)
    # The keys are numbers of references: `any` is true if one is not zero.
    return {str(number): count for number, count in counted.most_common()} if any(counted) else {}


def _summarize_durations(headers: Sequence[Any]) -> dict[str, float] | None:
    # Pictures and unreadable files have no duration.
    durations = [
        header.seconds
        for header in headers
        if isinstance(header, VideoHeader) and not header.is_image and header.seconds
    ]
    return _summarize([round(seconds, 2) for seconds in durations]) if durations else None


def _summarize(values: Sequence[float]) -> dict[str, float]:
    return {
        "least": min(values),
        "median": statistics.median(values),
        "most": max(values),
        "sum": round(sum(values), 2),
    }


def _describe_pipeline(setup: Setup[Any, Any], clips: Sequence[Clip]) -> dict[str, Any]:
    """The pipeline's class, and the arguments that validation passes to it, for the most common kind of clip."""
    checkpoint, recipe, cls = setup.checkpoint, setup.recipe, setup.checkpoint.info.pipeline_class
    # Any clip will do: only the kinds of arguments are read.
    prompt_kwargs = dict(checkpoint.sampler.prompt_kwargs(clips[0].caption))
    references = int(next(iter(_count_references(clips)), 0))
    called, output = _record_call(setup, prompt_kwargs, references)
    is_own_class = cls.__module__.startswith("dit_lora.")
    labels = prompt_kwargs.get("class_labels")
    return {
        "class": cls.__name__,
        "module": cls.__module__ if is_own_class else "diffusers",
        "loads_lora": hasattr(cls, "load_lora_weights"),
        "is_modular": issubclass(cls, ModularPipeline),
        "has_guider": "guider" in inspect.signature(cls.__init__).parameters,
        "condition": "class_labels" if labels is not None else "prompt",
        "label": None if labels is None else [int(row) for row in labels],
        "labels_as_tensor": hasattr(labels, "tolist"),
        "from_image": "image" in checkpoint.info.image_argument_names,
        "to_image": "last_image" in called,
        "references": references,
        "reference_clips": bool(checkpoint.info.reference_spec and checkpoint.info.reference_spec.is_clip),
        "reference_resolution": recipe.data.reference_resolution,
        "arguments": {
            name: value
            for name, value in called.items()
            # These two may be None, which is not their default.
            if isinstance(value, bool | int | float) or name in ("negative_prompt", "guidance_schedule")
        },
        "output": output,
        "seed": recipe.validation.seed,
        "fps": recipe.data.fps,
        "dtype": str(setup.dtype),
        "in_fp32": list(checkpoint.sampler.fp32_components),
    }


class _PipelineRecorder:
    """A stand-in for a pipeline: records its arguments and returns one black picture."""

    def __init__(self) -> None:
        self.call_kwargs: dict[str, Any] = {}
        self.output_name = ""

    def __call__(self, **arguments: Any) -> "_PipelineRecorder":
        self.call_kwargs = arguments
        return self

    @property
    def frames(self) -> np.ndarray:
        self.output_name = "frames"
        return np.zeros((1, 1, 8, 8, 3), dtype=np.float32)

    @property
    def images(self) -> np.ndarray:
        self.output_name = "images"
        return np.zeros((1, 8, 8, 3), dtype=np.float32)


def _record_call(setup: Setup[Any, Any], prompt_kwargs: dict[str, Any], references: int) -> tuple[dict[str, Any], str]:
    """The arguments that validation would pass to the pipeline, and the name of the output it would read."""
    checkpoint, settings, recorder = setup.checkpoint, setup.recipe.validation, _PipelineRecorder()
    shape = VideoShape.from_data(setup.recipe.data)
    # An image-to-video family opens its first frame, so create one.
    with tempfile.TemporaryDirectory() as folder:
        pictures = {name: Path(folder) / f"{name}.png" for name in checkpoint.info.image_argument_names}
        for file in pictures.values():
            Image.new("RGB", (shape.width, shape.height)).save(file)
        supported = checkpoint.info.reference_spec
        frames = shape.frames if supported and supported.is_clip else 1
        # (frames, H, W, 3)
        black = torch.zeros(frames, shape.height, shape.width, 3, dtype=torch.uint8)
        fps = setup.recipe.data.fps
        files = [write_sample(Path(folder) / f"reference_{k}", black, fps) for k in range(references)]
        inputs: dict[str, Any] = {**pictures, "references": tuple(files), "fps": fps}
        sampling = Sampling(shape, settings.inference_steps, settings.guidance_scale, settings.seed, **inputs)
        checkpoint.sampler.generate(recorder, prompt_kwargs, sampling)
    return recorder.call_kwargs, recorder.output_name
