"""Opens a recipe's checkpoint without its weights: configs from the folder or the Hub, models on the meta device.

The family's own code opens and builds the checkpoint; a config replaces the weights where they are missing.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.environment.hub_files import resolve_model_folder
from dit_lora.environment.hub_kernels import read_configs_without_kernels
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.base import Checkpoint

# Components with weights in every pipeline. Others are found by their config.json.
_WEIGHT_COMPONENTS = ("transformer", "vae", "text_encoder")
_CONFIG_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja")


@contextmanager
def config_only_recipe(recipe: Recipe) -> Iterator[Recipe]:
    """Context that yields a copy of the recipe whose `model.path` is a local folder with configs and no weights."""
    with config_only_model(recipe.model) as model:
        yield recipe.model_copy(update={"model": model})


@contextmanager
def config_only_model(model: ModelConfig) -> Iterator[ModelConfig]:
    """Context that yields a copy of the recipe's model section with a local path to the checkpoint's configs.

    Missing weight files are replaced by empty ones. For a Hub id, only the small files are downloaded. Raises
    `DitLoraError` if there is neither a folder nor a repository.
    """
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        folder = resolve_model_folder(model, _CONFIG_PATTERNS)
    # A complete local folder is used as it is. Chat families do not check for weight files when they are opened.
    elif model.family in CHAT_FAMILIES or not _find_missing_weights(folder):
        yield model
        return
    with tempfile.TemporaryDirectory() as temporary:
        # Keep the folder's name: some families read the training dtype from it.
        path = Path(temporary) / Path(model.path).name
        shutil.copytree(folder, path, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.ckpt", "*.pth"))
        for component in _find_missing_weights(path) if model.family not in CHAT_FAMILIES else ():
            (path / component).mkdir(exist_ok=True)
            # An empty file satisfies the check for weight files. Models are built from their configs.
            save_file({}, path / component / "model.safetensors")
        yield model.model_copy(update={"path": str(path)})


def _find_missing_weights(folder: Path) -> list[str]:
    """Pipeline components without weight files: those that every pipeline has, and all others with a config."""
    models = {*_WEIGHT_COMPONENTS, *(config.parent.name for config in folder.glob("*/config.json"))}
    return sorted(name for name in models if not any((folder / name).glob("*.safetensors")))


@contextmanager
def build_from_configs() -> Iterator[list[nn.Module]]:
    """Context in which `from_pretrained` of Diffusers and Transformers builds frozen models from configs.

    Yields the list of the models built so far.
    """
    built: list[nn.Module] = []

    def build_diffusers_model(
        cls: Any, path: Any, *, subfolder: str | None = None, dtype: Any = None, **_: Any
    ) -> Any:
        # Parameters have the names of from_pretrained, whose callers pass them by keyword.
        model = cls.from_config(cls.load_config(path, subfolder=subfolder))
        return _cast_and_freeze_model(model, dtype, cls._keep_in_fp32_modules or [], built)

    def build_transformers_model(cls: Any, path: Any, *, dtype: Any = None, **_: Any) -> Any:
        model = _build_uninitialized(cls, load_pretrained(cls.config_class, path))
        return _cast_and_freeze_model(model, dtype, cls._keep_in_fp32_modules or [], built)

    replacements: dict[Any, Any] = {ModelMixin: build_diffusers_model, PreTrainedModel: build_transformers_model}
    originals: dict[Any, Any] = {kind: vars(kind)["from_pretrained"] for kind in replacements}
    for kind, function in replacements.items():
        # Patch the base classes, so that every model class of both libraries is covered.
        kind.from_pretrained = classmethod(function)
    try:
        yield built
    finally:
        for kind, method in originals.items():
            kind.from_pretrained = method


def _cast_and_freeze_model(
    model: nn.Module, dtype: torch.dtype | None, fp32_modules: list[str], built_models: list[nn.Module]
) -> nn.Module:
    for name, parameter in model.named_parameters():
        # Modules that the class keeps in fp32 stay so, as in a real from_pretrained.
        if not any(part in name.split(".") for part in fp32_modules):
            parameter.data = parameter.data.to(dtype or torch.float32)
    set_method: Any = setattr
    set_method(model, "to", lambda *_, **__: model)  # meta and fake weights cannot be moved
    built_models.append(model.requires_grad_(False).eval())
    return model


def build_text_encoders(path: Path, dtype: torch.dtype) -> list[nn.Module]:
    """Build the text encoders of a Diffusers folder that have a config, each of the class that the config names."""
    import transformers

    models = []
    # text_encoder, text_encoder_2 and so on, in this order.
    for file in sorted(path.glob("text_encoder*/config.json")):
        config = load_pretrained(AutoConfig, file.parent)
        model = _build_uninitialized(getattr(transformers, config.architectures[0]), config)
        models.append(_cast_and_freeze_model(model, dtype, [], []))
    return models


def _build_uninitialized(cls: Any, config: Any) -> Any:
    """Build a Transformers model without initialising its weights.

    Some initialisations (Siglip's) read values, which tensors on the meta device do not have.
    """
    with no_init_weights(), read_configs_without_kernels():
        model = cls._from_config(config)
    model.tie_weights()  # skipped together with the initialisation
    return model


def open_recipe_checkpoint(recipe: Recipe) -> tuple[Any, Any]:
    """Open a recipe's checkpoint without its weights; returns the family and the checkpoint.

    The recipe comes from `config_only_recipe`. Without data, the checkpoint keeps its own classes.
    """
    family, is_chat = get_family(recipe.model.family), recipe.model.family in CHAT_FAMILIES
    if not is_data_available(recipe) and recipe.data.classes is None and not is_chat:
        recipe = _add_classes(recipe, family.open(recipe.model))
    return family, family.open(recipe.model, recipe)


def is_data_available(recipe: Recipe) -> bool:
    """True if every data source of a recipe is a file or folder on this machine."""
    return all(Path(source.path).expanduser().exists() for source in recipe.data.all_sources)


def _add_classes(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    stored_names = checkpoint.info.class_names
    if stored_names is None:
        return recipe
    # Any valid class will do: only the number of rows and the shapes matter here.
    names = tuple(recipe.validation.prompts) or tuple(stored_names[:1]) or ("class",)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"classes": names})})


def reenable_device_moves(model: nn.Module) -> nn.Module:
    """Let a model without weights be moved to a device again, like any other model."""
    model.__dict__.pop("to", None)
    return model.eval()
