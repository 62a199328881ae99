"""Encode every clip and caption once, before the transformer is loaded.

The text encoder is loaded, used and freed; then the VAE. Ranks share the work; what is already cached is
kept, so an interrupted run goes on where it stopped. Memory holds one clip at a time.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from dit_lora.config import Recipe
from dit_lora.data.cache import CacheError, TensorCache, entry_key
from dit_lora.data.digest import Digests
from dit_lora.data.loader import CachedClips, Entry
from dit_lora.data.media import is_image
from dit_lora.data.sources import Clip, read_clips
from dit_lora.data.video import (
    DECODE_VERSION,
    ClipError,
    read_frames,
    read_header,
    too_short,
)
from dit_lora.errors import DitLoraError, listed
from dit_lora.families.base import Checkpoint, Tensors, TextEncoder, VideoEncoder
from dit_lora.training.runtime import Runtime, agree


@dataclass(frozen=True)
class Precomputed:
    """The encoded training set, the embeddings of validation prompts, and digests of what made them."""

    clips: CachedClips
    prompt_keys: tuple[str, ...]
    data_digest: str
    transformer_digest: str


@dataclass(frozen=True)
class _Job:
    """One entry to make."""

    sample: str
    key: str
    facts: Mapping[str, Any]
    make: Callable[[Any], Tensors]


def precompute(runtime: Runtime, checkpoint: Checkpoint) -> Precomputed:
    """Fill the caches for a recipe; all unusable clips are listed in one error, after the others are cached."""
    recipe, root = runtime.recipe, runtime.recipe.cache_dir
    videos, texts = TensorCache(root / "videos"), TensorCache(root / "texts")
    clips = read_clips(recipe.data, root)
    lost = [image for image in recipe.validation.images if not Path(image).is_file()]
    if lost:
        raise DitLoraError(listed("validation.images: no such file", lost))
    with runtime.accelerator.local_main_process_first():  # the others find the digests remembered
        digests = Digests(root / "digests.json")
        text_facts = _resolve(checkpoint.text_facts(), digests, runtime)
        video_facts = _resolve(checkpoint.video_facts(), digests, runtime)
        transformer = transformer_digest(checkpoint, recipe, digests)
        video_jobs = [_video_job(clip, video_facts, digests, runtime) for clip in clips]
        mirror_jobs = [
            _video_job(clip, video_facts, digests, runtime, mirrored=True)
            for clip in (clips if recipe.data.flip else ())
        ]
        if runtime.accelerator.is_local_main_process:
            digests.save()
    prompts = list(recipe.validation.prompts)
    captions = dict.fromkeys(["", *(clip.caption for clip in clips), *prompts])
    text_jobs = {caption: _text_job(caption, text_facts) for caption in captions}

    _set_aside_bad(runtime, texts, [text_jobs[shared] for shared in ("", *prompts)])
    missing_texts = _missing(runtime, texts, list(text_jobs.values()))
    missing_videos = _missing(runtime, videos, [*video_jobs, *mirror_jobs])
    _check_headers(clips, video_jobs, missing_videos, runtime)
    _encode(runtime, texts, missing_texts, checkpoint.load_text_encoder, "caption")
    _encode(runtime, videos, missing_videos, checkpoint.load_video_encoder, "clip")

    entries = tuple(
        Entry(clip.id, video.key, text_jobs[clip.caption].key, mirror.key if mirror else None)
        for clip, video, mirror in zip_longest(clips, video_jobs, mirror_jobs)
    )
    cached = CachedClips(entries, text_jobs[""].key, videos, texts)
    fault = cached.empty_text[1]
    agree(runtime.accelerator, DitLoraError(f"the empty caption: {fault}") if fault else None)
    return Precomputed(
        clips=cached,
        prompt_keys=tuple(text_jobs[prompt].key for prompt in prompts),
        data_digest=entry_key({"entries": [_keys(entry) for entry in entries]}),
        transformer_digest=transformer,
    )


def transformer_digest(checkpoint: Checkpoint, recipe: Recipe, digests: Digests) -> str:
    """Of the transformer's files, or of what it is drawn from."""
    scratch = recipe.model.from_scratch
    if scratch is None:
        return digests.component(checkpoint.path / "transformer")
    return entry_key({"from_scratch": scratch, "seed": recipe.train.seed})


def _keys(entry: Entry) -> list[str]:
    keys = [entry.id, entry.video_key, entry.text_key]
    return keys + ([entry.mirror_key] if entry.mirror_key else [])


def _set_aside_bad(runtime: Runtime, cache: TensorCache, jobs: Sequence[_Job]) -> None:
    """Read whole what all samples share, so that it is encoded anew now rather than blamed on a sample later."""
    for job in jobs if runtime.is_main else ():
        if cache.is_whole(job.key):
            _, fault = cache.read(job.key, {})
            if fault:
                cache.set_aside(job.key)
                runtime.say(f"{job.sample} is encoded anew: {fault}")


def _missing(runtime: Runtime, cache: TensorCache, jobs: Sequence[_Job]) -> list[_Job]:
    """The jobs whose entry is not there, as rank 0 sees it.

    Another run may be filling the same cache: ranks that each looked for themselves could differ.
    """
    found = {job.key for job in jobs if not cache.is_whole(job.key)} if runtime.is_main else None
    (keys,) = broadcast_object_list([found])
    return [job for job in jobs if job.key in keys]


def _resolve(facts: Mapping[str, Any], digests: Digests, runtime: Runtime) -> dict[str, Any]:
    """Folders become digests of their contents; the dtype of encoding is a fact too."""
    resolved = {
        name: digests.component(value) if isinstance(value, Path) else value
        for name, value in facts.items()
    }
    return resolved | {"dtype": str(runtime.precision.dtype)}


def _text_job(caption: str, facts: Mapping[str, Any]) -> _Job:
    facts = {**facts, "caption": caption}

    def make(encode: TextEncoder) -> Tensors:
        # One at a time: in a batch, the result would depend on its neighbours in the last bits.
        return {name: tensor[0] for name, tensor in encode([caption]).items()}

    return _Job(f"caption {caption!r}", entry_key(facts), facts, make)


def _video_job(
    clip: Clip,
    facts: Mapping[str, Any],
    digests: Digests,
    runtime: Runtime,
    *,
    mirrored: bool = False,
) -> _Job:
    data = runtime.recipe.data
    how = {"frames": data.frames, "height": data.height, "width": data.width, "fps": data.fps}
    facts = {**facts, **how, "decode": DECODE_VERSION, "media": digests.media(clip.media)}
    if clip.image:
        facts["image"] = digests.media(clip.image)
    if mirrored:
        facts["mirrored"] = True

    def make(encode: VideoEncoder) -> Tensors:
        size = {"height": data.height, "width": data.width}
        pixels = read_frames(clip.media, frames=data.frames, fps=data.fps, **size)
        if mirrored:
            pixels = pixels.flip(-1)
        image = read_frames(clip.image, frames=1, fps=None, **size)[0] if clip.image else None
        return encode(pixels, image)

    return _Job(clip.id, entry_key(facts), facts, make)


def _check_headers(
    clips: Sequence[Clip], jobs: Sequence[_Job], missing: Sequence[_Job], runtime: Runtime
) -> None:
    """Refuse clips that cannot be opened or are too short before an encoder is loaded for the others."""
    data, wrong = runtime.recipe.data, []
    wanted = {job.key for job in missing}
    for clip, job in zip(clips, jobs, strict=True):
        if job.key not in wanted or is_image(clip.media):
            continue
        try:
            header = read_header(clip.media)
        except ClipError as error:
            wrong.append(str(error))
            continue
        short = too_short(header, frames=data.frames, fps=data.fps) if data.fps else None
        if short:
            wrong.append(f"{clip.media.name}: {short}")
    if wrong:
        raise DitLoraError(listed("these clips cannot be used", wrong))


def _encode(
    runtime: Runtime,
    cache: TensorCache,
    missing: Sequence[_Job],
    load_encoder: Callable[[torch.dtype, torch.device], Any],
    what: str,
) -> None:
    """Make this rank's share of the missing entries; collective."""
    # Equal facts, equal entry: two clips with the same bytes are encoded once.
    jobs = list({job.key: job for job in missing}.values())
    if not jobs:
        return
    accelerator = runtime.accelerator
    share = jobs[accelerator.process_index :: accelerator.num_processes]
    failed: list[str] = []
    unwritable: DitLoraError | None = None
    if share:
        encoder = load_encoder(runtime.precision.dtype, accelerator.device)
        for job in _progress(share, what, runtime):
            try:
                cache.write(job.key, job.make(encoder), sample=job.sample, facts=job.facts)
            except (ClipError, CacheError) as error:
                failed.append(str(error))
            except DitLoraError as error:
                unwritable = error
                break
        del encoder
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
    summary = f"these {what}s cannot be used; the others are cached"
    agree(accelerator, unwritable or (DitLoraError(listed(summary, failed)) if failed else None))


def _progress(jobs: Iterable[_Job], what: str, runtime: Runtime) -> Iterable[_Job]:
    return tqdm(
        jobs, desc=f"encoding {what}s", unit=what, disable=not runtime.is_main, dynamic_ncols=True
    )
