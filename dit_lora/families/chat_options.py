"""Rejects recipe options that apply to diffusion models but not to chat models."""

from collections.abc import Mapping, Sequence

from dit_lora.config.recipe import Recipe
from dit_lora.config.validation import ValidationConfig
from dit_lora.errors import DitLoraError, format_list


def refuse_diffusion_options(recipe: Recipe, supported_options: Sequence[str] = ()) -> None:
    """Raise one `DitLoraError` that lists all options set in the recipe that chat models do not support.

    Options in `supported_options` are allowed. `chat.tiles` is rejected by default, because most chat models have no
    tiles.
    """
    # Collect all problems, so that one run shows everything that must be removed.
    problems = [
        f"{name}: {reason}"
        for name, (is_set, reason) in _list_unsupported_options(recipe).items()
        if is_set and name not in supported_options
    ]
    if problems:
        raise DitLoraError(format_list(f"family {recipe.model.family} does not use these; remove them", problems))


def _list_unsupported_options(recipe: Recipe) -> Mapping[str, tuple[bool, str]]:
    """For each recipe option that chat models lack: whether the recipe sets it, and the reason to show."""
    data, train, chat = recipe.data, recipe.train, recipe.chat
    sources = data.all_sources
    # Reasons that several options share.
    captions = "the annotation file has questions and answers"
    shapes = "the model's own picture sizes apply"
    return {
        "data.classes": (data.classes is not None, captions),
        "data.caption_column": (
            data.caption_column is not None or any(source.caption_column for source in sources),
            captions,
        ),
        "data.image_column": (any(source.image_column for source in sources), captions),
        "data.reference_columns, reference_folders": (
            any(source.reference_columns or source.reference_folders for source in sources),
            "nothing is made from references",
        ),
        "data.mask_column, mask_folder, alpha_mask": (
            any(source.has_masks for source in sources),
            "the loss is that of answers",
        ),
        "data.reference_resolution": (data.reference_resolution is not None, shapes),
        "validation.references": (bool(recipe.validation.references), "nothing is made from them"),
        "data.sources.caption": (any(source.caption is not None for source in sources), captions),
        "data.sources.generate": (any(source.generate is not None for source in sources), "no video is made"),
        # Guidance and images that a video starts from do not exist for answers.
        "data.caption_dropout": (data.caption_dropout > 0, "there is no guidance"),
        "data.image_dropout": (data.image_dropout > 0, "no video starts from an image"),
        "data.image_noise": (data.image_noise is not None, "no video starts from an image"),
        "data.flip": (data.flip, "answers say left and right"),
        "data.fps": (data.fps is not None, "data.frames are taken from all of a video"),
        "data.buckets": (data.buckets is not None, shapes),
        "data.windows": (data.windows != 1, "give `start` and `end` in the annotations"),
        "data.vae_tiling": (data.vae_tiling, "there is no VAE"),
        "data.vae_slicing": (data.vae_slicing, "there is no VAE"),
        # On by default, and without effect on chat models, so only an explicit `false` is reported.
        "data.precompute": (not data.precompute, "frames are always read as they are needed"),
        "chat.tiles": (chat is not None and chat.tiles is not None, shapes),
        # Options of training that need noise levels, a variance or two networks.
        "train.mode": (train.mode != "lora", "lora with optim.groups trains base weights too"),
        "train.vlb": (train.vlb is not None, "there is no variance"),
        "train.target": (train.target != "data", "there is no guidance"),
        "train.preserve": (train.preserve is not None, "it is for models of pictures and videos"),
        "lora.init": (recipe.lora.has_file_init, "a chat model's adapter starts from kaiming or gaussian"),
        "lora.under": (bool(recipe.lora.under), "a chat model's adapter has none under it"),
        "train.timesteps": (train.timesteps is not None, "there are no noise levels"),
        "train.guidance_scale": (train.guidance_scale is not None, "there is no guidance"),
        "model.part": (recipe.model.part is not None, "there is one model"),
        "model.from_scratch": (recipe.model.from_scratch is not None, "a chat model starts trained"),
        **_list_unsupported_validation_options(recipe.validation),
    }


def _list_unsupported_validation_options(config: ValidationConfig) -> dict[str, tuple[bool, str]]:
    # Options at their default are not reported, because the recipe may not mention them.
    defaults = ValidationConfig()
    answers = "answers are greedy"
    return {
        "validation.model": (config.model is not None, "answers are the trained model's"),
        "validation.other_expert": (config.other_expert is not None, "there is one model"),
        "validation.images": (bool(config.images), "give validation.media"),
        "validation.data": (config.data is not None, "give validation.conversations"),
        "validation.count": (config.count != 1, answers),
        "validation.inference_steps": (config.inference_steps != defaults.inference_steps, answers),
        "validation.guidance_scale": (config.guidance_scale != defaults.guidance_scale, answers),
        "validation.eval_draws": (
            config.eval_draws not in (0, defaults.eval_draws),
            "there is no noise to draw; 0 turns the eval loss off",
        ),
    }
