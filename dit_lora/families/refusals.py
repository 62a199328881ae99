"""Checks for shapes and options that a diffusion family does not support."""

import re
from collections.abc import Mapping, Sequence

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError


def size_multiple_errors(sizes: Mapping[str, tuple[int, int]]) -> list[str]:
    """One error message per size that is not a multiple of its step. `sizes` maps names in `data` to (value, step)."""
    problems = []
    for name, (value, step) in sizes.items():
        lower = value // step * step
        # Below the first multiple, the only valid neighbour is the step itself.
        nearest = f"{lower} and {lower + step}" if lower else str(step)
        if value % step:
            problems.append(f"data.{name} must be a multiple of {step}; got {value}, nearest {nearest}")
    return problems


def side_errors(shape: VideoShape, step: int) -> list[str]:
    """One error message per side (height, width) of a sample that is not a multiple of `step`."""
    return size_multiple_errors({"height": (shape.height, step), "width": (shape.width, step)})


def image_frames_errors(frames: int, model: str) -> list[str]:
    """Error message if a sample of a model that makes images has more than one frame."""
    return [] if frames == 1 else [f"data.frames must be 1, {model} makes images; got {frames}"]


def min_frames_errors(frames: int, step: int) -> list[str]:
    """Error message if an image-to-video sample has no latent frame of `step` frames after the given first one."""
    # The first latent frame is the given image. One more latent frame needs `step` more frames.
    if frames > step:
        return []
    return [f"data.frames must be {step + 1} or more, as the first is given; got {frames}"]


def frame_count_errors(frames: int, step: int) -> list[str]:
    """Error message if a sample's number of frames is not a multiple of `step` plus one."""
    # Causal video VAEs encode the first frame by itself, and then `step` frames into each latent.
    if (frames - 1) % step == 0:
        return []
    lower = (frames - 1) // step * step + 1
    return [f"data.frames must be {step}n + 1; got {frames}, nearest {lower} and {lower + step}"]


def position_limit_errors(sizes: Mapping[str, tuple[int, int]], option: str) -> list[str]:
    """One error message per size that exceeds the transformer's position table.

    Args:
        sizes: Names in `data`, each with (value, maximum).
        option: The transformer's config option that sets the length of the table.
    """
    # Each maximum is in the same unit as its value: frames, or pixels of a side.
    return [
        f"data.{name} can be {max_value} at most, where its positions end ({option}); got {value}"
        for name, (value, max_value) in sizes.items()
        if value > max_value
    ]


KEEP_DISTILLATION = (
    "give an adapter that undoes it in lora.under; or set train.target: guided, which keeps sampling without guidance"
)
"""What may be added to a recipe that trains a distilled checkpoint, for messages."""


def is_named_distilled(name: str, word: str = "turbo") -> bool:
    """True if the last part of a path or Hub id has the word for a model's distilled version."""
    return word in _get_folder_name(name) and not is_named_dedistilled(name)


def is_named_dedistilled(name: str) -> bool:
    """True if the last part of a path or Hub id says that a distillation was taken back, such as De-Turbo."""
    return re.search(r"de-?(turbo|distill)", _get_folder_name(name)) is not None


def _get_folder_name(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def refuse_options(recipe: Recipe, supported_options: Sequence[str] = ()) -> None:
    """Raise `DitLoraError` if the recipe sets an option that only some families have and that is not in
    `supported_options`.

    Options of this kind are `data.classes`, `data.image_column`, `data.image_dropout`, `data.image_noise`,
    `data.sound`, `validation.images`, `validation.last_images`, `validation.other_expert`, `model.task`,
    `train.guidance_scale`, `train.timesteps` and `train.vlb`; `data.fps` for images; and the options of chat models.
    """
    # Each option, and whether the recipe sets it to something other than its default.
    options = {
        "chat": recipe.chat is not None,
        "data.media": any(source.media is not None for source in recipe.data.all_sources),
        "validation.media": bool(recipe.validation.media),
        "optim.groups.adapter: null": (recipe.train.mode == "lora" and recipe.optim.groups.adapter is None),
        "data.classes": recipe.data.classes is not None,
        "data.image_column": recipe.data.image_column is not None,
        "data.image_dropout": recipe.data.image_dropout > 0,
        "data.image_noise": recipe.data.image_noise is not None,
        "data.sound": recipe.data.sound,
        # A frame rate means nothing if every sample is a single image.
        "data.fps": recipe.data.fps is not None and recipe.data.max_frames == 1,
        "model.task": recipe.model.task is not None,
        "validation.other_expert": recipe.validation.other_expert is not None,
        "validation.images": bool(recipe.validation.images),
        "validation.last_images": bool(recipe.validation.last_images),
        "train.guidance_scale": recipe.train.guidance_scale is not None,
        "train.timesteps": recipe.train.timesteps is not None,
        "train.vlb": recipe.train.vlb is not None,
    }
    problems = [name for name, is_set in options.items() if is_set and name not in supported_options]
    if problems:
        raise DitLoraError(f"{', '.join(problems)}: family {recipe.model.family} does not use this; remove it")


def refuse_ic_lora(model: ModelConfig) -> None:
    """Raise `DitLoraError` for `model.task: ic_lora` in a family that does not generate from reference clips."""
    if model.task == "ic_lora":
        raise DitLoraError(
            f"model.task: ic_lora: family {model.family} does not use reference clips; remove it, or use "
            "LTX-2 (family ltx2)"
        )
