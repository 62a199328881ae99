"""Says what a diffusion family cannot take of a recipe: shapes, and options of other families."""

from collections.abc import Mapping, Sequence

from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.errors import DitLoraError


def wrong_multiples(sizes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Say which of the values, by their names in `data` and each beside its step, are no multiples of it."""
    wrong = []
    for name, (value, step) in sizes.items():
        below = value // step * step
        nearest = f"{below} and {below + step}" if below else str(step)
        if value % step:
            wrong.append(
                f"data.{name} must be a multiple of {step}; got {value}, nearest {nearest}"
            )
    return wrong


def wrong_sides(shape: VideoShape, step: int) -> list[str]:
    """Say what is wrong with height and width, which must be multiples of `step`."""
    return wrong_multiples({"height": (shape.height, step), "width": (shape.width, step)})


def too_few_frames(frames: int, step: int) -> list[str]:
    """Say if there is no latent frame of `step` frames behind a first one that is given."""
    if frames > step:
        return []
    return [f"data.frames must be {step + 1} or more, as the first is given; got {frames}"]


def wrong_frames(frames: int, step: int) -> list[str]:
    """Say what is wrong with a number of frames that must be a multiple of `step` and one more."""
    if (frames - 1) % step == 0:
        return []
    below = (frames - 1) // step * step + 1
    return [f"data.frames must be {step}n + 1; got {frames}, nearest {below} and {below + step}"]


def beyond_positions(ends: Mapping[str, tuple[int, int]], option: str) -> list[str]:
    """Say which of the values, by their names in `data`, are above their ends, the places where a table of positions stops.

    `option` is the transformer's, which says how long the table is.
    """
    return [
        f"data.{name} can be {end} at most, where its positions end ({option}); got {value}"
        for name, (value, end) in ends.items()
        if value > end
    ]


def refuse_options(recipe: Recipe, takes: Sequence[str] = ()) -> None:
    """Raise if the recipe sets options of other families: all but those in `takes`.

    They are `data.classes`, `data.image_column`, `data.image_dropout`, `data.image_noise`, `data.sound`,
    `validation.images`, `validation.last_images`, `validation.other_expert`, `model.task`, `train.guidance_scale`, `train.timesteps` and
    `train.vlb`; `data.fps` of images; and what is for chat models.
    """
    options = {
        "chat": recipe.chat is not None,
        "data.media": any(source.media is not None for source in recipe.data.all_sources),
        "validation.media": bool(recipe.validation.media),
        "optim.groups.adapter: null": (
            recipe.train.mode == "lora" and recipe.optim.groups.adapter is None
        ),
        "data.classes": recipe.data.classes is not None,
        "data.image_column": recipe.data.image_column is not None,
        "data.image_dropout": recipe.data.image_dropout > 0,
        "data.image_noise": recipe.data.image_noise is not None,
        "data.sound": recipe.data.sound,
        "data.fps": recipe.data.fps is not None and recipe.data.most_frames == 1,
        "model.task": recipe.model.task is not None,
        "validation.other_expert": recipe.validation.other_expert is not None,
        "validation.images": bool(recipe.validation.images),
        "validation.last_images": bool(recipe.validation.last_images),
        "train.guidance_scale": recipe.train.guidance_scale is not None,
        "train.timesteps": recipe.train.timesteps is not None,
        "train.vlb": recipe.train.vlb is not None,
    }
    wrong = [name for name, is_set in options.items() if is_set and name not in takes]
    if wrong:
        raise DitLoraError(
            f"{', '.join(wrong)}: family {recipe.model.family} has nothing that this applies to; remove it"
        )


def refuse_in_context(model: ModelConfig) -> None:
    """Raise for `model.task: ic_lora` of a family without reference clips."""
    if model.task == "ic_lora":
        raise DitLoraError(
            f"model.task: ic_lora: family {model.family} makes nothing from reference clips; leave it out, or take LTX-2 "
            "(family ltx2)"
        )
