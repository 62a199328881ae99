"""The section `validation` of a recipe: samples and losses during training."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from dit_lora.config.section import Count, Positive, Section

RENAMED_KEYS = {"held_out_draws": "eval_draws", "held_out_clips": "eval_clips"}
"""Old keys of the section and what they are called now. The old ones are read until version 0.3."""

LossName = Literal["eval_loss", "validation_loss"]
"""Names of the losses at fixed noise: of training clips, and of data that is not trained on (`validation.data`)."""


class ValidationConfig(Section):
    prompts: tuple[str, ...] = ()
    """Videos or images are sampled for these at the same seed, before and after training; of a model with
    classes, their names."""
    model: str | None = None
    """A second checkpoint of the same architecture, a folder or a Hub id, that makes samples with the trained adapter:
    for example, train the base and sample with its distilled version. Eval losses stay the trained model's."""
    images: tuple[str, ...] = ()
    """Image-to-video: one file a prompt, its first frame."""
    last_images: tuple[str, ...] = ()
    """One file a prompt, its last frame, for models that are given that too (Wan 2.1 FLF2V)."""
    references: tuple[tuple[str, ...], ...] = ()
    """Models with references: a list of files a prompt; one file may stand by itself."""
    media: tuple[str, ...] = ()
    """Chat models: one image or video a prompt, which is then the question about it."""
    data: float | str | None = None
    """Data that is never trained on, whose loss is the validation loss: a folder in the forms of `data.path`, or a
    share of the training data, such as 0.05, chosen by a hash of each file's name. Chat models: `conversations`."""
    conversations: str | None = None
    """Chat models: a file of conversations that are never trained on, whose loss is the eval loss."""
    max_answer_tokens: Count = 64
    """Chat models: tokens after which an answer is cut off."""
    every: Count | None = None
    """Steps between samples during training; by default only before and after."""
    max_sample_share: Positive | None = None
    """Share of the steps' time that samples during training may take, those before and after not counted. Where they
    would take more, some are left out, by the time that the last ones took. null for all that `every` asks for."""
    inference_steps: Count = 50
    guidance_scale: Annotated[float, Field(ge=0)] = 6.0
    """The pipeline's own argument. At 1 and below, most leave guidance out; distilled checkpoints want 0 or 1."""
    seed: Annotated[int, Field(ge=0)] = 0
    count: Count = 1
    """Samples of each prompt, from `seed` and the seeds after it."""
    other_expert: str | None = None
    """Adapter of the expert that does not train (Wan 2.2 A14B), which samples are made with: a run's or an adapter's
    folder, its file, or a repository on the Hub; null for that expert as the checkpoint has it."""
    eval_draws: Annotated[int, Field(ge=0)] = 4
    """Noise and timestep draws per clip, never trained on, for the eval loss; 0 turns it off. A short run takes
    fewer unless the recipe sets this, `eval_clips`, or an `every` below its steps."""
    eval_clips: Count = 16
    """Clips in the eval loss, and at most in the validation loss."""

    _old_keys: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _accept_outdated_keys(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Validate the `validation` section, accept keys of earlier versions, and remember which of them were used."""
        if not isinstance(values, dict):
            return handler(values)
        section = handler(rename_old_keys(values))
        section._old_keys = tuple(key for key in RENAMED_KEYS if key in values)
        return section

    @property
    def notes(self) -> list[str]:
        """Deprecation messages, one for each outdated key that the `validation` section uses."""
        return [
            f"validation.{key} is now validation.{RENAMED_KEYS[key]}; the old key works until version 0.3"
            for key in self._old_keys
        ]

    @property
    def ranking_loss(self) -> LossName:
        """Name of the loss that ranks checkpoints and decides when to stop: of held-out data, if there is any."""
        return "eval_loss" if self.data is None else "validation_loss"

    @field_validator("data")
    @classmethod
    def _check_share(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError("give a folder, or a share of the training data above 0 and below 1")
        return value

    @field_validator("references", mode="before")
    @classmethod
    def _wrap_single_files(cls, value: Any) -> Any:
        """Wrap each single file name in a list, for options whose entries are lists of files."""
        if not isinstance(value, list | tuple):
            return value
        return [[files] if isinstance(files, str) else files for files in value]

    @property
    def sample_titles(self) -> list[str]:
        """The prompt or class of each sample in a validation, in the order of the sample files."""
        return build_sample_titles(self.prompts, self.count, self.seed)


def rename_old_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename outdated keys of a `validation` section.

    If both the old and the new key are present, the later one counts, because a command line's override comes after
    the recipe.
    """
    return {RENAMED_KEYS.get(key, key): value for key, value in values.items()}


def build_sample_titles(prompts: Sequence[str], count: int, seed: int) -> list[str]:
    """Titles of validation samples, one per prompt and seed. With several samples per prompt they include the seed."""
    if count == 1:
        return list(prompts)
    # The same order as that of the sampled files: by prompt, then by seed.
    seeds = range(seed, seed + count)
    return [f"{prompt} (seed {sample_seed})" for prompt in prompts for sample_seed in seeds]
