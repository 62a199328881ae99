"""Encodes every clip and caption once, before the transformer is loaded. A clip from the disk to the loss:

    samples.py                 `find_samples`: its file and caption (data/sources/scan.py, a `Clip` of clips.py), and
                               its bucket, chosen by the file's header (data/buckets/buckets.py)
    cache_plan.py              `make_cache_plan`: its cache key, and the job that decodes it (data/media/video.py) and
                               encodes it with the family's VAE (families/wan/text_to_video.py)
    precompute.py              runs the jobs of all entries that the cache lacks (data/cache/cache.py)
    training/fit.py            `load_batches`: its position in the run, seed, tensors and micro-batch (order.py,
                               encoded.py and batch.py of data/loading)
    training/loop.py           `_train_step` calls `forward` of replayable_batch.py, which seeds and weights
    families/flow_matching.py  `losses`: noise level, noise, the family's `predict`, squared error

The text encoder is loaded, used and freed; then the VAE. All processes share the work. Cached entries are kept, so an
interrupted run continues where it stopped. Memory holds one clip at a time.
"""

import gc
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dit_lora.config.recipe import Recipe
from dit_lora.config.validation import ValidationConfig
from dit_lora.data.cache.cache import TensorCache, make_entry_key
from dit_lora.data.cache.fill import BuildResult, CacheJob, fill_cache
from dit_lora.data.loading.encoded import CachedClips, EncodedClips, SampleCacheKeys
from dit_lora.data.loading.training_set import TrainingData
from dit_lora.data.media.clip_sound import close_sound
from dit_lora.environment.progress_bar import ProgressBar
from dit_lora.errors import DitLoraError, format_list, join_first_items
from dit_lora.families.base import Checkpoint, Encoders
from dit_lora.families.latents import VaeMemory
from dit_lora.families.opening import read_component_config
from dit_lora.numerics.ranks import broadcast_object
from dit_lora.training.session.session import Session, raise_on_all_ranks, wait_for_all_ranks
from dit_lora.training.tasks.diffusion.cache_plan import CachePlan, PlannedSample, make_cache_plan
from dit_lora.training.tasks.diffusion.live_encoding import build_on_the_fly_training_set
from dit_lora.training.tasks.diffusion.long_captions import report_cut_captions, suppress_length_warnings
from dit_lora.training.tasks.diffusion.prior import generate_prior
from dit_lora.training.tasks.diffusion.samples import find_header_problems
from dit_lora.training.tasks.rejects import Rejects


@dataclass(frozen=True)
class DiffusionTrainingData(TrainingData):
    """The encoded training set, and the embeddings of validation prompts."""

    training_set: EncodedClips
    validation_set: EncodedClips | None = None
    prompt_keys: tuple[tuple[str, str], ...] = ()
    """Keys of each validation prompt, and of its empty prompt for guidance."""
    sampling_checkpoint: Checkpoint | None = None
    """The checkpoint that samples are generated with (`validation.model`), if it differs."""


def precompute(
    session: Session, checkpoint: Checkpoint, sampling_checkpoint: Checkpoint | None = None
) -> DiffusionTrainingData:
    """Fill the caches for a recipe; unusable samples are refused or left out, all in one list.

    Validation prompts are encoded for `sampling_checkpoint`, which generates the samples, if given. Collective.
    """
    recipe, accelerator = session.recipe, session.accelerator
    _require_validation_files(recipe.validation)
    # Before the sources are read: it writes one of them.
    generate_prior(session, checkpoint.sampler)
    quiet = not accelerator.is_local_main_process
    sampling_encoders = None if sampling_checkpoint is None else sampling_checkpoint.encoders
    # The other processes find the digests cached.
    with accelerator.local_main_process_first():
        plan = make_cache_plan(
            recipe,
            checkpoint.encoders,
            session.precision.dtype,
            samples_per_step=session.samples_per_step,
            quiet=quiet,
            sampling_encoders=sampling_encoders,
        )
    # Tiling may not suit these sizes: refuse it before hours of encoding.
    sizes = {(planned.sample.shape.height, planned.sample.shape.width) for planned in plan.planned_samples}
    vae_config = read_component_config(checkpoint.path, "vae")
    VaeMemory.from_config(recipe.data).require_tiling_support(checkpoint.path.name, vae_config, sorted(sizes))
    report = plan.samples.report
    report_lines = report.format_lines() if report else ()
    for line in (*plan.samples.notes, *_format_missing_triggers(recipe, plan), *report_lines):
        session.say(line)
    captions = [*(planned.sample.clip.caption for planned in plan.planned_samples), *recipe.validation.prompts]
    for line in checkpoint.encoders.list_caption_warnings(captions):
        session.say_once(line)
    rejects = Rejects(session)
    videos = TensorCache(recipe.cache_dir / "videos")
    uncached = [planned for planned in plan.planned_samples if planned.sample.id not in plan.rejected]
    if recipe.data.precompute:
        # One query for all keys.
        missing = set(videos.find_missing([planned.video.key for planned in plan.planned_samples]))
        uncached = [planned for planned in uncached if planned.video.key in missing]
    # All at once: a user wants one list of the files to repair, not one file per start.
    header_problems = find_header_problems([planned.sample for planned in uncached], recipe, quiet=quiet)
    rejects.add_rejected_samples({**plan.rejected, **header_problems})
    if recipe.data.precompute:
        clips = _fill_caches(session, checkpoint.encoders, plan, rejects, videos, sampling_encoders)
    else:
        planned_samples = rejects.filter_samples(plan.planned_samples, _get_sample_id)
        clips = build_on_the_fly_training_set(session, checkpoint.encoders, plan, planned_samples)
    # Caption dropout uses the empty caption with every sample: no sample is at fault.
    fault = clips.empty_caption_tensors[1]
    raise_on_all_ranks(accelerator, DitLoraError(f"the empty caption: {fault}") if fault else None)
    training_set, validation_set = _split_held_out(session, clips, plan)
    return DiffusionTrainingData(
        training_set=training_set,
        validation_set=validation_set,
        validation_digest=compute_data_digest(validation_set) if validation_set is not None else "",
        prompt_keys=tuple((planned.text.key, planned.negative.key) for planned in plan.validation_prompts),
        sampling_checkpoint=sampling_checkpoint,
        data_digest=compute_data_digest(training_set),
        transformer_digest=plan.transformer_digest,
        rejected=rejects.reasons,
        bucket_report=report,
    )


def _split_held_out(
    session: Session, clips: EncodedClips, plan: CachePlan
) -> tuple[EncodedClips, EncodedClips | None]:
    """The samples to train on, and those of `validation.data`; None without the option.

    Held-out samples that are also trained on under another name are left out: their loss would not be of new data.
    """
    if session.recipe.validation.data is None:
        return clips, None
    held_out_ids = {planned.sample.id for planned in plan.planned_samples if planned.sample.clip.is_held_out}
    trained = tuple(entry for entry in clips.entries if entry.id not in held_out_ids)
    trained_keys = {entry.video_key for entry in trained}
    held_out = [entry for entry in clips.entries if entry.id in held_out_ids]
    copies = [entry.id for entry in held_out if entry.video_key in trained_keys]
    if copies:
        session.say(f"validation.data: left out {join_first_items(copies, 8)}, because the same files are trained on")
    validated = tuple(entry for entry in held_out if entry.video_key not in trained_keys)
    if not trained:
        raise DitLoraError("no sample is left to train on: every one was rejected, or is held out by validation.data")
    if not validated:
        raise DitLoraError("no sample of validation.data is left: every one was rejected, or is trained on too")
    return replace(clips, entries=trained), replace(clips, entries=validated)


def compute_data_digest(clips: EncodedClips) -> str:
    """Digest of the samples' names, contents, captions and weights."""
    return make_entry_key({"entries": [_list_keys(entry) for entry in clips.entries]})


def _require_validation_files(validation: ValidationConfig) -> None:
    files_by_option = {
        "images": validation.images,
        "last_images": validation.last_images,
        "references": [file for files in validation.references for file in files],
    }
    for name, files in files_by_option.items():
        no_file = [file for file in files if not Path(file).is_file()]
        if no_file:
            raise DitLoraError(format_list(f"validation.{name}: no such file", no_file))


def _get_sample_id(planned: PlannedSample) -> str:
    return planned.sample.id


def _list_keys(entry: SampleCacheKeys) -> list[str]:
    # Only if not the default, so that digests from before the option still match.
    weights = (entry.times_per_epoch, entry.loss_weight)
    return [
        *(entry.id, entry.video_key, entry.text_key),
        *([entry.mirror_key] if entry.mirror_key else []),
        *(map(str, weights) if weights != (1, 1) else []),
        *entry.preserve_text_keys,
    ]


def _format_missing_triggers(recipe: Recipe, plan: CachePlan) -> list[str]:
    """A line on captions without the trigger word, for which nothing is preserved; empty if there are none."""
    trained = [planned for planned in plan.planned_samples if not planned.sample.clip.is_held_out]
    num_without = sum(not planned.preserve_weight for planned in trained)
    if recipe.train.preserve is None or not num_without:
        return []
    trigger = recipe.train.preserve.trigger
    return [
        f"train.preserve: {num_without} of {len(trained)} captions do not contain "
        f"{trigger!r}, and are trained without it"
    ]


def _fill_caches(
    session: Session,
    encoders: Encoders,
    plan: CachePlan,
    rejects: Rejects,
    videos: TensorCache,
    sampling_encoders: Encoders | None,
) -> EncodedClips:
    """Fill the caches with all missing entries; returns the training set that reads them. Collective."""
    # Texts first: their encoder is freed before the VAE is loaded, because both may not fit.
    texts = TensorCache(session.recipe.cache_dir / "texts")
    empty, prompt_jobs = plan.empty, plan.prompt_jobs
    shared = [empty, *prompt_jobs]
    _mark_bad_shared_entries(session, texts, shared)
    planned_samples = rejects.filter_samples(plan.planned_samples, _get_sample_id)
    is_own = plan.shares_text_encoder
    jobs = [empty, *(prompt_jobs if is_own else ()), *(job for planned in planned_samples for job in planned.texts)]
    # Captions that are cached already were reported at an earlier start.
    uncached = set(texts.find_missing([planned.text.key for planned in planned_samples]))
    clips = [planned.sample.clip for planned in planned_samples if planned.text.key in uncached]
    with suppress_length_warnings():
        report_cut_captions(session, encoders, clips)
        bad = _fill_cache(session, texts, jobs, encoders.load_text_encoder, "caption")
        if not is_own and sampling_encoders is not None:
            bad |= _fill_cache(session, texts, prompt_jobs, sampling_encoders.load_text_encoder, "prompt")
    reasons = [bad[job.key] for job in shared if job.key in bad]
    raise_on_all_ranks(session.accelerator, DitLoraError("; ".join(reasons)) if reasons else None)
    failed = {
        planned.sample.id: bad[job.key] for planned in planned_samples for job in planned.texts if job.key in bad
    }
    rejects.add_rejected_samples(failed)
    planned_samples = rejects.filter_samples(planned_samples, _get_sample_id)

    jobs = [job for planned in planned_samples for job in planned.videos]
    # The second encoder: the text encoder has been freed.
    load = partial(encoders.load_video_encoder, memory=VaeMemory.from_config(session.recipe.data))
    bad = _fill_cache(session, videos, jobs, load, "clip")
    close_sound()
    failed = {
        planned.sample.id: bad[job.key] for planned in planned_samples for job in planned.videos if job.key in bad
    }
    rejects.add_rejected_samples(failed, "these clips cannot be used; all others are cached")
    entries = tuple(planned.entry for planned in rejects.filter_samples(planned_samples, _get_sample_id))
    return CachedClips(entries, empty.key, videos, texts, session.recipe.train.effective_guided_scale)


def _mark_bad_shared_entries(session: Session, cache: TensorCache, jobs: Sequence[CacheJob]) -> None:
    """Drop bad entries that all samples share: they are encoded again now, and no sample is at fault later."""
    for job in jobs if session.is_main else ():
        if cache.is_complete(job.key):
            _, fault = cache.read(job.key, {})
            if fault:
                cache.mark_bad(job.key)
                session.say(f"encoding {job.sample} again: {fault}")
    wait_for_all_ranks(session.accelerator)


def _fill_cache(
    session: Session,
    cache: TensorCache,
    jobs: Sequence[CacheJob],
    load_encoder: Callable[[torch.dtype, torch.device], Any],
    item_name: str,
) -> dict[str, str]:
    """Create the missing entries with all processes; returns the reason for each key that failed. Collective."""
    accelerator = session.accelerator
    # One name for all ranks: a failure recorded under it is known to all, and tried again by the next launch.
    launch = broadcast_object(uuid.uuid4().hex)
    error: DitLoraError | None = None
    filled = BuildResult()
    progress: list[ProgressBar] = []

    def show_progress(num_done: int, num_total: int) -> None:
        if num_done < num_total and not progress:
            quiet = not session.is_main
            bar = ProgressBar(desc=f"encoding {item_name}s", unit=item_name, disable=quiet)
            # Entries that existed before count as done, but not into the rate.
            bar.total, bar.initial, bar.n = num_total, num_done, num_done
            progress.append(bar)
        for progress_bar in progress:
            progress_bar.update(num_done - progress_bar.n)

    try:
        load = partial(load_encoder, session.precision.dtype, accelerator.device)
        filled = fill_cache(cache, jobs, load, launch_id=launch, on_progress=show_progress)
    except DitLoraError as problem:
        error = problem
    finally:
        for progress_bar in progress:
            progress_bar.close()
    if filled.num_written or filled.failed or error:
        # Frees the encoder.
        gc.collect()
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    raise_on_all_ranks(accelerator, error)
    return filled.failed
