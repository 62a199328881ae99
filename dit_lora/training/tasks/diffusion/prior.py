"""Generates samples of the untrained model to train on too: prior preservation (arXiv 2208.12242)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from dit_lora.config.data import SourceConfig, VideoShape
from dit_lora.data.media.sound import find_sound_fault
from dit_lora.data.media.video import write_sample
from dit_lora.data.sources.scan import list_media
from dit_lora.environment.progress_bar import ProgressBar
from dit_lora.errors import DitLoraError
from dit_lora.families.base import Sampler, Sampling
from dit_lora.families.latents import VaeMemory
from dit_lora.numerics.ranks import broadcast_object
from dit_lora.numerics.streams import derive_seed
from dit_lora.training.session.optional_work import free_memory
from dit_lora.training.session.session import Session, raise_errors_on_all_ranks


def generate_prior(session: Session, sampler: Sampler) -> None:
    """Generate the samples of each source that sets `generate`, as many as it says, from the source's caption.

    Collective.

    The main process samples with the unpatched pipeline, in the recipe's shape and with the steps and guidance of
    `validation`. Existing samples count, and each new one is written immediately: a killed run continues with the
    next. A sample's seed depends on `train.seed`, the source's index and its own number.
    """
    if all(source.generate is None for source in session.recipe.data.all_sources):
        return
    if sampler.info.reference_spec is not None and sampler.info.reference_spec.min_count:
        raise DitLoraError(
            f"data.sources: generate: {sampler.info.path.name} makes pictures from references, which a generated "
            "source has none of; remove it"
        )
    missing_samples = broadcast_object(_run_on_main(session, partial(_find_missing_samples, session)))
    prior_sampler = _PriorSampler(session, sampler)
    is_quiet = not session.is_main or not missing_samples
    bar = ProgressBar(missing_samples, desc="sampling the prior", unit="sample", disable=is_quiet)
    for number, index in bar:
        # Agree after each sample: the others wait for one sample, never for hours.
        _run_on_main(session, partial(prior_sampler.write_prior_sample, number, index))
    # Its pipeline must be freed before other models are loaded.
    del prior_sampler
    free_memory()


def _run_on_main(session: Session, work: Callable[[], Any]) -> Any:
    """Run `work` on the main process; returns its result, None on the others. Raises its error on all. Collective."""
    result = None
    with raise_errors_on_all_ranks(session.accelerator):
        if session.is_main:
            try:
                result = work()
            except OSError as problem:
                reason = f"{problem.filename or 'a file'}: {problem.strerror or problem}"
                raise DitLoraError(f"the prior's samples: cannot write {reason}") from problem
    return result


def _find_missing_samples(session: Session) -> list[tuple[int, int]]:
    """The samples to generate, as (source index, number): the lowest numbers that the source's folder lacks."""
    recipe, jobs = session.recipe, []
    for number, source in enumerate(recipe.data.all_sources):
        if source.generate is None:
            continue
        folder = _get_folder(source)
        if folder.exists() and not folder.is_dir():
            raise DitLoraError(f"data.sources[{number}].path: {source.path} is not a folder")
        files = list_media(folder)
        # By name, not by count: a user may have removed one from the middle.
        used_stems = {Path(name).stem for name in files}
        # The lowest unused numbers, without an upper end.
        free = (index for index in count() if _format_stem(index) not in used_stems)
        missing = list(islice(free, max(0, source.generate - len(files))))
        if missing and recipe.model.from_scratch is not None:
            raise DitLoraError(
                f"data.sources[{number}].generate needs a trained model, and model.from_scratch has none; remove one "
                "of them"
            )
        if missing:
            session.say(
                f"prior: {source.path} has {len(files)} of {source.generate} samples; sampling {source.caption!r}"
            )
        jobs += [(number, index) for index in missing]
    return jobs


@dataclass(frozen=True)
class _PriorSampler:
    session: Session
    sampler: Sampler

    @cached_property
    def pipeline(self) -> Any:
        pipeline = self.sampler.pipeline(self.session.precision.dtype)
        self.sampler.move_to_device(pipeline, self.session.accelerator.device)
        VaeMemory.from_config(self.session.recipe.data).apply(pipeline.vae)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def write_prior_sample(self, source_index: int, sample_index: int) -> None:
        """Generate a sample for prior preservation from the caption of a source in `data`, and write it."""
        recipe, source = self.session.recipe, self.session.recipe.data.all_sources[source_index]
        sampling = Sampling(
            VideoShape.from_data(recipe.data),
            recipe.validation.inference_steps,
            recipe.validation.guidance_scale,
            # Torch reads 32 bits.
            derive_seed(recipe.train.seed, "prior", source_index, sample_index) & 0xFFFFFFFF,
            fps=recipe.data.fps,
        )
        prompt_kwargs = self.sampler.prompt_kwargs(source.caption or "")
        # (F, H, W, 3) frames, and the sound if the model has any.
        video, sound = self.sampler.generate_with_sound(self.pipeline, prompt_kwargs, sampling)
        # NaN becomes black in a picture.
        if video.min() == video.max():
            raise DitLoraError(
                f"the model's own sample of {source.caption!r} is one flat colour, as NaN gives; sample it with "
                f"dit-lora sample, and try another model.dtype than {self.session.precision.dtype}"
            )
        sound_problem = find_sound_fault(sound)
        if sound_problem:
            raise DitLoraError(f"the model's own sample of {source.caption!r}: {sound_problem}")
        write_sample(_get_folder(source) / _format_stem(sample_index), video, recipe.data.fps, sound)


def _get_folder(source: SourceConfig) -> Path:
    return Path(source.path).expanduser()


def _format_stem(index: int) -> str:
    return f"prior_{index:06d}"
